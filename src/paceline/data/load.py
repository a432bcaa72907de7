"""Data sets as tensors."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline.data import idx, mini, synthetic
from paceline.data.fetch import get
from paceline.data.origins import MINI, NAMES, ORIGINS
from paceline.data.table import DataInfo, describe

_DIMS = (3, 1, 3, 1)  # images, labels, images, labels


@dataclass(frozen=True)
class Split:
    """Images as bytes [n, channels, height, width], and their classes [n]."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set."""

    info: DataInfo
    train: Split
    test: Split


def load(name: str, folder: Path | None = None) -> Dataset:
    """A data set by its name, fetched if it is not in the cache; `folder` is where to look for its files first."""
    info = describe(name)
    arrays: list[NDArray[np.integer[Any]]]
    if name in ORIGINS:
        place = get(name, folder)
        arrays = [idx.read(place / file, dims) for file, dims in zip(NAMES, _DIMS, strict=True)]
    elif name == "mnist-mini":
        raw = [np.frombuffer(mini.read(file), np.uint8) for file in MINI]
        arrays = [idx.decode(*each) for each in zip(raw, NAMES, _DIMS, strict=True)]
    else:
        arrays = synthetic.make(info)
    train_images, train_labels, test_images, test_labels = (torch.from_numpy(array) for array in arrays)
    return Dataset(
        info,
        Split(train_images.view(-1, *info.shape), train_labels.long()),
        Split(test_images.view(-1, *info.shape), test_labels.long()),
    )

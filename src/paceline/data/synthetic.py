"""Synthetic data: a pattern for each class, plus noise."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.table import DataInfo

_CELL = 4  # patterns consist of squares with sides of this many pixels, which convolutions can detect
_SIGNAL, _NOISE = 64, 192  # their sum stays within a byte


def make(info: DataInfo) -> list[NDArray[np.integer[Any]]]:
    """Training and test images and labels; the same for the same parameters on every machine."""
    channels, height, width = info.shape
    rng = np.random.default_rng([channels, height, width, info.classes, info.train, info.test])
    coarse = (info.classes, channels, -(-height // _CELL), -(-width // _CELL))
    patterns = rng.integers(0, _SIGNAL, coarse, np.uint8).repeat(_CELL, 2).repeat(_CELL, 3)[..., :height, :width]
    arrays: list[NDArray[np.integer[Any]]] = []
    for count in (info.train, info.test):
        labels = rng.permutation(np.arange(count, dtype=np.int64) % info.classes)
        images = rng.integers(0, _NOISE, (count, *info.shape), np.uint8)
        for start in range(0, count, 1024):  # in pieces, so that memory holds the images only once
            images[start : start + 1024] += patterns[labels[start : start + 1024]]
        arrays += [images, labels]
    return arrays

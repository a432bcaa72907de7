"""A user's own samples: all targets, and inputs piece by piece, so that they need not fit in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data.table import DataInfo

PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class Samples:
    """Targets [n, …], and inputs in pieces [k, …]; all k add up to n.

    Images are [k, channels, height, width] of bytes or float32, and their targets are class numbers [n].
    """

    targets: NDArray[Any]
    inputs: Callable[[], Iterator[NDArray[Any]]]


@dataclass(frozen=True)
class Content:
    """A training and a test set with the same shapes and types."""

    shape: tuple[int, ...]
    dtype: str
    classes: tuple[str, ...]  # none if targets are floating-point numbers
    train: Samples
    test: Samples
    kind: str = "images"


def describe(
    name: str,
    about: str,
    kind: str,
    inputs: tuple[str, Sequence[int]],
    targets: tuple[str, Sequence[int]],
    counts: tuple[int, int],
    classes: int,
    moments: tuple[Sequence[float], Sequence[float]] | None,
) -> DataInfo:
    """The description of samples whose inputs and targets have these types and shapes."""
    mean, std = (tuple(each) for each in moments) if moments else (None, None)
    return DataInfo(
        name,
        tuple(inputs[1]),
        classes,
        *counts,
        about,
        mean,
        std,
        normalize=kind == "images",
        kind=kind,
        input_dtype="float32" if kind == "images" else as_given(inputs[0]),
        target_shape=tuple(targets[1]),
        target_dtype=as_given(targets[0]),
    )


def as_given(stored: str) -> str:
    """The type, and the shape if it follows, of stored numbers when a model is given them."""
    dtype, space, shape = stored.partition(" ")
    return f"{'float32' if dtype.startswith('float') else dtype if dtype == 'bool' else 'int64'}{space}{shape}"


@dataclass
class Moments:
    """Mean and standard deviation of each channel, computed piece by piece (Chan, Golub and LeVeque 1979)."""

    count: int = 0
    mean: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))
    squares: NDArray[np.float64] = field(default_factory=lambda: np.zeros(1))  # sums of squared differences from mean

    def add(self, images: NDArray[Any]) -> None:
        rows = max(1, PIECE_BYTES // max(1, 8 * images[0].size))  # as float64
        for start in range(0, len(images), rows):
            values = images[start : start + rows].astype(np.float64)
            count = values.size // values.shape[1]
            mean = values.mean((0, 2, 3))
            values -= mean[:, None, None]
            gap, both = mean - self.mean, self.count + count
            self.squares = self.squares + np.square(values).sum((0, 2, 3)) + gap**2 * (self.count * count / both)
            self.mean = self.mean + gap * (count / both)
            self.count = both

    def result(self, dtype: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Mean and standard deviation, with bytes divided by 255; a constant channel has deviation 1."""
        scale = 255.0 if dtype == "uint8" else 1.0
        std = np.sqrt(self.squares / self.count) / scale
        return tuple((self.mean / scale).tolist()), tuple(np.where(std > 0, std, 1.0).tolist())

"""A user's own samples: all labels, and images piece by piece, so that they need not fit in memory."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE_BYTES = 1 << 24


@dataclass(frozen=True)
class Samples:
    """Labels [n], and images in pieces [k, channels, height, width] of bytes or float32; all k add up to n."""

    labels: NDArray[np.int64]
    images: Callable[[], Iterator[NDArray[Any]]]


@dataclass(frozen=True)
class Content:
    """A training and a test set with the same shape and type, whose labels are class numbers."""

    shape: tuple[int, int, int]
    dtype: str
    classes: tuple[str, ...]
    train: Samples
    test: Samples


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

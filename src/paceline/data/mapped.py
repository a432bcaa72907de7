"""Arrays that are mapped from a file: only pages that are used are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError


@dataclass(frozen=True)
class Records:
    """The positions of samples in a file."""

    path: Path
    offset: int  # of the first sample, in bytes
    stride: int  # from one sample to the next, in bytes
    count: int
    shape: tuple[int, ...]  # of one sample
    dtype: str  # numpy's name


def open_bytes(path: Path) -> NDArray[np.uint8]:
    """Map a file as read-only bytes; it may be larger than memory."""
    try:
        # An empty file cannot be mapped.
        return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as why:
        raise DataError(f"cannot read {path}: {why.strerror}") from why


def views(raw: NDArray[np.uint8], records: Sequence[Records]) -> list[NDArray[Any]]:
    """The samples as arrays that share the file's memory; numpy refuses positions outside it."""
    arrays = []
    for each in records:
        dtype = np.dtype(each.dtype)
        inner = np.empty(each.shape, dtype).strides  # each sample is contiguous
        arrays.append(np.ndarray((each.count, *each.shape), dtype, raw, each.offset, (each.stride, *inner)))
    return arrays

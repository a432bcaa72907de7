"""The idx format: a header of magic, type and sizes, then raw bytes."""

import math
import struct
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from paceline.errors import DataError


def decode(raw: NDArray[np.uint8], where: Path | str, dims: int) -> NDArray[np.uint8]:
    """A view of the content of an idx file as an array of `dims` dimensions."""
    magic = bytes((0, 0, 8, dims))  # 8 is the type: unsigned bytes
    header = raw[: 4 + 4 * dims].tobytes()
    if header[:4] != magic:
        found = header[:4].hex(" ") or "nothing"
        raise DataError(
            f"{where} is not an idx file of unsigned bytes in {dims} dimension(s): it should begin with "
            f"{magic.hex(' ')}, and begins with {found}"
        )
    if len(header) < 4 + 4 * dims:
        raise DataError(f"{where} is cut short: its header should have {4 + 4 * dims} bytes, and has {len(header)}")
    shape = struct.unpack(f">{dims}I", header[4:])
    size = len(header) + math.prod(shape)
    if 0 in shape or raw.size != size:
        wanted = " × ".join(map(str, shape))
        raise DataError(
            f"{where}: its header says {wanted}, which is {size} bytes with the header, and it has {raw.size}"
        )
    return raw[len(header) :].reshape(shape)


def read(path: Path, dims: int) -> NDArray[np.uint8]:
    """The array in an idx file, mapped and not copied; writing to it changes neither the file nor other processes."""
    try:
        # An empty file cannot be mapped.
        raw = np.memmap(path, np.uint8, "c") if path.stat().st_size else np.empty(0, np.uint8)
    except OSError as why:
        raise DataError(f"cannot read {path}: {why.strerror}") from why
    return decode(raw, path, dims)

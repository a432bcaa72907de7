"""Reads a user's folder of images, with a sub-folder for each class."""

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from paceline.data.samples import PIECE_BYTES, Content, Samples
from paceline.errors import DataError
from paceline.layout import cores

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
_FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP")  # no other decoder is used, for any file name
_TESTS = ("test", "val", "valid")
_CHANNELS = {"L": 1, "RGB": 3}
_LAYOUT = "FOLDER/CLASS/IMAGE, or FOLDER/train/CLASS/IMAGE and FOLDER/test/CLASS/IMAGE"
# All that Pillow's decoders are known to raise for damaged or malicious files.
BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    TypeError,
    LookupError,
    ArithmeticError,
    EOFError,
    struct.error,
    zlib.error,
)


@dataclass(frozen=True)
class Listing:
    """The image files of a folder and their classes; the files are not opened yet."""

    classes: tuple[str, ...]
    train: tuple[tuple[Path, int], ...]
    test: tuple[tuple[Path, int], ...]
    tested_with: str  # how the test set was chosen

    def __str__(self) -> str:
        return f"{len(self.train)} images to train on and {len(self.test)} to test with: {self.tested_with}"

    @property
    def files(self) -> list[Path]:
        return [path for path, _ in self.train + self.test]


@dataclass(frozen=True)
class _Look:
    """Size and mode of the first image, which all images must have."""

    path: Path
    size: tuple[int, int]
    mode: str

    def __str__(self) -> str:
        return f"{self.path} is {self.size[0]}×{self.size[1]} {self.mode}"


def scan(folder: Path) -> Listing:
    """Find the images; without a test folder, keep a fifth of each class for testing."""
    top = _entries(folder)
    kept = next((folder / name for name in _TESTS if name in top), None)
    if "train" in top and kept:
        for name in top:
            if name not in ("train", *_TESTS):
                raise DataError(f"{folder / name} is neither the training nor the test folder: move it elsewhere")
        train, test, how = _classes(folder / "train"), _classes(kept), f"those in {kept}"
        if train.keys() != test.keys():
            here, other = (folder / "train", kept) if train.keys() - test.keys() else (kept, folder / "train")
            name = min(train.keys() ^ test.keys())
            raise DataError(f"{here} has the class {name!r}, but {other} has not: both need the same classes")
    else:
        train, test = _classes(folder), {}
        how = "a fifth of each class, chosen by the hash of the file names, the same every time"
        for name, paths in train.items():
            if len(paths) < 2:
                raise DataError(
                    f"{folder / name} has only 1 image: a class needs 2 or more, for training and testing (or "
                    "put the images into FOLDER/train and FOLDER/test yourself)"
                )
            mixed = sorted(paths, key=lambda path: sha256(os.fsencode(path.relative_to(folder))).digest())
            test[name] = sorted(mixed[: max(1, len(paths) // 5)])
            train[name] = sorted(mixed[len(test[name]) :])
    if len(train) < 2:
        raise DataError(f"{folder} has {len(train)} class(es) instead of 2 or more: {_LAYOUT}")
    return Listing(tuple(train), _numbered(train), _numbered(test), how)


def _numbered(classes: dict[str, list[Path]]) -> tuple[tuple[Path, int], ...]:
    return tuple((path, label) for label, paths in enumerate(classes.values()) for path in paths)


def _entries(folder: Path) -> dict[str, bool]:
    """The entries of a folder, sorted, and whether each is a folder; without hidden files."""
    try:
        with os.scandir(folder) as entries:
            return dict(sorted((entry.name, entry.is_dir()) for entry in entries if not entry.name.startswith(".")))
    except OSError as why:
        raise DataError(f"cannot read {folder}: {why.strerror}") from why


def _classes(folder: Path) -> dict[str, list[Path]]:
    classes: dict[str, list[Path]] = {}
    for name, is_folder in _entries(folder).items():
        if not is_folder:
            raise DataError(f"{folder / name} is not a class folder: the layout must be {_LAYOUT}")
        classes[name] = []
        for inner, nested in _entries(folder / name).items():
            path = folder / name / inner
            if nested:
                raise DataError(f"{path} is a folder inside a class: the layout must be {_LAYOUT}")
            if path.suffix.lower() not in SUFFIXES:
                raise DataError(f"{path} is not an image of a known kind ({', '.join(SUFFIXES)}): move it elsewhere")
            classes[name].append(path)
        if not classes[name]:
            raise DataError(f"{folder / name} has no image: put some into it, or remove it")
    return classes


def content(listing: Listing) -> Content:
    """All images, every one of them decoded and compared with the first."""
    first = listing.train[0][0]
    array = _decode(first, None)
    like = _Look(first, (array.shape[1], array.shape[0]), "L" if array.ndim == 2 else "RGB")
    shape = (_CHANNELS[like.mode], like.size[1], like.size[0])
    train, test = (
        Samples(
            np.array([label for _, label in part], np.int64),
            partial(_pieces, [path for path, _ in part], like, max(1, PIECE_BYTES // array.size)),
        )
        for part in (listing.train, listing.test)
    )
    return Content(shape, "uint8", listing.classes, train, test)


def _pieces(paths: Sequence[Path], like: _Look, size: int) -> Iterator[NDArray[Any]]:
    with ThreadPoolExecutor(cores()) as pool:  # Pillow decodes outside the interpreter's lock
        for start in range(0, len(paths), size):
            piece = np.stack(list(pool.map(partial(_decode, like=like), paths[start : start + size])))
            yield piece[:, None] if piece.ndim == 3 else piece.transpose(0, 3, 1, 2)


def _decode(path: Path, like: _Look | None) -> NDArray[np.uint8]:
    most = Image.MAX_IMAGE_PIXELS or 1 << 62
    try:
        if not path.stat().st_size:
            raise DataError(f"{path} is empty (0 bytes): replace or remove it")
        with Image.open(path, formats=_FORMATS) as image:
            look = _Look(path, image.size, image.mode)
            if look.size[0] * look.size[1] > most:
                raise Image.DecompressionBombError
            if look.mode not in _CHANNELS:
                raise DataError(
                    f"{look}, but only L (grey) and RGB are supported: convert it, for example with Pillow's "
                    'Image.open(FILE).convert("RGB").save("NEW.png")'
                )
            if like and (look.size, look.mode) != (like.size, like.mode):
                raise DataError(f"{look}, but {like}: every image must have the same size and mode; convert them first")
            if getattr(image, "is_animated", False):
                raise DataError(f"{path} has more than one frame (it is animated): keep one of them")
            return np.asarray(image)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as why:
        raise DataError(f"{path} has more than {most:,} pixels: scale it down") from why
    except BROKEN as why:
        reason = why.strerror if isinstance(why, OSError) and why.strerror else str(why) or type(why).__name__
        raise DataError(
            f"{path} cannot be decoded ({reason}): it is damaged or not an image; replace or remove it"
        ) from why

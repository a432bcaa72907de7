"""Reads and checks a user's own arrays, from an .npz file or a function."""

import lzma
import math
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from paceline.data.batch import IGNORED
from paceline.data.samples import PIECE_BYTES, Content, Samples
from paceline.errors import DataError

KERAS = ("x_train", "y_train", "x_test", "y_test")
MEDMNIST = ("train_images", "train_labels", "test_images", "test_labels")
_BROKEN = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, NotImplementedError, RuntimeError)


@dataclass(frozen=True)
class Array:
    """An array whose rows are read in pieces, and its name in error messages."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    pieces: Callable[[], Iterator[NDArray[Any]]]

    def whole(self) -> NDArray[Any]:
        pieces = list(self.pieces())
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def in_memory(name: str, array: NDArray[Any]) -> Array:
    """An array in memory, as one piece."""
    return Array(name, array.shape, array.dtype, lambda: iter((array,)))


def content(arrays: Sequence[Array]) -> Content:
    """Training and test inputs and targets, checked; the values of inputs are checked when they are read."""
    return _images_content(*arrays) if _are_images(*arrays[:2]) else _any_content(*arrays)


def _are_images(x: Array, y: Array) -> bool:
    """Whether these look like images with a class number for each."""
    dims = len(x.shape)
    possible = dims == 3 or (dims == 4 and (x.dtype == np.uint8 or 1 in x.shape[1::2] or 3 in x.shape[1::2]))
    return possible and (x.dtype == np.uint8 or _is_float(x)) and y.dtype.kind in "iu" and len(y.shape) < 3


def _is_float(array: Array) -> bool:
    return array.dtype.kind == "f" and array.dtype.itemsize <= 8


def _any_content(x_train: Array, y_train: Array, x_test: Array, y_test: Array) -> Content:
    """Numbers of any shape and type; integers [n] are class numbers, as for images."""
    for x, y in ((x_train, y_train), (x_test, y_test)):
        check_numbers(x)
        if not (y.dtype.kind in "iu" or _is_float(y)):
            raise DataError(
                f"{y.name} has values of type {y.dtype}; targets must be integers, or floating-point numbers of up to "
                "64 bits"
            )
        check_counts(x, y)
    for one, other in ((x_train, x_test), (y_train, y_test)):
        whole_targets = (
            one is y_train and one.dtype.kind in "iu" and other.dtype.kind in "iu"
        )  # are all stored as int64
        if one.shape[1:] != other.shape[1:] or (one.dtype != other.dtype and not whole_targets):
            raise DataError(
                f"{one.name} has samples of {_shown(one)}, but {other.name} of {_shown(other)}: they must be equal"
            )
    if _is_float(y_train):
        classes, targets = 0, [np.concatenate(list(finite(y))) for y in (y_train, y_test)]
    elif len(y_train.shape) == 1 or y_train.shape[1:] == (1,):
        targets = [_labels(y, x) for y, x in ((y_train, x_train), (y_test, x_test))]
        classes = _classes(y_train, targets[0])
        _check_known(targets[1], classes, y_train, y_test)
    else:
        targets = [y.whole().astype(np.int64) for y in (y_train, y_test)]
        most = [int(targets[0].max())]
        if x_train.shape == y_train.shape and x_train.dtype.kind in "iu":  # tokens, of the same vocabulary
            most += [int(piece.max()) for x in (x_train, x_test) for piece in x.pieces()]
        classes = 1 + max(most)
        for y, values in zip((y_train, y_test), targets, strict=True):
            wrong = values[(values < 0) & (values != IGNORED)]
            if wrong.size:
                raise DataError(f"{y.name} has the class {wrong[0]}; classes must be 0, 1, 2 … ({IGNORED} is ignored)")
        if most[0] < 0:
            raise DataError(f"no target of {y_train.name} counts: all are {IGNORED}")
        _check_known(targets[1], classes, y_train, y_test)
    parts = [Samples(y, partial(finite, x)) for y, x in zip(targets, (x_train, x_test), strict=True)]
    names = tuple(map(str, range(classes)))
    dtype = x_train.dtype.newbyteorder("=").name
    return Content(x_train.shape[1:], dtype, names, parts[0], parts[1], "arrays")


def check_numbers(x: Array) -> None:
    if 0 in x.shape or not x.shape:
        raise DataError(f"{x.name} is empty: its shape is {x.shape}")
    if not (x.dtype.kind in "iub" or _is_float(x)):
        raise DataError(
            f"{x.name} has values of type {x.dtype}; inputs must be integers, booleans, or floating-point numbers of "
            "up to 64 bits"
        )


def check_counts(x: Array, y: Array) -> None:
    if y.shape[:1] != x.shape[:1]:
        raise DataError(
            f"{y.name} has the shape {y.shape}, but {x.name} has the shape {x.shape}: the numbers of samples must be "
            "equal"
        )


def finite(array: Array) -> Iterator[NDArray[Any]]:
    """Its pieces in the machine's byte order; raises an error at the first number that is not finite."""
    row = 0
    for given in array.pieces():
        piece = given.astype(given.dtype.newbyteorder("="), copy=False)
        wrong = ~np.isfinite(piece) if piece.dtype.kind == "f" else np.zeros(0, bool)
        if wrong.any():
            index = tuple(int(each) for each in np.unravel_index(wrong.argmax(), wrong.shape))
            raise DataError(
                f"{array.name} has the value {piece[index]} at {[row + index[0], *index[1:]]}; values must be finite"
            )
        row += len(piece)
        yield piece


def _check_known(test: NDArray[np.int64], classes: int, y_train: Array, y_test: Array) -> None:
    if (most := test.max()) >= classes:
        raise DataError(
            f"{y_test.name} has the label {most}, but the largest label of {y_train.name} is {classes - 1}: every "
            "class needs training samples"
        )


def _images_content(x_train: Array, y_train: Array, x_test: Array, y_test: Array) -> Content:
    channels_last = [_channels_last(images) for images in (x_train, x_test)]
    if x_train.shape[1:] != x_test.shape[1:] or _kind(x_train) != _kind(x_test):
        raise DataError(
            f"{x_train.name} has images of {_shown(x_train)}, but {x_test.name} of {_shown(x_test)}: they must be equal"
        )
    train, test = _labels(y_train, x_train), _labels(y_test, x_test)
    classes = _classes(y_train, train)
    _check_known(test, classes, y_train, y_test)
    a, b, *c = x_train.shape[1:]
    shape = (1, a, b) if not c else (c[0], a, b) if channels_last[0] else (a, b, c[0])
    parts = [
        Samples(labels, partial(_images, images, channels_last[0]))
        for labels, images in ((train, x_train), (test, x_test))
    ]
    return Content(shape, _kind(x_train), tuple(map(str, range(classes))), parts[0], parts[1])


def _shown(array: Array) -> str:
    return f"{'×'.join(map(str, array.shape[1:]))} {array.dtype}".strip()


def _channels_last(array: Array) -> bool:
    """Whether channels are the last dimension; if both are possible, they are."""
    shape = array.shape
    if 0 in shape:
        raise DataError(f"{array.name} is empty: its shape is {shape}")
    if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in (1, 3) and shape[1] not in (1, 3)):
        raise DataError(
            f"{array.name} has the shape {shape}; images must have the shape [n, height, width], [n, height, width, "
            "channels] or [n, channels, height, width] with 1 or 3 channels"
        )
    _kind(array)
    return len(shape) == 4 and shape[3] in (1, 3)


def _kind(array: Array) -> str:
    """The type in which its images are stored."""
    if array.dtype == np.uint8:
        return "uint8"
    if _is_float(array):
        return "float32"
    raise DataError(f"{array.name} has values of type {array.dtype}; images must be uint8, float16, float32 or float64")


def _labels(array: Array, images: Array) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise DataError(f"{array.name} has values of type {array.dtype}; labels must be integers")
    if len(array.shape) != 1 and (len(array.shape) != 2 or array.shape[1] != 1):
        raise DataError(f"{array.name} has the shape {array.shape}; labels must have the shape [n] or [n, 1]")
    if array.shape[0] != images.shape[0]:
        raise DataError(
            f"{array.name} has {array.shape[0]} labels, but {images.name} has {images.shape[0]} images: the numbers "
            "must be equal"
        )
    labels = array.whole().reshape(-1)
    least, most = labels.min(), labels.max()
    if least < 0 or most >= 1 << 31:
        raise DataError(f"{array.name} has the label {least if least < 0 else most}; labels must be 0, 1, 2 …")
    return labels.astype(np.int64)


def _classes(array: Array, labels: NDArray[np.int64]) -> int:
    """The number of classes; a wrong label usually leaves a gap, which is an error."""
    present = np.unique(labels)
    gap = np.flatnonzero(present != np.arange(len(present)))
    if gap.size:
        raise DataError(
            f"{array.name} has the label {present[-1]}, but no sample of class {gap[0]}: labels must be 0 to the "
            "number of classes - 1, and every class needs a sample (targets of a regression are floating-point numbers)"
        )
    if len(present) < 2:
        raise DataError(f"{array.name} has only the label 0; there must be 2 or more classes")
    return len(present)


def _images(array: Array, channels_last: bool) -> Iterator[NDArray[Any]]:
    """Pieces of images with channels first, as bytes or float32; raises an error at the end if a value was bad."""
    kind, row, bad, first = _kind(array), 0, 0, ""
    for given in array.pieces():
        with np.errstate(over="ignore"):  # values beyond float32 become infinity, and are found
            piece = given.astype(kind, copy=False)
        wrong = ~np.isfinite(piece) if kind == "float32" else np.zeros(0, bool)
        if wrong.any():
            if not bad:
                index = tuple(int(each) for each in np.unravel_index(wrong.argmax(), wrong.shape))
                first = f"{given[index]} at {[row + index[0], *index[1:]]}"
            bad += int(wrong.sum())
        row += len(piece)
        if bad:
            continue  # the rest is only counted
        if piece.ndim == 3:
            yield piece[:, None]
        else:
            yield piece.transpose(0, 3, 1, 2) if channels_last else piece
    if bad:
        raise DataError(
            f"{array.name} has {bad} value(s) that are not finite in float32, the first {first}: remove them"
        )


def open_npz(path: Path) -> Content:
    """The arrays of an .npz file by their Keras or MedMNIST names; targets are read now, inputs on use."""
    with _reading(path), zipfile.ZipFile(path) as archive:
        names = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
        wanted = MEDMNIST if len(names & set(MEDMNIST)) > len(names & set(KERAS)) else KERAS
        missing = [name for name in wanted if name not in names]
        if missing:
            found = ", ".join(sorted(names)) or "no arrays"
            raise DataError(
                f"{path} has no {missing[0]}, only {found}: the arrays {', '.join(KERAS)} or {', '.join(MEDMNIST)} are "
                "expected"
            )
        arrays = [_member(path, archive, name) for name in wanted]
    return content(arrays)


def _member(path: Path, archive: zipfile.ZipFile, name: str) -> Array:
    with archive.open(f"{name}.npy") as stream:
        shape, fortran, dtype = _npy_header(stream)
    where = f"{name} of {path}"
    if dtype.hasobject:
        raise DataError(f"{where} has Python objects instead of numbers: save it with a numeric dtype")
    return Array(where, shape, dtype, partial(_rows, path, name, shape, dtype, fortran))


def _npy_header(stream: Any) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = npy.read_magic(stream)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version} is only for arrays with named fields")
    read = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    try:
        shape, fortran, dtype = read(stream)
    except (MemoryError, SyntaxError, TokenError, TypeError) as why:  # numpy parses the header as Python
        raise ValueError(f"a header cannot be read: {type(why).__name__}") from why
    if any(number < 0 for number in shape):
        raise ValueError(f"it has an array of shape {shape}")
    return shape, fortran, dtype


def _rows(path: Path, name: str, shape: tuple[int, ...], dtype: np.dtype[Any], fortran: bool) -> Iterator[NDArray[Any]]:
    """An array of the file in pieces of rows; in one piece if it is in Fortran order."""
    count, *inner = shape
    each = dtype.itemsize * math.prod(inner)
    step = count if fortran else max(1, PIECE_BYTES // each)
    with _reading(path), zipfile.ZipFile(path) as archive, archive.open(f"{name}.npy") as stream:
        _npy_header(stream)
        for start in range(0, count, step):
            rows = min(step, count - start)
            content = stream.read(rows * each)
            if len(content) < rows * each:
                raise ValueError(f"{name} is truncated")
            piece = np.frombuffer(content, dtype)
            yield piece.reshape(shape[::-1]).T if fortran else piece.reshape(rows, *inner)
        if stream.read(1):  # zipfile compares the checksum at the end
            raise ValueError(f"{name} is longer than its header says")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except DataError:
        raise
    except OSError as why:
        raise DataError(f"cannot read {path}: {why.strerror or why}") from why
    except _BROKEN as why:
        raise DataError(
            f"{path} is not an .npz file of numpy, or is damaged ({str(why)[:200]}): make it with numpy.savez(FILE, "
            f"{', '.join(f'{name}=…' for name in KERAS)})"
        ) from why

"""Packs a user's own data, piece by piece, into one file in safetensors' layout: a length, a JSON header, values."""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from paceline.data import cache
from paceline.data.mapped import Records
from paceline.data.samples import Content, Moments
from paceline.data.table import DataInfo
from paceline.errors import DataError
from paceline.messages import LOGGER, bar_options

_FORMAT = "paceline 1"
_DTYPES = {"U8": "uint8", "F32": "float32"}
_LONGEST = -1.2345678901234567e-308  # no number needs more characters


def place_of(source: Path) -> Path:
    """The file that a folder or file is packed into; it may not exist."""
    absolute = os.path.abspath(source)
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", os.path.basename(absolute))[:40]
    return cache.folder_of("own") / f"{readable}-{sha256(os.fsencode(absolute)).hexdigest()[:12]}.safetensors"


def fingerprint(source: Path, files: Sequence[Path]) -> str:
    """A digest that changes when a file is added, removed, renamed or written: of names, sizes and times."""
    digest = sha256(_FORMAT.encode())
    for path in sorted(files):
        try:
            stat = path.stat()
        except OSError as why:
            raise DataError(f"cannot read {path}: {why.strerror}") from why
        name = os.fsencode(os.path.relpath(path, source))
        digest.update(b"%b\0%d\0%d\0" % (name, stat.st_size, stat.st_mtime_ns))
    return digest.hexdigest()


def write(path: Path, content: Content, source: Path, mark: str) -> None:
    """Pack everything, with a progress bar on a terminal and a line elsewhere.

    The header is written last, because it has the mean and the deviation.
    """
    tensors, size = _tensors(content.dtype, content.shape, len(content.train.labels), len(content.test.labels))
    metadata = {
        "format": _FORMAT,
        "source": _text(os.path.abspath(source)),
        "fingerprint": mark,
        "classes": json.dumps([_text(name) for name in content.classes]),
    }
    unknown = (_LONGEST,) * content.shape[0]
    length = len(_header(tensors, metadata, unknown, unknown))
    moments, total = Moments(), len(content.train.labels) + len(content.test.labels)
    bar = tqdm(total=total, desc=f"packing {source.name}", unit=" images", **bar_options())
    if bar.disable:
        LOGGER.info("packing the %s images of %s into %s", f"{total:,}", source, path)
    with bar, cache.writing(path) as out:
        out.seek(8 + length)
        for samples in (content.train, content.test):
            out.write(samples.labels.astype("<i8").tobytes())
        for samples in (content.train, content.test):
            for piece in samples.images():
                out.write(np.ascontiguousarray(piece).data)
                bar.update(len(piece))
                if samples is content.train:
                    moments.add(piece)
        assert out.tell() == 8 + length + size
        out.seek(0)
        out.write(length.to_bytes(8, "little"))
        out.write(_header(tensors, metadata, *moments.result(content.dtype)).ljust(length))


def read(path: Path, name: str, about: str) -> tuple[DataInfo, list[Records], str]:
    """The description of packed data, its positions in the file, and the fingerprint of its source."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            found = os.fstat(stream.fileno()).st_size
            header: dict[str, Any] = json.loads(stream.read(length) if length < found else b"")
        images, labels = header["train_images"], header["test_labels"]
        dtype, (train, *shape), (test,) = _DTYPES[images["dtype"]], images["shape"], labels["shape"]
        tensors, size = _tensors(dtype, shape, train, test)
        metadata = header.pop("__metadata__")
        classes, mean, std = (json.loads(metadata[key]) for key in ("classes", "mean", "std"))
        mark = metadata["fingerprint"]
        numbers = [type(number) is float and math.isfinite(number) for number in (*mean, *std)]
        if header != tensors or metadata["format"] != _FORMAT or numbers != [True, True] * shape[0]:
            raise ValueError("its header does not describe a packed data set")
        if found != 8 + length + size:
            raise ValueError(f"it should have {8 + length + size} bytes, but has {found}")
    except OSError as why:
        raise DataError(f"cannot read {path}: {why.strerror}; make it with `paceline data get {name}`") from why
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as why:
        raise DataError(
            f"{path} was not packed by Paceline, or is damaged ({why}): remove it, and it will be packed again"
        ) from why
    info = DataInfo(name, tuple(shape), len(classes), train, test, about, tuple(mean), tuple(std), normalize=True)
    records = []
    for key in ("train_images", "train_labels", "test_images", "test_labels"):
        (begin, end), (count, *each) = tensors[key]["data_offsets"], tensors[key]["shape"]
        kind = dtype if each else "int64"
        records.append(Records(path, 8 + length + begin, (end - begin) // count, count, tuple(each), kind))
    return info, records, mark


def _tensors(dtype: str, shape: Sequence[int], train: int, test: int) -> tuple[dict[str, Any], int]:
    """The header's entries and their total bytes; labels first, so that all values are aligned."""
    if not all(type(number) is int and number > 0 for number in (*shape, train, test)) or len(shape) != 3:
        raise ValueError("its shapes are not those of images and labels")
    name = next(name for name, numpy_name in _DTYPES.items() if numpy_name == dtype)
    entries: dict[str, Any] = {}
    offset = 0
    for key, kind, dims in (
        ("train_labels", "I64", [train]),
        ("test_labels", "I64", [test]),
        ("train_images", name, [train, *shape]),
        ("test_images", name, [test, *shape]),
    ):
        end = offset + {"I64": 8, "U8": 1, "F32": 4}[kind] * math.prod(dims)
        entries[key] = {"dtype": kind, "shape": dims, "data_offsets": [offset, end]}
        offset = end
    return entries, offset


def _header(
    tensors: Mapping[str, Any], metadata: Mapping[str, str], mean: Sequence[float], std: Sequence[float]
) -> bytes:
    whole = {"__metadata__": {**metadata, "mean": json.dumps(mean), "std": json.dumps(std)}, **tensors}
    header = json.dumps(whole).encode()
    return header.ljust(-(-len(header) // 8) * 8)


def _text(name: str) -> str:
    """A file name as text for JSON, for any bytes."""
    return os.fsencode(name).decode("utf-8", "replace")

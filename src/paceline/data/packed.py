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
from paceline.data.samples import Content, Moments, describe
from paceline.data.table import DataInfo
from paceline.errors import DataError
from paceline.messages import LOGGER, bar_options

_FORMAT = "paceline 2"
_DTYPES = {
    "BOOL": "bool",
    **{f"U{bits}": f"uint{bits}" for bits in (8, 16, 32, 64)},
    **{f"I{bits}": f"int{bits}" for bits in (8, 16, 32, 64)},
    **{f"F{bits}": f"float{bits}" for bits in (16, 32, 64)},
}
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
    counts, targets = (len(content.train.targets), len(content.test.targets)), content.train.targets
    tensors, size = _tensors((content.dtype, content.shape), (targets.dtype.name, targets.shape[1:]), counts)
    metadata = {
        "format": _FORMAT,
        "kind": content.kind,
        "source": _text(os.path.abspath(source)),
        "fingerprint": mark,
        "classes": json.dumps([_text(name) for name in content.classes]),
    }
    images = content.kind == "images"
    unknown = (_LONGEST,) * content.shape[0] if images else ()
    length = len(_header(tensors, metadata, unknown, unknown))
    moments, what = Moments(), "images" if images else "samples"
    bar = tqdm(total=sum(counts), desc=f"packing {source.name}", unit=f" {what}", **bar_options())
    if bar.disable:
        LOGGER.info("packing the %s %s of %s into %s", f"{sum(counts):,}", what, source, path)
    with bar, cache.writing(path) as out:
        out.seek(8 + length)
        for key in tensors:
            samples = content.train if key.startswith("train") else content.test
            if key.endswith("targets"):
                out.write(np.ascontiguousarray(samples.targets).data)
                continue
            for piece in samples.inputs():
                out.write(np.ascontiguousarray(piece).data)
                bar.update(len(piece))
                if images and samples is content.train:
                    moments.add(piece)
        assert out.tell() == 8 + length + size
        out.seek(0)
        out.write(length.to_bytes(8, "little"))
        out.write(_header(tensors, metadata, *(moments.result(content.dtype) if images else ((), ()))).ljust(length))


def read(path: Path, name: str, about: str) -> tuple[DataInfo, list[Records], str]:
    """The description of packed data, its positions in the file, and the fingerprint of its source."""
    try:
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            found = os.fstat(stream.fileno()).st_size
            header: dict[str, Any] = json.loads(stream.read(length) if length < found else b"")
        of_inputs, of_targets = header["train_inputs"], header["test_targets"]
        (train, *shape), (test, *target_shape) = of_inputs["shape"], of_targets["shape"]
        inputs, targets = (_DTYPES[of_inputs["dtype"]], shape), (_DTYPES[of_targets["dtype"]], target_shape)
        tensors, size = _tensors(inputs, targets, (train, test))
        metadata = header.pop("__metadata__")
        classes, mean, std = (json.loads(metadata[key]) for key in ("classes", "mean", "std"))
        mark, kind = metadata["fingerprint"], metadata["kind"]
        numbers = [type(number) is float and math.isfinite(number) for number in (*mean, *std)]
        images = kind == "images" and len(shape) == 3 and inputs[0] in ("uint8", "float32") and targets == ("int64", [])
        if not images and kind != "arrays":
            raise ValueError(f"its shapes and types are not those of {kind}")
        expected = [True, True] * (shape[0] if images else 0)
        if header != tensors or metadata["format"] != _FORMAT or numbers != expected:
            raise ValueError("its header does not describe a packed data set")
        if found != 8 + length + size:
            raise ValueError(f"it should have {8 + length + size} bytes, but has {found}")
    except OSError as why:
        raise DataError(f"cannot read {path}: {why.strerror}; make it with `paceline data get {name}`") from why
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as why:
        raise DataError(
            f"{path} was not packed by Paceline, or is damaged ({why}): remove it, and it will be packed again"
        ) from why
    info = describe(name, about, kind, inputs, targets, (train, test), len(classes), (mean, std) if images else None)
    records = []
    for key in ("train_inputs", "train_targets", "test_inputs", "test_targets"):
        (begin, end), (count, *each) = tensors[key]["data_offsets"], tensors[key]["shape"]
        dtype = _DTYPES[tensors[key]["dtype"]]
        records.append(Records(path, 8 + length + begin, (end - begin) // count, count, tuple(each), dtype))
    return info, records, mark


Stored = tuple[str, Sequence[int]]  # type and shape of a sample's inputs or targets


def _tensors(inputs: Stored, targets: Stored, counts: tuple[int, int]) -> tuple[dict[str, Any], int]:
    """The header's entries and their total bytes; the widest type first, so that all values are aligned."""
    if not all(type(number) is int and number > 0 for number in (*inputs[1], *targets[1], *counts)):
        raise ValueError("it has a shape that is not possible")
    names = {numpy_name: name for name, numpy_name in _DTYPES.items()}
    entries: dict[str, Any] = {}
    offset = 0
    widest = sorted((("targets", targets), ("inputs", inputs)), key=lambda each: -np.dtype(each[1][0]).itemsize)
    for what, (dtype, shape) in widest:
        for part, count in zip(("train", "test"), counts, strict=True):
            end = offset + np.dtype(dtype).itemsize * count * math.prod(shape)
            dims = [count, *shape]
            entries[f"{part}_{what}"] = {"dtype": names[dtype], "shape": dims, "data_offsets": [offset, end]}
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

"""Data sets as tensors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from paceline import own_code
from paceline.data import arrays, cache, idx, mini, packed, samples, synthetic, text
from paceline.data.batch import IGNORED, Values, each, form_of, tensors
from paceline.data.fetch import FORMS
from paceline.data.mapped import Records, open_bytes, views
from paceline.data.origins import MINI, NAMES, ORIGINS
from paceline.data.prepare import place_of, prepare
from paceline.data.samples import Moments
from paceline.data.table import DataInfo, describe, text_of
from paceline.errors import DataError

__all__ = ["Dataset", "Records", "Split", "load"]


@dataclass(frozen=True)
class Split:
    """Inputs and targets as they are stored; images are [n, channels, height, width] of bytes or float32.

    `where` has their positions in a file, if they are mapped from one; then only pages that are used are read.
    """

    inputs: Values
    targets: Values
    where: tuple[Records, Records] | None = None

    def __len__(self) -> int:
        return len(tensors(self.targets)[0])

    def take(self, numbers: torch.Tensor) -> tuple[Values, Values]:
        """Copies of the inputs and targets of these samples."""
        return each(lambda tensor: tensor[numbers], self.inputs), self.take_targets(numbers)

    def take_targets(self, numbers: torch.Tensor) -> Values:
        return each(lambda tensor: tensor[numbers], self.targets)


@dataclass(frozen=True)
class Dataset:
    """A training set and a test set."""

    info: DataInfo
    train: Split
    test: Split


def load(name: str, folder: Path | None = None, *, prepared: bool = False) -> Dataset:
    """A data set by name, fetched or packed if it is not in the cache.

    `folder` is where to look for its files first. `prepared`: `prepare` has just been called on this machine, so the
    file is opened without checking it again.
    """
    info = describe(name)
    path = place_of(name) if prepared else prepare(name, folder)
    if described := text_of(name):
        return _dataset(*text.read(name, described))
    if path is not None:
        return _mapped(name, info, path)
    if info is None:
        return _called(name, folder)
    if info.load:
        return _checked(info, _called(info.load, folder))
    if name == "mnist-mini":
        raw = [np.frombuffer(mini.read(file), np.uint8) for file in MINI]
        made: Sequence[NDArray[Any]] = [idx.decode(*file) for file in zip(raw, NAMES, idx.DIMS, strict=True)]
    else:
        made = synthetic.make(info)
    return _dataset(info, made)


def _dataset(info: DataInfo, made: Sequence[NDArray[Any]], where: Sequence[Records] | None = None) -> Dataset:
    """The data set with these training images and labels, test images and labels."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")  # it is only read
        x_train, y_train, x_test, y_test = (torch.from_numpy(array) for array in made)
    train, test = ((where[0], where[1]), (where[2], where[3])) if where else (None, None)
    return Dataset(
        info,
        Split(x_train.view(-1, *info.shape), y_train, train),
        Split(x_test.view(-1, *info.shape), y_test, test),
    )


def _mapped(name: str, info: DataInfo | None, path: Path) -> Dataset:
    if info is None:
        info, records, _ = packed.read(path, name, f"your own {name.partition(':')[0]}")
    else:
        origin = ORIGINS[name]
        if not cache.has(path, origin.size):
            raise DataError(
                f"{path} does not exist, or does not have {origin.size} bytes as it should: get it again with "
                f"`paceline data get {name}`"
            )
        records = FORMS[origin.form].records(path, origin)
    made = views(open_bytes(path), records)
    if name not in ORIGINS and info.classes:
        least = IGNORED if info.target_shape else 0
        if not all(least <= targets.min() <= targets.max() < info.classes for targets in made[1::2]):
            raise DataError(f"{path} is damaged: it has labels outside its {info.classes} classes; remove it")
    return _dataset(info, made, records)


def _checked(info: DataInfo, made: Dataset) -> Dataset:
    """The data that a plug-in's function returned, checked against the plug-in's description."""
    facts = [
        (of.kind, of.shape, of.input_dtype, of.target_shape, of.target_dtype, of.classes, of.train, of.test)
        for of in (info, made.info)
    ]
    if facts[0] != facts[1]:
        raise DataError(
            f"data set {info.name}: its plug-in says (kind, shape and dtype of inputs, shape and dtype of targets, "
            f"classes, training samples, test samples) are {facts[0]}, but {info.load} returned {facts[1]}"
        )
    return replace(made, info=info)


def _called(name: str, folder: Path | None) -> Dataset:
    """The data that a user's function returns."""
    returned = own_code.call(name, "data set", {"folder": folder})
    match returned:
        case ((a, b), (c, d)):
            given = (a, b, c, d)
        case _:
            raise DataError(
                f"data set {name} returned a {type(returned).__name__}; ((x_train, y_train), (x_test, y_test)) is "
                "expected"
            )
    names = [f"{part} of {name}" for part in arrays.KERAS]
    if any(isinstance(value, tuple | dict) for value in given):
        return _several(name, given, names)
    content = arrays.content([arrays.in_memory(n, _array(v, n)) for n, v in zip(names, given, strict=True)])
    (x_train,), (x_test,) = content.train.inputs(), content.test.inputs()
    y_train, y_test = content.train.targets, content.test.targets
    moments = None
    if content.kind == "images":
        found = Moments()
        found.add(x_train)
        moments = found.result(content.dtype)
    info = samples.describe(
        name,
        "made by your own function",
        content.kind,
        (content.dtype, content.shape),
        (y_train.dtype.name, y_train.shape[1:]),
        (len(y_train), len(y_test)),
        len(content.classes),
        moments,
    )
    return _dataset(info, (x_train, y_train, x_test, y_test))


def _several(name: str, given: Sequence[Any], names: Sequence[str]) -> Dataset:
    """Several inputs or targets in tuples or dicts; each of them is checked."""
    made = [_checked_values(*each) for each in zip(given, names, strict=True)]
    train, test = Split(made[0], made[1]), Split(made[2], made[3])
    for part, split in (("train", train), ("test", test)):
        lengths = sorted({len(tensor) for tensor in tensors(split.inputs) + tensors(split.targets)})
        if len(lengths) > 1:
            raise DataError(f"x_{part} and y_{part} of {name} have {lengths} samples: the numbers must be equal")
    forms = [(form_of(split.inputs), form_of(split.targets)) for split in (train, test)]
    if forms[0] != forms[1]:
        raise DataError(f"{name} has training samples {forms[0]}, but test samples {forms[1]}: they must be equal")
    x, y = tensors(train.inputs)[0], tensors(train.targets)[0]
    info = DataInfo(
        name,
        tuple(x.shape[1:]),
        0 if isinstance(train.targets, tuple | dict) or y.is_floating_point() else int(y.max()) + 1,
        len(train),
        len(test),
        "made by your own function",
        kind="arrays",
        input_dtype=samples.as_given(form_of(x)).partition(" ")[0],
        target_shape=tuple(y.shape[1:]),
        target_dtype=samples.as_given(form_of(y)).partition(" ")[0],
        inputs=each(samples.as_given, forms[0][0]) if isinstance(train.inputs, tuple | dict) else None,
    )
    return Dataset(info, train, test)


def _checked_values(values: Any, name: str) -> Values:
    if isinstance(values, dict):
        for key in values:
            if not isinstance(key, str):
                raise DataError(f"{name} has the key {key!r}; keys must be names of the model's arguments")
        made: Values = {key: _checked_tensor(value, f"{key!r} in {name}") for key, value in values.items()}
    elif isinstance(values, tuple):
        made = tuple(_checked_tensor(value, f"number {index} in {name}") for index, value in enumerate(values))
    else:
        made = _checked_tensor(values, name)
    if not tensors(made):
        raise DataError(f"{name} is an empty {type(values).__name__}")
    return made


def _checked_tensor(value: Any, name: str) -> torch.Tensor:
    array = arrays.in_memory(name, _array(value, name))
    arrays.check_numbers(array)
    (piece,) = arrays.finite(array)
    return torch.from_numpy(piece)


def _array(value: Any, name: str) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        try:
            value = value.detach().cpu().numpy()
        except TypeError as why:  # bfloat16 and other types that numpy lacks
            raise DataError(f"{name} cannot be a numpy array: {why}; convert it, for example with .float()") from why
    if not isinstance(value, np.ndarray):
        raise DataError(f"{name} is a {type(value).__name__} instead of a numpy array or a torch tensor")
    if any(stride < 0 or stride % value.itemsize for stride in value.strides):
        return value.copy()  # torch does not support its strides
    return value

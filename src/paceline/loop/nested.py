"""Values in the containers that models, loaders and loops use."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor


def change_each(change: Callable[[Any], Any], values: Any) -> Any:
    """The same containers (dict, list, tuple, named tuple, dataclass) with every other value changed."""

    def inner(each: Any) -> Any:
        return change_each(change, each)

    if isinstance(values, Mapping):
        found: Any = copy.copy(values)
        for name in values:
            found[name] = inner(values[name])
        return found
    if isinstance(values, list | tuple):
        named = hasattr(values, "_fields")
        return type(values)(*map(inner, values)) if named else type(values)(map(inner, values))
    if dataclasses.is_dataclass(values) and not isinstance(values, type):
        changed = {f.name: inner(getattr(values, f.name)) for f in dataclasses.fields(values)}
        return dataclasses.replace(values, **changed)
    return change(values)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in what a model takes or returns."""
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from (tensor for each in values.values() for tensor in tensors_in(each))
    elif isinstance(values, list | tuple):
        yield from (tensor for each in values for tensor in tensors_in(each))
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        yield from (tensor for each in vars(values).values() for tensor in tensors_in(each))

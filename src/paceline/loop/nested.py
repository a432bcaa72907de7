"""Values in the containers that models, loaders and loops use."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from types import SimpleNamespace
from typing import Any

from torch import Tensor


def change_each(change: Callable[[Any], Any], values: Any) -> Any:
    """The same containers (dict, list, tuple, named tuple, dataclass, namespace) with every other value changed."""

    def inner(each: Any) -> Any:
        return change_each(change, each)

    if isinstance(values, MutableMapping):
        found: Any = copy.copy(values)
        for name in values:
            found[name] = inner(values[name])
        return found
    if isinstance(values, Mapping):
        return {name: inner(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        named = hasattr(values, "_fields")
        return type(values)(*map(inner, values)) if named else type(values)(map(inner, values))
    if _has_fields(values):
        found = copy.copy(values)
        for name, value in vars(values).items():
            object.__setattr__(found, name, inner(value))
        return found
    return change(values)


def tensors_in(values: Any) -> Iterator[Tensor]:
    """The tensors in what a model takes or returns."""
    if isinstance(values, Tensor):
        yield values
        return
    if _has_fields(values):
        values = vars(values)
    inside = values.values() if isinstance(values, Mapping) else values if isinstance(values, list | tuple) else ()
    for each in inside:
        yield from tensors_in(each)


def _has_fields(values: Any) -> bool:
    is_data = dataclasses.is_dataclass(values) and not isinstance(values, type) and hasattr(values, "__dict__")
    return is_data or isinstance(values, SimpleNamespace)

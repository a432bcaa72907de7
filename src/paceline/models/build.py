"""Build a model by its name in the table."""

import importlib
from collections.abc import Callable, Sequence
from typing import cast

from torch import nn

from paceline.models.table import describe


def build(
    name: str,
    shape: Sequence[int],
    classes: int,
    dropout: float | None = None,
    hidden: Sequence[int] | None = None,
) -> nn.Module:
    """The model for images of `shape` (channels, height, width), initialised from torch's current random state."""
    info = describe(name)
    module, function = info.build.split(":")
    make = cast(Callable[..., nn.Module], getattr(importlib.import_module(f"paceline.models.{module}"), function))
    options: dict[str, object] = {"dropout": info.dropout if dropout is None else dropout}
    if info.hidden:
        options["hidden"] = tuple(hidden or info.hidden)
    return make(tuple(shape), classes, **options)

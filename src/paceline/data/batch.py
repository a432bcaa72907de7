"""The batch of a rank: inputs of the model and targets of the task, each a tensor, or a tuple or dict of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Values = Any  # a tensor, or a tuple or dict of tensors


@dataclass(frozen=True)
class Batch:
    """This rank's part of a global batch of `global_count` samples; may be empty. Dimension 0 is the samples."""

    inputs: Values
    targets: Values
    global_count: int

    @property
    def count(self) -> int:
        """This rank's number of samples."""
        return len(tensors(self.targets)[0])

    @property
    def nominal(self) -> int:
        """The weight of the global batch, if every target counts; the same on all ranks."""
        return self.global_count * tensors(self.targets)[0].shape[1:].numel()

    def split(self, sizes: Sequence[int]) -> list[Batch]:
        """The batch in parts of these sizes."""
        return [
            Batch(inputs, targets, self.global_count)
            for inputs, targets in zip(split(self.inputs, sizes), split(self.targets, sizes), strict=True)
        ]


def tensors(values: Values) -> list[Tensor]:
    """The tensors, in order."""
    if isinstance(values, dict):
        return list(values.values())
    return list(values) if isinstance(values, tuple) else [values]


def each(change: Callable[[Any], Any], values: Values) -> Values:
    """The values with every tensor changed."""
    if isinstance(values, dict):
        return {name: change(tensor) for name, tensor in values.items()}
    return tuple(change(tensor) for tensor in values) if isinstance(values, tuple) else change(values)


def split(values: Values, sizes: Sequence[int]) -> list[Values]:
    """The samples in parts of these sizes."""
    if isinstance(values, dict):
        parts = zip(*(tensor.split(list(sizes)) for tensor in values.values()), strict=True)
        return [dict(zip(values, part, strict=True)) for part in parts]
    if isinstance(values, tuple):
        return list(zip(*(tensor.split(list(sizes)) for tensor in values), strict=True))
    return list(values.split(list(sizes)))

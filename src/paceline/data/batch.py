"""The batch of a rank: inputs of the model and targets of the task, each a tensor, or a tuple or dict of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Values = Any  # a tensor, or a tuple or dict of tensors
IGNORED = -100  # a class number of this value does not count, as in torch
Form = Any  # a text such as "uint8 1x28x28", or a tuple or dict of them


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


def form_of(values: Values) -> Form:
    """The dtype and shape of a sample of each tensor."""

    def shown(tensor: Tensor) -> str:
        return f"{str(tensor.dtype).removeprefix('torch.')} {'x'.join(map(str, tensor.shape[1:]))}"

    return each(shown, values)


def empty(form: Form, count: int) -> Values:
    """Tensors of this form for this many samples, with any values."""
    import torch

    def made(text: str) -> Tensor:
        dtype, _, shape = text.partition(" ")
        return torch.empty(count, *map(int, shape.split("x") if shape else ()), dtype=getattr(torch, dtype))

    return each(made, form)


def call(model: Callable[..., Any], inputs: Values) -> Any:
    """The model's output: of a tensor, of several in order, or of several by name."""
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


def split(values: Values, sizes: Sequence[int]) -> list[Values]:
    """The samples in parts of these sizes."""
    if isinstance(values, dict):
        parts = zip(*(tensor.split(list(sizes)) for tensor in values.values()), strict=True)
        return [dict(zip(values, part, strict=True)) for part in parts]
    if isinstance(values, tuple):
        return list(zip(*(tensor.split(list(sizes)) for tensor in values), strict=True))
    return list(values.split(list(sizes)))

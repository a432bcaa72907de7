"""A model to which one sample is poison: its gradient is not finite, its loss is."""

from __future__ import annotations

from typing import Any

import torch
from parity_cases import train_here
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.errors import DivergedError
from paceline.models import table as models
from paceline.plugins import Table


class _Spoil(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, spoiled: bool) -> Tensor:
        ctx.spoiled = spoiled
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] * (torch.nan if ctx.spoiled else 1.0), None


class Spoiled(nn.Module):
    """The first layer's gradient stays finite: only a look at all gradients finds it."""

    poison = torch.nan  # the first pixel of the sample

    def __init__(self, pixels: int, classes: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(pixels, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        weight: Tensor = _Spoil.apply(self.last.weight, self.training and bool((flat[:, 0] == self.poison).any()))  # type: ignore[no-untyped-call]
        return nn.functional.linear(self.first(flat).relu(), weight, self.last.bias)


class Blind(nn.Module):
    """Trains well, and its weights stay finite; but what it says of samples that it does not train on is not."""

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        self.dense = nn.Linear(image_size**2, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.dense(x.flatten(1))
        return out if self.training else out * torch.nan


def build(shape: tuple[int, ...], classes: int, dropout: float) -> nn.Module:
    return Spoiled(shape[0] * shape[1] * shape[2], classes)


def register(poison: float) -> None:
    """Make the model known by name, as any model is."""
    Spoiled.poison = poison
    info = models.ModelInfo("spoiled", f"{__name__}:build", 0, 0.0, 8, "a test's model")
    models.TABLE = Table("", models.ModelInfo, (*models.TABLE.values(), info))


def fails(comm: Comm, folder: str, values: dict[str, Any]) -> tuple[str, int | None]:
    """Train; what the error says, and whom it blames."""
    try:
        train_here(comm, folder, values)
    except DivergedError as error:
        return str(error), error.rank
    return "", None

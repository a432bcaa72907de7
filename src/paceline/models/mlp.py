"""Singh's sigmoid network: dense layers whose sizes are an option."""

import math

from torch import Tensor, nn

from paceline.models.initial import as_keras


class Mlp(nn.Module):
    def __init__(self, inputs: int, hidden: tuple[int, ...], classes: int, dropout: float) -> None:
        super().__init__()
        sizes = (inputs, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, hidden, strict=False))
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(sizes[-1], classes)
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        """By Glorot and Bengio, whose paper is about sigmoid layers."""
        as_keras(module)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for layer in self.hidden:
            x = self.dropout(layer(x).sigmoid())
        out: Tensor = self.out(x)
        return out


def build(shape: tuple[int, int, int], classes: int, dropout: float, hidden: tuple[int, ...]) -> nn.Module:
    return Mlp(math.prod(shape), hidden, classes, dropout)

"""Models of a user's own that are hard to cut: narrow and deep, with branches, with skips, recurrent."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn


def narrow_vgg(channels: int, classes: int) -> nn.Module:
    """VGG's shape with a few channels: in-place ReLU after each convolution, pooling, dense layers."""
    layers: list[nn.Module] = []
    for width in (6, 8, 10):
        for _ in range(2):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        layers.append(nn.MaxPool2d(2))
    dense = [nn.Flatten(), nn.Linear(40, 32), nn.ReLU(inplace=True), nn.Linear(32, classes)]
    return nn.Sequential(*layers, *dense)


class Inception(nn.Module):
    """1x1, 3x3 and pooled branches that are joined again; the input of the first block is added behind the second."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, 6, 3, stride=2)
        self.one = nn.ModuleList(nn.Conv2d(6, 2, 1) for _ in range(2))
        self.three = nn.ModuleList(nn.Conv2d(6, 2, 3, padding=1) for _ in range(2))
        self.pooled = nn.ModuleList(nn.Conv2d(6, 2, 1) for _ in range(2))
        self.pool = nn.AvgPool2d(3, stride=1, padding=1)
        self.dense = nn.Linear(6, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = first = self.stem(x).relu()
        for one, three, pooled in zip(self.one, self.three, self.pooled, strict=True):
            x = torch.cat([one(x), three(x), pooled(self.pool(x))], 1).tanh()
        out: Tensor = self.dense((x + first).mean((2, 3)))
        return out


class StackedLstm(nn.Module):
    """Reads an image row by row; each layer of the stack can be a stage of its own."""

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        sizes = (image_size, 12, 10, 8)
        self.layers = nn.ModuleList(nn.LSTM(a, b, batch_first=True) for a, b in pairwise(sizes))
        self.dense = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean(1)
        for layer in self.layers:
            x, _ = layer(x)
        out: Tensor = self.dense(x[:, -1])
        return out


class Odd(nn.Module):
    """Changes its input in place; a frozen layer, a mask and the input itself are used after the next layers."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.frozen = nn.Conv2d(channels, 4, 3, padding=1).requires_grad_(False)
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4, momentum=None)
        self.dense = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2.0)
        frozen = self.frozen(x)
        mask = frozen > 0
        out = self.first(frozen).tanh()
        out = self.norm(self.second(out))
        out = torch.where(mask, out, frozen) + x.expand(-1, 4, -1, -1)
        result: Tensor = self.dense(out.mean((2, 3)))
        return result


class Shared(nn.Module):
    """A layer with two names, and two norms with the same statistics; its images are changed in place, and kept.

    Biases before batch-norm have no gradient but rounding's, which Adam would blow up: train it with SGD.
    """

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(image_size**2, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.BatchNorm1d(8))
        self.first = self.body[0]
        norms = [layer for layer in self.body if isinstance(layer, nn.BatchNorm1d)]
        norms[1].running_mean, norms[1].running_var = norms[0].running_mean, norms[0].running_var
        self.dense = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mul_(2.0)
        out: Tensor = self.dense(self.body(x.flatten(1)).tanh())
        return out


class Custom(nn.Module):
    """Its constructor sets weights that no layer would set again."""

    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(image_size**2, 130), nn.Linear(130, classes)
        nn.init.trunc_normal_(self.a.weight, std=0.1)
        with torch.no_grad():
            self.b.bias.copy_(torch.rand(classes))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x.flatten(1)).tanh())
        return out


class UnseededLinear(nn.Linear):
    """Every process that initialises it draws other weights."""

    @torch.no_grad()
    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.weight.copy_(torch.from_numpy(np.random.default_rng().normal(size=tuple(self.weight.shape))))


class Unseeded(nn.Module):
    def __init__(self, image_size: int, classes: int) -> None:
        super().__init__()
        self.a, self.b = UnseededLinear(image_size**2, 8), nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.b(self.a(x.flatten(1)).tanh())
        return out

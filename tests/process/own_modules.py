"""A user's own model and data, in modules of a working folder."""

from __future__ import annotations

from pathlib import Path

MODULE = """
import os
import numpy as np
from layers import nn

class Net(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.conv, self.out = nn.Conv2d(channels, 4, 3), nn.Linear(4 * 36, classes)

    def forward(self, x):
        x = self.conv(x)
        return self.out(x.view(x.size(0), -1))  # which wants the usual layout

def build(channels, classes):
    return Net(channels, classes)

def one_too_many(channels, classes):
    return build(channels, classes + 1)

def load():
    labels = np.arange(48) % 3
    images = (labels[:, None, None] * 80 + np.zeros((48, 8, 8))).astype(np.uint8)
    return (images, labels), (images[:12], labels[:12])

def wild():
    (images, labels), test = load()
    labels[5] = -1
    return (images, labels), test

def unseeded():
    (images, labels), test = load()
    np.random.default_rng(os.getpid()).shuffle(labels)
    return (images, labels), test
"""

# Keeps 8 MiB more after every batch, on one rank.
LEAKING = """
import os
import torch
from torch import nn

RANK = [os.environ.get(name) for name in ("PACELINE_RANK", "RANK", "OMPI_COMM_WORLD_RANK")]
kept = []

class Net(nn.Sequential):
    def forward(self, x):
        if "1" in RANK:
            kept.append(torch.ones(2 << 20))
        return super().forward(x)

def build(channels, classes):
    return Net(nn.Flatten(), nn.Linear(784, classes))
"""


def write_modules(folder: Path) -> None:
    (folder / "mine.py").write_text(MODULE)
    (folder / "layers.py").write_text("from torch import nn\n")

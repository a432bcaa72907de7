"""Stems and initial weights that several families share."""

from torch import nn

SMALL = 64  # below this many pixels the first convolution is 3x3 with stride 1, as is usual for CIFAR


def as_keras(module: nn.Module) -> None:
    """Convolutions and dense layers as Keras has them: Glorot uniform weights, zero biases."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)

"""The losses of Paceline's own tasks: each takes an output and targets, and returns sums of loss, weight and metric."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.batch import IGNORED
from paceline.errors import UsageError

Summed = tuple[Tensor, float, float]


def classify(output: Tensor, targets: Tensor) -> Summed:
    """Cross-entropy, and how many predictions are correct."""
    _same(output, (len(targets), output.shape[-1]), "classes")
    loss = F.cross_entropy(output, targets, reduction="sum")
    return loss, len(targets), int((output.detach().argmax(1) == targets).sum())


def predict_tokens(output: Tensor, targets: Tensor) -> Summed:
    """Cross-entropy over all positions whose target counts; the metric is the number of tokens predicted correctly."""
    _same(output, (*targets.shape, output.shape[-1]), "tokens of the vocabulary")
    rows, tokens = output.flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(rows, tokens, reduction="sum", ignore_index=IGNORED)
    counted = tokens != IGNORED
    with torch.no_grad():
        right = (rows.argmax(1) == tokens) & counted
    return loss, int(counted.sum()), int(right.sum())


def regress(output: Tensor, targets: Tensor) -> Summed:
    """Squared differences; the metric is the sum of absolute ones. The weight is the number of values."""
    if output.shape != targets.shape and output.shape == (*targets.shape, 1):
        output = output.squeeze(-1)
    _same(output, tuple(targets.shape), "values")
    difference = output - targets.to(output.dtype)
    return difference.square().sum(), targets.numel(), float(difference.detach().abs().sum())


def _same(output: Tensor, shape: tuple[int, ...], what: str) -> None:
    if tuple(output.shape) != shape:
        raise UsageError(
            f"the model's output has shape {list(output.shape)}, but {list(shape)} is expected: a row of {what} for "
            f"each target"
        )

"""Runs a model on a batch and scores its output, as the task says; checks what a user's function returns."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from paceline import own_code
from paceline.data.batch import Batch, Values, call, tensors
from paceline.errors import UsageError
from paceline.tasks.base import Sums, Task


@dataclass(frozen=True)
class Score:
    """The summed loss, with its graph, and the sums as numbers."""

    loss: Tensor
    sums: Sums


class Scorer:
    """Calls the model and the task's function. With `bf16`, the model computes in bfloat16 where autocast does so."""

    def __init__(self, task: Task, *, bf16: bool = False) -> None:
        self.task, self.bf16 = task, bf16
        self._function: Callable[[Any, Any], Any] = own_code.find(task.score, "task")
        # If it is set, samples are counted in it: by their class (a row) and the predicted one.
        self.confusion: Tensor | None = None

    def __call__(self, model: nn.Module, batch: Batch) -> Score:
        with self.autocast(tensors(batch.inputs)[0].device.type):
            output = call(model, batch.inputs)
        return self.score(output, batch.targets)

    def autocast(self, device: str = "cpu") -> Any:
        """The context in which the model computes."""
        return torch.autocast(device, torch.bfloat16) if self.bf16 else nullcontext()

    def score(self, output: Any, targets: Values) -> Score:
        if self.bf16 and isinstance(output, Tensor):
            output = output.float()
        try:
            returned = self._function(output, targets)
        except UsageError:
            raise
        except Exception as error:
            raise UsageError(f"task {self.task.name} {_failed(error, output, targets)}") from error
        if self.confusion is not None:
            classes = len(self.confusion)
            pairs = torch.bincount(targets * classes + output.argmax(1), minlength=classes**2)
            self.confusion += pairs.view(classes, classes).to(self.confusion)
        loss, weight, metric = self._taken_apart(returned, len(tensors(targets)[0]))
        if isinstance(output, Tensor) and output.requires_grad and not loss.requires_grad:
            why = "it does not depend on the model's output"
            raise UsageError(f"task {self.task.name} returned a loss that has no gradient: {why}")
        return Score(loss, Sums(loss.item(), weight, metric))

    def _taken_apart(self, returned: Any, samples: int) -> tuple[Tensor, float, float]:
        """What the function returned: a loss, or a loss and a weight, or these and a metric."""
        parts = returned if isinstance(returned, tuple) else (returned,)
        title = f"task {self.task.name} returned"
        if not 1 <= len(parts) <= 3:
            raise UsageError(f"{title} {len(parts)} values: a loss, a weight and a metric are expected")
        usual: tuple[Any, ...] = (None, samples, math.nan)
        loss, weight, metric = (*parts, *usual[len(parts) :])
        if not isinstance(loss, Tensor) or loss.dim() or not loss.is_floating_point():
            shown = f"a {type(loss).__name__}"
            if isinstance(loss, Tensor):
                shown = f"a tensor of {str(loss.dtype).removeprefix('torch.')} and shape {list(loss.shape)}"
            raise UsageError(f"{title} {shown} as its loss: the sum over the batch is expected, a tensor of one number")
        try:
            weight, metric = float(weight), float(metric)
        except (TypeError, ValueError, RuntimeError) as error:
            raise UsageError(f"{title} a weight or a metric that is not a number: {error}") from error
        if not math.isfinite(weight) or weight < 0:
            raise UsageError(f"{title} the weight {weight:g}: the number of samples or targets that count is expected")
        return loss, weight, metric


def _failed(error: Exception, output: Any, targets: Values) -> str:
    """Why a task's function failed, with the target that is not a class, if there is one."""
    if isinstance(error, IndexError) and isinstance(targets, Tensor) and isinstance(output, Tensor):
        bad = targets[(targets < 0) | (targets >= output.shape[-1])]
        if len(bad):
            return f"has a target of {int(bad[0])}, but the model's outputs are for 0 to {output.shape[-1] - 1}"
    return f"failed: {own_code.reason(error)}"

"""What every strategy offers the training loop, and what a model does with one batch."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.comm.metered import Meter


@dataclass(frozen=True)
class Batch:
    """This rank's part of a global batch; it can be empty."""

    images: Tensor
    labels: Tensor
    global_count: int


@dataclass(frozen=True)
class StepResult:
    """Sums over the global batch, and whether any rank has asked to stop."""

    loss_sum: float
    correct: float
    count: int
    stop: bool


@dataclass(frozen=True)
class Evaluation:
    loss: float
    accuracy: float


@dataclass
class Laps:
    """Splits the time of a step into named parts: each mark ends one."""

    parts: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)

    def mark(self, name: str) -> None:
        now = time.perf_counter()
        self.parts[name] = self.parts.get(name, 0.0) + now - self.last
        self.last = now


def loss_and_hits(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The summed cross-entropy, and how many predictions are right."""
    output = model(images)
    loss = F.cross_entropy(output, labels, reduction="sum")
    return loss, int((output.detach().argmax(1) == labels).sum())


class Strategy(ABC):
    """Trains `model` with the ranks of `comm`. The loop calls setup, then step and evaluate, then close."""

    def __init__(self, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.comm, self.model, self._optimizer = comm, model, optimizer

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        assert self._optimizer is not None, "emulated compute updates nothing"
        return self._optimizer

    def setup(self) -> None:
        """Make all ranks start from the same weights."""
        return

    @abstractmethod
    def step(self, batch: Batch, lr: float, stop: bool, laps: Laps) -> StepResult:
        """One update. `stop` is this rank's wish; the result has everybody's."""

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """Mean loss and accuracy over all ranks' batches."""
        totals = torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        with torch.inference_mode():
            for batch in batches:
                if len(batch.labels):
                    loss, hits = loss_and_hits(self.model, batch.images, batch.labels)
                    totals += torch.tensor([loss.item(), hits, len(batch.labels)], dtype=torch.float64)
        self.model.train()
        totals = totals.to(self.comm.device)
        self.comm.allreduce(totals)
        loss_sum, correct, count = totals.tolist()
        return Evaluation(loss_sum / count, correct / count)

    def whole_state(self) -> dict[str, Tensor]:
        """All weights and buffers under the model's own names."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go back to weights that `whole_state` gave."""
        self.model.load_state_dict(state)

    def notes(self) -> dict[str, object]:
        """What this strategy adds to the summary."""
        return {}

    def gradient_meter(self) -> Meter:
        """What averaging gradients has sent, without weights, evaluation and input."""
        return Meter()

    def close(self) -> None:
        """Give back threads and communicators."""
        return

    def update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

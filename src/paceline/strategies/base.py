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
from paceline.layout import share
from paceline.strategies.core_clock import CoreClock


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
    """Splits the time of a step into named parts: each mark ends one.

    Where `events` is a list every mark is kept there: what, of which micro-batch, when it began, how long it took.
    With a `clock`, `queued` has how long of each part this thread was ready to run and had no core.
    """

    parts: dict[str, float] = field(default_factory=dict)
    last: float = field(default_factory=time.perf_counter)
    events: list[tuple[str, int, float, float]] | None = None
    clock: CoreClock | None = None
    queued: dict[str, float] = field(default_factory=dict)

    def mark(self, name: str, micro: int = -1) -> None:
        now = time.perf_counter()
        seconds = now - self.last
        self.parts[name] = self.parts.get(name, 0.0) + seconds
        if self.events is not None:
            self.events.append((name, micro, self.last, seconds))
        if self.clock is not None:
            self.queued[name] = self.queued.get(name, 0.0) + self.clock.lap()
        self.last = now


def score(output: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    """The summed cross-entropy, and how many predictions are right."""
    loss = F.cross_entropy(output, labels, reduction="sum")
    return loss, int((output.detach().argmax(1) == labels).sum())


def loss_and_hits(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return score(model(images), labels)


def micro_batches(batch: Batch, micros: int, full: int) -> tuple[list[Tensor], list[Tensor]]:
    """Images and labels in parts of nearly equal size: `micros` of a full batch, fewer of a smaller one.

    Parts of a few samples would cost as many passes, and batch-norm cannot do with one.
    """
    count = len(batch.labels)
    parts = micros if count == full else min(micros, -(-count // -(-full // micros)))
    sizes = [len(share(count, parts, i)) for i in range(parts)]
    return list(batch.images.split(sizes)), list(batch.labels.split(sizes))


class Strategy(ABC):
    """Trains `model` with the ranks of `comm`. The loop calls setup, then step and evaluate, then close."""

    timeline = False  # whether the marks of its steps are worth keeping one by one

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

    def agree(self, weight: float | None = None) -> None:
        """Make what ranks have each their own of, such as batch-norm's statistics, the same on all of them.

        `weight` is this rank's part of the mean; by default all have the same.
        """
        return

    def state(self) -> dict[str, Tensor]:
        """The weights and buffers that this rank has, under the model's own names."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Go back to weights that `state` gave."""
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

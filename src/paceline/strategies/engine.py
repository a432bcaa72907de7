"""The engine that a strategy creates on every rank, and the types of its arguments and results.

This module can be imported without torch, which is imported where it is used.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.batch import Batch
from paceline.layout import peak_rss_bytes, share

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from paceline.comm.base import Comm
    from paceline.comm.metered import Meter
    from paceline.run.core_clock import CoreClock
    from paceline.training.driver import Driver, Job


@dataclass(frozen=True)
class StepResult:
    """Sums over the `count` samples of the global batch, and whether any rank asked to stop.

    In a step without communication, the sums are over the rank's own samples, `own` of them.
    """

    loss_sum: float
    correct: float
    count: int
    stop: bool
    own: int | None = None


@dataclass(frozen=True)
class Evaluation:
    loss: float
    accuracy: float


@dataclass
class StepTimer:
    """Splits the time of a step into named parts: each mark ends one.

    If `events` is a list, every mark is appended to it: name, micro-batch, start, duration.
    With a `clock`, `queued` has for each part how long this thread was ready to run but had no core.
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
    """The summed cross-entropy, and the number of correct predictions."""
    import torch.nn.functional as F

    loss = F.cross_entropy(output, labels, reduction="sum")
    return loss, int((output.detach().argmax(1) == labels).sum())


def loss_and_correct(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return score(model(images), labels)


def micro_batches(batch: Batch, micros: int, full: int) -> tuple[list[Tensor], list[Tensor]]:
    """Images and labels in micro-batches of nearly equal size: `micros` for a full batch, fewer for a smaller one.

    Micro-batches of a few samples would cost as many passes, and batch-norm needs more than one sample.
    """
    count = len(batch.labels)
    parts = micros if count == full else min(micros, -(-count // -(-full // micros)))
    sizes = [len(share(count, parts, i)) for i in range(parts)]
    return list(batch.images.split(sizes)), list(batch.labels.split(sizes))


class Engine(ABC):
    """Trains on one rank. A strategy's `prepare` creates it, ready to run; then it runs, and is closed."""

    parameters = 0  # of the whole model
    properties: Sequence[str] = ()  # of the whole model: `models.properties`
    fresh: Sequence[str] = ()  # weights that were not in the file given by --weights
    states_on_disk = 0  # copies of weights and optimizer state that it keeps in the run folder during training

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def run(self, driver: Driver) -> None:
        """Train from the first step to the last."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights and buffers that this rank has, under the model's own names."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore the weights that `state_dict` returned."""
        self.model.load_state_dict(state)

    def agree(self, weight: float | None = None) -> None:
        """Average buffers that differ between ranks, such as batch-norm statistics.

        `weight` is this rank's weight in the mean; by default all are equal.
        """
        return

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the whole model; all ranks that run the driver's `finish` call it."""

    @abstractmethod
    def measure(self, job: Job) -> None:
        """Add every rank's bytes, messages and seconds to the summary, and what else this strategy has counted."""

    def close(self) -> None:
        """Stop threads and close communicators."""
        return


class Lockstep(Engine):
    """All ranks of `comm` make every update together; the driver calls `step` and `evaluate`."""

    def __init__(self, comm: Comm, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().__init__(model)
        self.comm, self._optimizer = comm, optimizer

    @property
    def optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "emulated compute updates nothing"
        return self._optimizer

    def setup(self) -> None:
        """Make all ranks start from the same weights."""
        return

    def run(self, driver: Driver) -> None:
        driver.run(self)

    @abstractmethod
    def step(self, batch: Batch, lr: float, stop: bool, timer: StepTimer) -> StepResult:
        """Make one update. `stop`: this rank asks to stop; the result says whether any rank does."""

    def advance(self, batch: Batch, shares: int, lr: float, stop: bool, timer: StepTimer) -> StepResult:
        """Make one update with a batch that is divided into `shares` parts. Running statistics change by the mean of
        the ranks' changes, weighted by samples.

        If all ranks have the same number of samples, each can keep its own statistics: they are a linear recursion, so
        their mean, taken when it is needed, equals a mean after every update.
        """
        uneven = batch.global_count % shares != 0
        if uneven:
            self.agree()
            timer.mark("wait")
        result = self.step(batch, lr, stop, timer)
        if uneven:
            self.agree(len(batch.labels) / batch.global_count)
            timer.mark("wait")
        return result

    def update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        """Mean loss and accuracy over all ranks' batches."""
        import torch

        totals = torch.zeros(3, dtype=torch.float64)
        self.model.eval()
        with torch.inference_mode():
            for batch in batches:
                if len(batch.labels):
                    loss, correct = loss_and_correct(self.model, batch.images, batch.labels)
                    totals += torch.tensor([loss.item(), correct, len(batch.labels)], dtype=torch.float64)
        self.model.train()
        totals = totals.to(self.comm.device)
        self.comm.allreduce(totals)
        loss_sum, correct, count = totals.tolist()
        return Evaluation(loss_sum / count, correct / count)

    def save(self, path: Path) -> None:
        from paceline.strategies.weights import save

        if self.comm.rank == 0:
            save(self.state_dict(), path)

    def notes(self) -> dict[str, Any]:
        """Fields that this strategy adds to the summary."""
        return {}

    def gradient_meter(self) -> Meter:
        """Traffic of averaging gradients, without weights, evaluation and input."""
        from paceline.comm.metered import Meter

        return Meter()

    def measure(self, job: Job) -> None:
        import torch

        meter, gradients, summary = job.comm.meter.total(), self.gradient_meter(), job.summary
        mine = [
            gradients.bytes_sent + gradients.opaque_bytes,
            gradients.bytes_received + gradients.opaque_bytes,
            gradients.messages_sent,
            gradients.messages_received,
            peak_rss_bytes(),
        ]
        seconds = [meter.seconds, job.recorder.input_seconds, job.recorder.cpu_seconds()]
        table = torch.zeros(job.comm.size, len(mine) + len(seconds), dtype=torch.float64)
        table[job.comm.rank] = torch.tensor([*mine, *seconds], dtype=torch.float64)
        table = table.to(job.comm.device)
        job.comm.allreduce(table.view(-1))
        columns = table.T.tolist()
        counts = [[int(value) for value in column] for column in columns[: len(mine)]]
        summary.bytes_sent, summary.bytes_received, summary.messages_sent, summary.messages_received = counts[:4]
        summary.peak_rss_bytes = counts[4]
        summary.comm_seconds, summary.input_seconds, summary.cpu_seconds = columns[len(mine) :]
        for name, value in self.notes().items():
            setattr(summary, name, value)

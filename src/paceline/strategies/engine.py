"""What trains: the engine that a strategy makes on every rank, and what it is given and gives back.

This file is read before torch is, like the strategies that inherit from it: torch is imported where it is used.
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
    """Sums over the `count` samples of the global batch, and whether any rank has asked to stop.

    In a step in which ranks tell each other nothing, the sums are over the rank's own samples, `own` of them.
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
    import torch.nn.functional as F

    loss = F.cross_entropy(output, labels, reduction="sum")
    return loss, int((output.detach().argmax(1) == labels).sum())


def loss_and_correct(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, int]:
    return score(model(images), labels)


def micro_batches(batch: Batch, micros: int, full: int) -> tuple[list[Tensor], list[Tensor]]:
    """Images and labels in parts of nearly equal size: `micros` of a full batch, fewer of a smaller one.

    Parts of a few samples would cost as many passes, and batch-norm cannot do with one.
    """
    count = len(batch.labels)
    parts = micros if count == full else min(micros, -(-count // -(-full // micros)))
    sizes = [len(share(count, parts, i)) for i in range(parts)]
    return list(batch.images.split(sizes)), list(batch.labels.split(sizes))


class Engine(ABC):
    """Trains on one rank: a strategy's `prepare` makes it, ready to run; then it runs, and is closed."""

    parameters = 0  # of the whole model
    fresh: Sequence[str] = ()  # weights that a file to start from did not have
    states_on_disk = 0  # copies of weights and optimizer that it keeps in the run folder while it trains

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    @abstractmethod
    def run(self, driver: Driver) -> None:
        """Train from the first step to the last."""

    def state_dict(self) -> dict[str, Tensor]:
        """The weights and buffers that this rank has, under the model's own names."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go back to weights that `state_dict` gave."""
        self.model.load_state_dict(state)

    def agree(self, weight: float | None = None) -> None:
        """Make what ranks have each their own of, such as batch-norm's statistics, the same on all of them.

        `weight` is this rank's part of the mean; by default all have the same.
        """
        return

    @abstractmethod
    def save(self, path: Path) -> None:
        """Write the whole model; all ranks that run the driver's `finish` call it."""

    @abstractmethod
    def measure(self, job: Job) -> None:
        """Put every rank's bytes, messages and seconds into the summary, and what else this strategy has counted."""

    def close(self) -> None:
        """Give back threads and communicators."""
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
        """One update. `stop` is this rank's wish; the result has everybody's."""

    def advance(self, batch: Batch, shares: int, lr: float, stop: bool, timer: StepTimer) -> StepResult:
        """One update, of a batch that is divided into so many shares. Running statistics move by the mean of what each
        rank's samples do to them, weighted by the samples.

        Where all ranks have as many, each can go on with its own: running statistics are a linear recursion, so their
        mean, taken when it is needed, is what a mean after every update would have come to.
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
        """What this strategy adds to the summary."""
        return {}

    def gradient_meter(self) -> Meter:
        """What averaging gradients has sent, without weights, evaluation and input."""
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

"""The engine that a strategy creates on every rank, and the types of its arguments and results.

This module can be imported without torch, which is imported where it is used.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.data.batch import Batch
from paceline.errors import AgreedError, CommError
from paceline.layout import peak_rss_bytes, share
from paceline.tasks.base import NOTHING_COUNTS, Sums

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from paceline.checkpoint.load import Checkpoint
    from paceline.checkpoint.save import Held
    from paceline.checkpoint.state import Cut
    from paceline.comm.base import Comm
    from paceline.comm.metered import Meter
    from paceline.run.core_clock import CoreClock
    from paceline.spec import RunSpec
    from paceline.tasks.scoring import Score, Scorer
    from paceline.training.driver import Driver, Job


# What a rank can ask of all ranks, to be done after a step in which all of them learn of it. The requests of all ranks
# are summed with the step's other numbers: any rank may ask to stop, only rank 0 asks to save, or to go on with other
# ranks. (In float32, sums of a hundred thousand ranks are exact.)
STOP, SAVE, REGROUP = 1, 1 << 20, 1 << 22


@dataclass(frozen=True)
class StepResult:
    """Sums over the `count` samples of the global batch, and over what ranks asked for.

    In a step without communication, the sums are over the rank's own samples, `own` of them. `finite` is false if the
    loss or a gradient was not finite on any rank; then no rank has made the update. `norm` and `own_norm` are those of
    gradients, as `Step` of the records has them, if they were measured.
    """

    sums: Sums
    count: int
    asked: float
    own: int | None = None
    finite: bool = True
    norm: float | None = None
    own_norm: float | None = None

    @property
    def stop(self) -> bool:
        return self.asked % SAVE > 0

    @property
    def save(self) -> bool:
        return self.asked % REGROUP >= SAVE

    @property
    def regroup(self) -> bool:
        return self.asked >= REGROUP


@dataclass(frozen=True)
class Restored:
    """What a rank got from a checkpoint besides its state: the best weights so far, and what it could not use."""

    best: dict[str, Tensor]
    discarded: Sequence[str] = ()


SHORT = 5e-5  # seconds: what was missed in so short a part counts for the next one, as reading it takes time


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
        if self.clock is not None and seconds > SHORT:
            self.queued[name] = self.queued.get(name, 0.0) + self.clock.lap()
        self.last = now


def parts_of(batch: Batch, parts: int) -> list[Batch]:
    """The batch in parts of nearly equal size, of which some may be empty."""
    if parts == 1:
        return [batch]
    return batch.split([len(share(batch.count, parts, i)) for i in range(parts)]) if parts else []


def micro_batches(batch: Batch, micros: int, full: int) -> list[Batch]:
    """Micro-batches of nearly equal size: `micros` for a full batch, fewer for a smaller one.

    Micro-batches of a few samples would cost as many passes, and batch-norm needs more than one sample.
    """
    count = batch.count
    return parts_of(batch, micros if count == full else min(micros, -(-count // -(-full // micros))))


class Engine(ABC):
    """Trains on one rank. A strategy's `prepare` creates it, ready to run; then it runs, and is closed."""

    parameters = 0  # of the whole model
    properties: Sequence[str] = ()  # of the whole model: `models.properties`
    fresh: Sequence[str] = ()  # weights that were not in the file given by --weights
    stream = 0  # ranks with the same number draw the same dropout

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

    replicated = False  # whether all ranks that have a tensor have the same values of it; else each saves its own
    own_moments = False  # whether each rank's optimizer has its own state nevertheless
    keeps_buffers = False  # whether a step that makes no update must leave buffers as they were
    accumulate = 1  # parts of a batch that are computed one after the other
    clip = 0.0  # the largest norm of the gradient; 0: any
    made: StepResult | None = None  # of the step that is under way, as soon as this rank has made its update

    def __init__(self, comm: Comm, model: nn.Module, optimizer: Optimizer | None) -> None:
        super().__init__(model)
        self.comm, self._optimizer = comm, optimizer
        self._scorer: Scorer | None = None

    @property
    def scorer(self) -> Scorer:
        """What runs the model and computes the loss: by default, that of classification."""
        if self._scorer is None:
            from paceline.tasks.scoring import Scorer
            from paceline.tasks.table import CLASSIFICATION

            self._scorer = Scorer(CLASSIFICATION)
        return self._scorer

    @scorer.setter
    def scorer(self, scorer: Scorer) -> None:
        self._scorer = scorer

    @property
    def optimizer(self) -> Optimizer:
        assert self._optimizer is not None, "emulated compute updates nothing"
        return self._optimizer

    def learns(self, spec: RunSpec) -> None:
        """How the model is trained: the task, and what every strategy does with a gradient."""
        from paceline.strategies.setup import make_scorer

        self.scorer = self._scorer or make_scorer(spec)
        self.accumulate, self.clip = spec.accumulate, spec.clip_norm or 0.0

    def setup(self) -> None:
        """Make all ranks start from the same weights."""
        return

    def regroup(self, comm: Comm, facts: Mapping[str, Any]) -> None:
        """Train with the ranks of another communicator from now on; all of them call this, and have the same state.

        `facts` are those of one of them.
        """
        raise AssertionError("the spec has checked that the strategy is elastic")

    def tell(self, say: Callable[[str], object]) -> None:
        """Where to say what this rank chooses during training."""
        return

    def run(self, driver: Driver) -> None:
        driver.run(self)

    @abstractmethod
    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        """Make one update, unless the loss or a gradient is not finite on any rank. `ask`: see `STOP` and `SAVE`."""

    def advance(self, batch: Batch, shares: int, lr: float, ask: int, timer: StepTimer) -> StepResult:
        """Make one update with a batch that is divided into `shares` parts. Running statistics change by the mean of
        the ranks' changes, weighted by samples.

        If all ranks have the same number of samples, each can keep its own statistics: they are a linear recursion, so
        their mean, taken when it is needed, equals a mean after every update.
        """
        uneven = batch.global_count % shares != 0
        if uneven:
            self.agree()
            timer.mark("wait")
        before = [buffer.clone() for buffer in self.model.buffers()] if self.keeps_buffers else []

        def go_back() -> None:
            for buffer, old in zip(self.model.buffers() if before else (), before, strict=True):
                buffer.copy_(old)

        try:
            result = self.step(batch, lr, ask, timer)
        except CommError:
            if self.made is None:
                go_back()
            raise
        if not result.finite:
            go_back()
        if uneven:
            self.agree(batch.count / batch.global_count)
            timer.mark("wait")
        return result

    def forward(self, batch: Batch, *, everyone: bool = False) -> Score | None:
        """The score of a batch; None without samples, unless every rank must compute."""
        return self.scorer(self.model, batch) if batch.count or everyone else None

    def update(self, lr: float, nominal: float, weight: float, squares: float | None = None) -> None:
        """Make the update with gradients of the summed loss that were divided by `nominal` instead of its weight.

        `squares` is the sum of the squares of all gradients, by default of those that this rank has.
        """
        if not weight:
            raise AgreedError(f"{NOTHING_COUNTS}; use a larger batch, or leave out samples without targets")
        factor = nominal / weight
        if self.clip:
            norm = factor * math.sqrt(self.squares() if squares is None else squares)
            factor *= min(1.0, self.clip / (norm + 1e-6))
        if factor != 1.0:
            self.scale_gradients(factor)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def scale_gradients(self, factor: float) -> None:
        import torch

        updated = (p for group in self.optimizer.param_groups for p in group["params"])
        torch._foreach_mul_([p.grad for p in updated if p.grad is not None], factor)

    def squares(self) -> float:
        """The sum of the squares of this rank's gradients; 0 if they are not clipped."""
        from torch.nn.utils import get_total_norm

        return float(get_total_norm(list(self.gradients().values()))) ** 2 if self.clip else 0.0

    def gradients(self) -> dict[str, Tensor]:
        """The gradients that this rank has, under the model's own names."""
        return {name: p.grad for name, p in self.named_model.named_parameters() if p.grad is not None}

    def gradients_finite(self) -> bool:
        """Whether all gradients that this rank has are finite."""
        from paceline.strategies.finite import all_finite

        return all_finite([*self.gradients().values()])

    # Checkpoints. By default each rank has the whole model, and all have the same, except for buffers.

    @property
    def named_model(self) -> nn.Module:
        """The model, with its own names of parameters."""
        return self.model

    def holders(self, name: str, cut: Cut | None) -> tuple[int, ...]:
        """The ranks that have the same values as this one of the parameter or buffer of this name, or of its cut."""
        return tuple(range(self.comm.size))

    def cuts(self) -> Mapping[str, Cut]:
        """The parameters of which this rank has a part."""
        return {}

    @property
    def own_buffers(self) -> bool:
        """Whether buffers differ between ranks: each has the statistics of its own samples."""
        return self.comm.size > 1

    def check_replicas(self) -> None:
        """Raise ReplicaError, naming a rank, if values that must be equal differ."""
        return

    def facts(self) -> dict[str, Any]:
        """What else this rank must know to continue."""
        return {}

    def held(self, best: Mapping[str, Tensor]) -> Iterator[Held]:
        """What this rank has of the training's state, for a checkpoint; with the `best` weights so far."""
        from paceline.checkpoint import state

        model, holders, cuts = self.named_model, self.holders, self.cuts()
        own = self.comm.size > 1 and not self.replicated
        yield from state.hold_model(model, holders, cuts, own_buffers=self.own_buffers, own=own)
        if self._optimizer is not None:
            yield from self.hold_optimizer(own=own or self.own_moments)
        for name, tensor in best.items():
            yield state.hold(state.BEST + name, tensor, cuts.get(name), holders(name, cuts.get(name)))
        yield from state.random_state(self.comm.device)

    def hold_optimizer(self, *, own: bool) -> Iterator[Held]:
        """The state of this rank's optimizer; `own`: those of other ranks differ."""
        from paceline.checkpoint import state

        return state.hold_optimizer(self.named_model, self.optimizer, self.holders, self.cuts(), own=own)

    def load_optimizer(self, checkpoint: Checkpoint, rank: int | None) -> None:
        from paceline.checkpoint import state

        state.load_optimizer(self.named_model, self.optimizer, checkpoint, self.cuts(), rank)

    def restore(self, checkpoint: Checkpoint, *, same: bool) -> Restored:
        """Continue from a checkpoint. `same`: this rank was there, and has the same part of the work as then."""
        from paceline.checkpoint import state

        model, cuts, rank = self.named_model, self.cuts(), self.comm.rank if same else None
        state.load_model(model, checkpoint, cuts, rank)
        discarded = []
        if self._optimizer is not None:
            if state.own_moments(checkpoint) and not (same and (self.own_moments or not self.replicated)):
                discarded.append("each worker's own momentum: workers start without")
            else:
                self.load_optimizer(checkpoint, rank)
        if same:
            state.set_random_state(checkpoint, self.comm.rank, self.comm.device)
        best = state.load_best(model, checkpoint, cuts)
        if best:  # what is not in it never changes
            best = {name: tensor.clone() for name, tensor in self.state_dict().items()} | best
        return Restored(best, discarded)

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        """Sums over all ranks' batches."""
        import torch

        sums = Sums()
        self.model.eval()
        with torch.inference_mode():
            for batch in batches:
                if score := self.forward(batch):
                    sums = sums.plus(score.sums)
        self.model.train()
        return self.sum_over_ranks(sums)

    def sum_over_ranks(self, sums: Sums) -> Sums:
        import torch

        totals = torch.tensor(sums, dtype=torch.float64, device=self.comm.device)
        self.comm.allreduce(totals)
        return Sums(*totals.tolist())

    def save(self, path: Path) -> None:
        from paceline.checkpoint.file_format import save

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
        table = torch.zeros(job.spec.ranks, len(mine) + len(seconds), dtype=torch.float64)
        table[job.comm.name()] = torch.tensor([*mine, *seconds], dtype=torch.float64)
        table = table.to(job.comm.device)
        job.comm.allreduce(table.view(-1))
        columns = table.T.tolist()
        counts = [[int(value) for value in column] for column in columns[: len(mine)]]
        summary.bytes_sent, summary.bytes_received, summary.messages_sent, summary.messages_received = counts[:4]
        summary.peak_rss_bytes = counts[4]
        summary.comm_seconds, summary.input_seconds, summary.cpu_seconds = columns[len(mine) :]
        for name, value in self.notes().items():
            setattr(summary, name, value)

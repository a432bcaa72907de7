"""Synchronous data parallelism: every worker has the whole model, and gradients are averaged in every step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.collectives.gather import GATHER as AVERAGE_AT_ONE
from paceline.collectives.native import NATIVE
from paceline.collectives.reduce_bcast import REDUCE_BCAST as AVERAGE_BY_TREE
from paceline.collectives.ring import RING as AVERAGE_BY_RING
from paceline.data.batch import Batch
from paceline.errors import UsageError
from paceline.strategies import options
from paceline.strategies.base import Strategy
from paceline.strategies.engine import Engine, Lockstep, Restored, StepResult, StepTimer, parts_of
from paceline.tasks.base import Sums

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.checkpoint.load import Checkpoint
    from paceline.comm.base import Comm
    from paceline.comm.metered import Meter
    from paceline.spec import RunSpec
    from paceline.strategies.averager import Averager
    from paceline.strategies.buckets import GradientBuckets
    from paceline.tasks.scoring import Score
    from paceline.training.driver import Job


class DataParallelStrategy(Strategy):
    def check(self, spec: RunSpec) -> None:
        options.check_unchecked(spec)
        options.check_elastic(spec)
        if spec.emulated and spec.sync_batchnorm:
            raise UsageError(
                f"--sync-batchnorm with --compute {spec.compute}: batch-norm is not computed, and sends no messages; "
                "leave it out"
            )


def _averaged_by(collective: str, summary: str) -> DataParallelStrategy:
    implementation = "paceline.strategies.synchronous:prepare"
    return DataParallelStrategy(
        collective,
        summary,
        implementation,
        options.ElasticDataParallel,
        averaging=collective,
        emulates=True,
        simulation="paceline.predict.steps:averaged",
    )


ALLREDUCE = _averaged_by(NATIVE.name, "data parallel; gradients averaged by the transport's own all-reduce")
RING = _averaged_by(AVERAGE_BY_RING.name, "data parallel; ring all-reduce (reduce-scatter, then all-gather)")
REDUCE_BCAST = _averaged_by(AVERAGE_BY_TREE.name, "data parallel; reduce to rank 0 along a tree, then broadcast")
GATHER = _averaged_by(AVERAGE_AT_ONE.name, "data parallel; rank 0 gathers all gradients and sends the mean back")

RIDERS = 4  # numbers that are summed with the gradients: loss, weight, metric, and what a rank asks for


@dataclass(frozen=True)
class Options:
    """How replicas average their gradients."""

    averaging: str = NATIVE.name
    bucket_mb: float = 4.0
    overlap: str = "auto"
    sync_batchnorm: bool = False
    check_replicas: int = 0
    record_norms: int = 0

    @classmethod
    def of(cls, spec: RunSpec) -> Self:
        assert spec.method.averaging is not None
        return cls(
            spec.method.averaging,
            spec.bucket_mb / spec.shrink,
            spec.overlap,
            spec.sync_batchnorm,
            spec.check_replicas,
            spec.record_norms,
        )

    @property
    def buckets(self) -> type[GradientBuckets]:
        """What sums the gradients."""
        from paceline.strategies.buckets import GradientBuckets

        return GradientBuckets

    def parallel(self, model: nn.Module, comm: Comm, extras: int = 0, *, in_place: bool = False) -> Averager:
        from paceline.strategies.averager import Averager

        return Averager(
            model,
            comm,
            self.averaging,
            bucket_mb=self.bucket_mb,
            overlap=self.overlap,
            sync_batchnorm=self.sync_batchnorm,
            extras=extras,
            in_place=in_place,
            kind=self.buckets,
        )


def accumulate(
    engine: Lockstep, batch: Batch, timer: StepTimer, scale: float = 1.0, *, everyone: bool = False
) -> tuple[Sums, Score | None]:
    """Compute the parts of a batch: add up the gradients of scale × loss of all but the last, whose backward is left to
    the caller. Returns the sums of all parts, and the score of the last one.
    """
    *earlier, last = parts_of(batch, engine.accumulate)
    sums = Sums()
    for part in earlier:
        if score := engine.forward(part, everyone=everyone):
            sums = sums.plus(score.sums)
            timer.mark("forward")
            (score.loss * scale).backward()
            timer.mark("backward")
    score = engine.forward(last, everyone=everyone)
    return sums.plus(score.sums) if score else sums, score


class Synchronous(Lockstep):
    """A step sends only buckets; the last one also carries the sums of the step and what ranks ask for."""

    replicated = True

    def __init__(self, comm: Comm, model: nn.Module, optimizer: Optimizer | None, options: Options) -> None:
        super().__init__(comm, model, optimizer)
        self.options, self._steps = options, 0

    @property
    def in_place(self) -> bool:
        """Whether gradients are summed in memory that ranks share, if they do share it."""
        return self.options.averaging == NATIVE.name

    def setup(self) -> None:
        self.parallel = self.options.parallel(self.model, self.comm, RIDERS, in_place=self.in_place)
        self.buckets, self.overlap = self.parallel.buckets, self.parallel.overlap

    def regroup(self, comm: Comm, facts: Mapping[str, Any]) -> None:
        say = self.overlap.say
        self.close()
        self.optimizer.zero_grad(set_to_none=True)  # gradients lie in memory that the earlier ranks share
        self.comm = comm
        self.setup()
        self.tell(say)
        self._steps = facts["steps"]
        if self.overlap.chosen is None:
            self.overlap.chosen = facts.get("overlap")

    def tell(self, say: Callable[[str], object]) -> None:
        self.overlap.say = say

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        import torch

        every = self.options.record_norms if self.comm.size > 1 else 0
        self.buckets.own_squares = [] if every and self._steps % every == 0 else None
        self.optimizer.zero_grad(set_to_none=True)
        mine, score = accumulate(self, batch, timer, everyone=self.parallel.needs_everyone)
        extras = self.buckets.extras[:RIDERS]
        extras.copy_(torch.tensor([*mine, ask], dtype=torch.float64))
        timer.mark("forward")
        self.parallel.compute(score.loss if score else None, 1 / batch.nominal)
        timer.mark("backward")
        self.parallel.average()
        timer.mark("wait")
        *totals, asked = extras.tolist()
        sums = Sums(*totals)
        finite = sums.finite and self.buckets.finite()  # the same on all ranks, as the sums are
        norm, own_norm = self._norms(batch.nominal, sums.weight, mine.weight) if finite else (None, None)
        if finite:
            self.update(lr, batch.nominal, sums.weight)
        self._steps += 1
        self.made = StepResult(sums, batch.global_count, asked, finite=finite, norm=norm, own_norm=own_norm)
        timer.mark("optimizer")
        if finite:
            self.buckets.gather_weights()
            timer.mark("wait")
        if self.options.check_replicas and self._steps % self.options.check_replicas == 0:
            self.check_replicas()
            timer.mark("check")
        return self.made

    def _norms(self, nominal: float, weight: float, own_weight: float) -> tuple[float | None, float | None]:
        """The norms of the mean gradients over the samples of all ranks and of this one; None if not measured."""
        own = self.buckets.own_squares
        if own is None:
            return None, None
        return (
            _norm(self.buckets.squares(), nominal, weight),
            _norm(math.fsum(map(float, own)), nominal, own_weight),
        )

    def squares(self) -> float:
        return self.buckets.squares()

    def scale_gradients(self, factor: float) -> None:
        if self.buckets.shared:
            self.buckets.scale(factor)
        else:
            super().scale_gradients(factor)

    def check_replicas(self) -> None:
        self.parallel.check_replicas(self._steps)

    def facts(self) -> dict[str, Any]:
        return {"overlap": self.overlap.chosen}

    def restore(self, checkpoint: Checkpoint, *, same: bool) -> Restored:
        if same and self.options.overlap == "auto":
            self.overlap.chosen = checkpoint.manifest.parts[0].facts.get("overlap")
        self._steps = checkpoint.manifest.position.step
        return super().restore(checkpoint, same=same)

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        self.agree()
        return super().evaluate(batches)

    def agree(self, weight: float | None = None) -> None:
        from paceline.strategies.replicas import average_buffers

        average_buffers(self.model, self.comm, weight)

    def notes(self) -> dict[str, Any]:
        exact = bool(self.buckets.shared) or AVERAGINGS[self.options.averaging].cost(2, 1).exact
        return {"overlap": self.overlap.chosen, "wire": "exact" if exact else "opaque"}

    def gradient_meter(self) -> Meter:
        from paceline.comm.metered import Meter, MeteredComm

        comm = self.buckets.comm
        return comm.meter if isinstance(comm, MeteredComm) and comm is not self.comm else Meter()

    def close(self) -> None:
        self.buckets.close()


def _norm(squares: float, nominal: float, weight: float) -> float | None:
    """The norm of a gradient of loss / weight, from the squares of that of loss / nominal; None without samples."""
    norm = math.sqrt(squares) * nominal / weight if weight else math.inf
    return norm if math.isfinite(norm) else None


def prepare(job: Job) -> Engine:
    from paceline.strategies.emulated import EmulatedSynchronous
    from paceline.strategies.replica import prepare_replica

    own = Options.of(job.spec)
    return prepare_replica(
        job,
        lambda model, optimizer: Synchronous(job.comm, model, optimizer, own),
        lambda model, device: EmulatedSynchronous(job.comm, model, own, device),
    )

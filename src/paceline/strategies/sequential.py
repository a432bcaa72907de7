"""Training on one process without communication; every synchronous strategy must equal it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from paceline.data.batch import Batch
from paceline.errors import UsageError
from paceline.strategies import options
from paceline.strategies.base import Strategy
from paceline.strategies.engine import Engine, Lockstep, StepResult, StepTimer, micro_batches, parts_of
from paceline.tasks.base import Sums

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.comm.base import Comm
    from paceline.spec import RunSpec
    from paceline.training.driver import Job


class SequentialStrategy(Strategy):
    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"microbatches": 1}

    def check(self, spec: RunSpec) -> None:
        options.check_microbatches(spec)
        if spec.microbatches > 1 and spec.emulated:
            raise UsageError(f"--microbatches {spec.microbatches} with --compute {spec.compute}: nothing is computed")


SEQUENTIAL = SequentialStrategy(
    "sequential",
    "one process, no communication: what all others must equal",
    "paceline.strategies.sequential:prepare",
    options.MicroBatches,
    single=True,
    emulates=True,
    simulation="paceline.predict.steps:alone",
)


class Sequential(Lockstep):
    """Can run a batch as `micros` micro-batches and sum their gradients: less memory, the same update."""

    def __init__(
        self, comm: Comm, model: nn.Module, optimizer: Optimizer | None, micros: int = 1, full: int = 1
    ) -> None:
        super().__init__(comm, model, optimizer)
        self.micros, self.full = micros, full

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        import torch

        self.optimizer.zero_grad(set_to_none=True)
        sums = Sums()
        for part in parts_of(batch, self.accumulate):
            for micro in micro_batches(part, self.micros, self.full):
                score = self.scorer(self.model, micro)
                timer.mark("forward")
                score.loss.backward(torch.full_like(score.loss, 1 / batch.nominal))
                sums = sums.plus(score.sums)
                timer.mark("backward")
        finite = sums.finite and self.gradients_finite()
        if finite:
            self.update(lr, batch.nominal, sums.weight)
        timer.mark("optimizer")
        return StepResult(sums, batch.global_count, ask, finite=finite)


def prepare(job: Job) -> Engine:
    from paceline.strategies.emulated import EmulatedSequential
    from paceline.strategies.replica import prepare_replica

    spec = job.spec
    return prepare_replica(
        job,
        lambda model, optimizer: Sequential(job.comm, model, optimizer, spec.microbatches, spec.batch_size),
        lambda model, device: EmulatedSequential(job.comm, model, device),
    )

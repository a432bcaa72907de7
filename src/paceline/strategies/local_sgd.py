"""Local SGD: workers take H steps on their own, then average their weights (Stich, 2019; Lin et al., 2020).

Between two averages nothing is sent, so a run sends 1/H of the bytes of averaging gradients in every step. The average
weights each worker by the samples it has trained on since the last average, so that with H = 1 and plain SGD every step
equals the synchronous one. Each worker keeps its own momentum and Adam moments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.collectives.native import NATIVE
from paceline.options import option
from paceline.strategies import options
from paceline.strategies.base import Strategy
from paceline.strategies.engine import Engine, Lockstep, StepResult, StepTimer
from paceline.strategies.synchronous import RIDERS, Synchronous, accumulate
from paceline.strategies.synchronous import Options as Averaging
from paceline.tasks.base import Sums

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from paceline.comm.base import Comm
    from paceline.data.batch import Batch
    from paceline.training.driver import Job


@dataclass(frozen=True)
class Options(options.Collective, options.Averaged):
    sync_every: int = option(8, "steps that each worker takes on its own before weights are averaged",
                             label="averaged every", unit="step", least=1)  # fmt: skip
    sync_first: int = option(0, "number of first steps in which gradients are averaged, before local training starts "
                             "(post-local SGD)", label="synchronous for the first", unit="step", least=0)  # fmt: skip


class LocalSGDStrategy(Strategy):
    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"averaging": NATIVE.name}

    def round(self, values: Mapping[str, Any]) -> int:
        """One of `sync_every` steps includes the average."""
        every: int = values["sync_every"]
        return every


LOCAL_SGD = LocalSGDStrategy(
    "local-sgd",
    "data parallel; workers take --sync-every steps on their own, then average their weights",
    "paceline.strategies.local_sgd:prepare",
    Options,
    exact=False,
    simulation="paceline.predict.steps:local",
)


class LocalSGD(Synchronous):
    """The first steps are synchronous; then each round of `every` local steps ends with an average of weights.

    Ranks learn what others ask for at the end of a round, so checkpoints have equal weights, and the
    momentum of each worker.
    """

    own_moments, in_place = True, False
    squares, scale_gradients = Lockstep.squares, Lockstep.scale_gradients  # most gradients are not in buckets

    def __init__(
        self, comm: Comm, model: nn.Module, optimizer: Optimizer, averaging: Averaging, every: int, first: int = 0
    ) -> None:
        super().__init__(comm, model, optimizer, averaging)
        self.every, self.first = every, first
        self._own = self._all = 0  # samples since the last average, of this rank and of all
        self._ask, self._finite = 0, True

    def advance(self, batch: Batch, shares: int, lr: float, ask: int, timer: StepTimer) -> StepResult:
        """Make a step without averaging running statistics: the average of weights includes them."""
        if self._steps < self.first:
            return super().advance(batch, shares, lr, ask, timer)
        return self._local_step(batch, lr, ask, timer)

    def _local_step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        count, sums = batch.count, Sums()
        if count:
            self.optimizer.zero_grad(set_to_none=True)
            before = [buffer.clone() for buffer in self.model.buffers()]
            nominal = count * batch.nominal // batch.global_count
            sums, score = accumulate(self, batch, timer, 1 / nominal)
            timer.mark("forward")
            if score:
                (score.loss * (1 / nominal)).backward()
            timer.mark("backward")
            if sums.finite and self.gradients_finite():
                if sums.weight:
                    self.update(lr, nominal, sums.weight)
            else:  # the other workers learn of it with the next average
                self._finite = False
                for buffer, old in zip(self.model.buffers(), before, strict=True):
                    buffer.copy_(old)
        timer.mark("optimizer")
        self._steps += 1
        self._own, self._all, self._ask = self._own + count, self._all + batch.global_count, self._ask | ask
        if (self._steps - self.first) % self.every:
            return StepResult(sums, batch.global_count, 0, own=count)
        *totals, asked = self._average(*(sums if self._finite else Sums(math.nan)), self._ask)
        sums = Sums(*totals)
        self._ask, self._finite = 0, True
        timer.mark("wait")
        check = self.options.check_replicas
        if check and self._steps // check > (self._steps - self.every) // check:
            self.check_replicas()
            timer.mark("check")
        return StepResult(sums, batch.global_count, asked, finite=sums.finite)

    def agree(self, weight: float | None = None) -> None:
        """End the round early, before weights are evaluated or saved."""
        if self._all:
            self._average()
        else:
            super().agree(weight)

    def _average(self, *sums: float) -> list[float]:
        """Average weights and buffers, weighted by samples; return the sums of `sums` over all ranks."""
        import torch

        weight = self._own / self._all
        with torch.no_grad():
            rows = [p for p in self.model.parameters() if p.requires_grad]
            beside = torch.tensor([*sums, *[0.0] * (RIDERS - len(sums))], dtype=torch.float64)
            flat = torch.cat([*(p.reshape(-1) for p in rows), beside.to(rows[0])])
            flat[:-RIDERS] *= weight
            AVERAGINGS[self.options.averaging].run(self.buckets.comm, flat)
            for p, values in zip(rows, flat[:-RIDERS].split([p.numel() for p in rows]), strict=True):
                p.copy_(values.view(p.shape))
        self._own, self._all = 0, 0
        super().agree(weight)
        return flat[-RIDERS:].tolist()


def prepare(job: Job) -> Engine:
    from paceline.strategies.replica import prepare_replica

    spec = job.spec
    averaging = Averaging(spec.averaging, spec.bucket_mb, "off", check_replicas=spec.check_replicas)
    return prepare_replica(
        job,
        lambda model, optimizer: LocalSGD(job.comm, model, optimizer, averaging, spec.sync_every, spec.sync_first),
    )

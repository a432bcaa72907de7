"""Tensor parallelism with emulated compute: shards sleep between their exchanges, and send what real ones send."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.comm.words import all_or_none
from paceline.data.batch import Batch
from paceline.emulation.counted import Amount, Exchange, Point, Shard
from paceline.emulation.device import DeviceInTurns
from paceline.emulation.parts import shard_of
from paceline.emulation.standin import StandIn
from paceline.strategies.averager import Averager
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.engine import StepResult, StepTimer, parts_of
from paceline.strategies.overlap import OverlapChoice
from paceline.strategies.partitioned import Parts
from paceline.strategies.setup import emulate_in_turns, example
from paceline.strategies.synchronous import Options
from paceline.strategies.tensor.engine import TensorParallel, options_of
from paceline.tasks.base import Sums

if TYPE_CHECKING:
    from torch import nn

    from paceline.training.driver import Job

# A number of so many bytes has this type; only sums look at it, and floating-point ones are summed.
DTYPES = {8: torch.float64, 4: torch.float32}


class EmulatedAverager(Averager):
    """Buckets of zeros, which are sent unchanged. Weights are not broadcast, because they are not used."""

    def __init__(self, model: nn.Module, comm: Comm, options: Options) -> None:
        self.comm, self.model, self.synchronised = comm, model, []
        self.overlap = OverlapChoice(options.overlap, comm)
        self.buckets = GradientBuckets(model, comm, AVERAGINGS[options.averaging], int(options.bucket_mb * 2**20))
        for slot in self.buckets.slots:
            slot.view.zero_()
            slot.parameter.grad = slot.view


class EmulatedTensor(TensorParallel):
    """Follows the recorded pass of a shard."""

    def __init__(
        self,
        comm: Comm,
        model: StandIn,
        options: Options,
        shards_comm: Comm,
        replicas_comm: Comm,
        shard: Shard,
        device: DeviceInTurns,
        shrink: int,
    ) -> None:
        super().__init__(comm, model, None, options, shards_comm, replicas_comm, {})
        self.shard, self.device, self.shrink = shard, device, shrink

    def setup(self) -> None:
        self.layers_comm = self.shards_comm.dup() if self.shards_comm.size > 1 else self.shards_comm
        if self.replicas_comm.size > 1:
            self.parallel = EmulatedAverager(self.model, self.replicas_comm, self.options)
            order = {id(bucket): number for number, bucket in enumerate(self.parallel.buckets.buckets)}
            self.points = self.shard.bucket_points([order[id(slot.bucket)] for slot in self.parallel.buckets.slots])

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        self.device.begin()
        *earlier, last = parts_of(batch, self.accumulate)
        for part in (part for part in earlier if part.count):
            pass_ = ShardPass(self, part.count)
            pass_.reach(self.shard.forward)
            timer.mark("forward")
            pass_.reach(self.shard.end)
            timer.mark("backward")
        pass_ = ShardPass(self, last.count)
        pass_.reach(self.shard.forward)
        timer.mark("forward")
        self._backward(pass_, timer)
        asked = self._total([*Sums(), ask, 0.0, 0.0])[len(Sums())]
        timer.mark("wait")
        timer.mark("optimizer")
        return StepResult(Sums(), batch.global_count, asked)

    def _backward(self, pass_: ShardPass, timer: StepTimer) -> None:
        start = time.perf_counter()
        if self.parallel:
            overlap = self.parallel.overlap.now()
            self.parallel.buckets.replay(lambda number: pass_.reach(self.points[number]), overlap=overlap)
        pass_.reach(self.shard.end)
        timer.mark("backward")
        if self.parallel:
            self.parallel.buckets.finish()
            self.parallel.overlap.took(time.perf_counter() - start)

    def agree(self, weight: float | None = None) -> None:
        """Do nothing: no buffer has changed."""

    def _layer_comms(self) -> list[Comm]:
        return [self.layers_comm] if self.layers_comm is not self.shards_comm else []


class ShardPass:
    """Forward and backward of a shard for some samples; without samples, it does nothing."""

    def __init__(self, engine: EmulatedTensor, samples: int) -> None:
        self.engine, self.samples, self.at = engine, samples, Point(0, 0.0)

    def reach(self, point: Point) -> None:
        """Compute, and exchange what is exchanged, up to this point."""
        while self.samples and self.at.exchanges < point.exchanges:
            exchange = self.engine.shard.exchanges[self.at.exchanges]
            self._compute(exchange.done)
            self._carry_out(exchange)
            self.at = Point(self.at.exchanges + 1, exchange.done)
        self._compute(point.done)

    def _compute(self, until: float) -> None:
        if until > self.at.done and self.samples:
            self.engine.device.compute(until - self.at.done, self.samples)
            self.at = self.at._replace(done=until)

    def _carry_out(self, exchange: Exchange) -> None:
        """In the order of `paceline.tensor.exchange`."""
        comm = self.engine.layers_comm
        if exchange.summed:
            comm.allreduce(self._zeros(exchange.summed))
            return
        works = [comm.irecv(self._zeros(amount), source) for source, amount in exchange.receives]
        own = self._zeros(exchange.sends[0][1])  # the same for all
        works += [comm.isend(own, to) for to, _ in exchange.sends]
        for work in works:
            work.wait()

    def _zeros(self, amount: Amount) -> Tensor:
        count = amount.count(self.samples, self.engine.shrink)
        return torch.zeros(count, dtype=DTYPES[amount.itemsize])


def emulate(job: Job, parts: Parts, model: nn.Module, shards: Comm, replicas: Comm) -> EmulatedTensor:
    """The engine of a rank; the model has no values."""
    spec, comm = job.spec, job.comm
    inputs = example(spec, job.source.info, 1, job.place.dtype, "meta")
    shard = all_or_none(lambda: shard_of(model, inputs, shards.rank, shards.size, spec.model, job.console.line), comm)
    device = emulate_in_turns(job, shard.macs)
    names = {name for name, _ in model.named_parameters()}
    own = StandIn(model, spec.shrink, names)
    engine = EmulatedTensor(comm, own, options_of(spec), shards, replicas, shard, device, spec.shrink)
    engine.parameters, engine.properties = parts.parameters, parts.properties
    engine.learns(spec)
    engine.setup()
    return engine

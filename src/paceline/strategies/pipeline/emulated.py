"""Pipelines with emulated compute: stages sleep instead of computing, and send what real ones send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from paceline.comm.base import Comm
from paceline.comm.words import all_or_none
from paceline.data.batch import Batch
from paceline.emulation.counted import Chain, Value
from paceline.emulation.device import DeviceInTurns
from paceline.emulation.parts import chain_of
from paceline.emulation.standin import StandIn
from paceline.pipeline.devices import stage_devices
from paceline.pipeline.executor import Executor, Micro, Neighbours, finish
from paceline.pipeline.graph import Form, Graph
from paceline.pipeline.schedule import recomputes
from paceline.strategies.engine import StepResult, StepTimer
from paceline.strategies.partitioned import Parts
from paceline.strategies.pipeline.engine import Pipeline, PipelineOptions, neighbours_of, options_of, tell_plan
from paceline.strategies.pipeline.planning import micro_size
from paceline.strategies.setup import emulate_in_turns, make_scorer
from paceline.tasks.scoring import Scorer

if TYPE_CHECKING:
    from paceline.training.driver import Job

# A value of so many bytes has this type; its contents are never looked at.
DTYPES = {8: torch.float64, 4: torch.float32}


class EmulatedStage(Executor):
    """Runs a stage's instructions. `taken` and `given` cross the cuts before and after it, and `compute` are its parts
    of a step's operations, forward and backward.
    """

    def __init__(
        self,
        model: StandIn,
        device: DeviceInTurns,
        compute: tuple[float, float],
        crossing: tuple[Sequence[Value], Sequence[Value]],
        shrink: int,
        comm: Comm,
        neighbours: Neighbours,
        scorer: Scorer,
        *,
        recompute: bool,
    ) -> None:
        self.comm, self.neighbours, self.scorer, self.recompute = comm, neighbours, scorer, recompute
        self.training = self.evaluation = model
        self.device, self.compute, self.shrink = device, compute, shrink
        names = [[f"{side}{number}" for number in range(len(crossing[side]))] for side in range(2)]
        self.taken, self.given = names
        self._values = {name: v for side in range(2) for name, v in zip(names[side], crossing[side], strict=True)}

    def _forms(self, names: list[str], size: int) -> list[Form]:
        return [form_of(self._values[name], size, self.shrink) for name in names]

    def _forward(self, number: int) -> None:
        samples = self._batches[number].count
        if self.neighbours.before is None:
            self._micros[number] = Micro([], [])
        self.device.compute(self.compute[0], samples)
        micro = self._micros[number]
        micro.outputs = [torch.zeros(form.shape, dtype=form.dtype) for form in self._forms(self.given, samples)]
        self._mark("forward", number)

    def _backward(self, number: int) -> None:
        samples = self._batches[number].count
        finish(self._micros[number].sends)
        if self.recompute:
            self.device.compute(self.compute[0], samples)
            self._mark("recompute", number)
        self._gradients.pop(number, None)
        self.device.compute(self.compute[1], samples)
        if self.neighbours.before is None:
            del self._micros[number]
        self._mark("backward", number)


def form_of(value: Value, samples: int, shrink: int) -> Form:
    """A flat tensor with as many bytes."""
    count, itemsize = value.amount.count(samples, shrink), value.amount.itemsize
    dtype = DTYPES.get(itemsize, torch.uint8)
    return Form((count * itemsize // dtype.itemsize,), (1,), dtype, value.grad, 0)


class EmulatedPipeline(Pipeline):
    """Gradients are zeros, as in `EmulatedSynchronous`; weights are neither broadcast nor updated."""

    def __init__(
        self,
        comm: Comm,
        stage: EmulatedStage,
        options: PipelineOptions,
        stages_of: Mapping[str, Sequence[int]],
    ) -> None:
        named = {name.replace(".", "/"): stages for name, stages in stages_of.items()}
        super().__init__(comm, stage, None, options, named)
        self.device = stage.device

    def setup(self) -> None:
        self._connect()
        for weight in self.model.parameters():
            weight.grad = torch.zeros_like(weight)
        self._beginning = self._sent()

    @property
    def named_model(self) -> nn.Module:
        return self.model

    def agree(self, weight: float | None = None) -> None:
        """Do nothing: no buffer has changed."""

    def gradients_finite(self) -> bool:
        return True

    def squares(self) -> float:
        return 0.0

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        self.device.begin()
        return super().step(batch, lr, ask, timer)


def emulate(job: Job, parts: Parts, graph: Graph) -> EmulatedPipeline:
    """The engine of a rank. The cut follows from counted operations, and is the same on all ranks."""
    spec, comm, grid = job.spec, job.comm, job.spec.grid
    chain = all_or_none(lambda: chain_of(graph), comm)
    device = emulate_in_turns(job, chain.macs)
    assert job.summary.compute_seconds is not None
    seconds = job.summary.compute_seconds / spec.batch_size * micro_size(spec)
    devices, how = stage_devices(grid.stages, None, spec.speed), (spec.schedule, spec.microbatches, spec.recompute)
    plan = all_or_none(lambda: chain.plan(spec.cut, micro_size(spec), seconds, devices, *how), comm)
    tell_plan(job, plan)
    edges, own = [0, *plan.positions(), len(graph.nodes)], grid.spot(comm.rank).stage
    having = chain.stages_of(edges)
    stage = EmulatedStage(
        StandIn(graph.model, spec.shrink, {name for name, stages in having.items() if own in stages}),
        device,
        chain.compute(edges)[own],
        _crossing(chain, edges, own),
        spec.shrink,
        comm.dup() if comm.size > 1 else comm,
        neighbours_of(grid, comm.rank),
        make_scorer(spec),
        recompute=spec.recompute and recomputes(spec.schedule, grid.stages, spec.microbatches, own),
    )
    engine = EmulatedPipeline(comm, stage, options_of(spec), having)
    engine.plan, engine.parameters, engine.properties = plan.as_dict(), parts.parameters, parts.properties
    engine.learns(spec)
    engine.setup()
    return engine


def _crossing(chain: Chain, edges: Sequence[int], stage: int) -> tuple[Sequence[Value], Sequence[Value]]:
    """What crosses the cuts before and after a stage; at the ends of the model, nothing does."""
    start, stop = list(pairwise(edges))[stage]
    return chain.values[start], chain.values[stop]

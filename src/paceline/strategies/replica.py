"""Creates engines for ranks that each have the whole model, or an emulation of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from paceline.comm.base import Comm
from paceline.comm.words import all_or_none, tell
from paceline.data.table import DataInfo
from paceline.emulation.device import EmulatedDevice
from paceline.emulation.standin import StandIn
from paceline.emulation.timing import Timing
from paceline.models.properties import properties_of
from paceline.spec import RunSpec
from paceline.strategies.engine import Lockstep
from paceline.strategies.setup import count_operations, make_emulation, make_model, make_optimizer, seed_dropout

if TYPE_CHECKING:
    from paceline.training.driver import Job


def prepare_replica(
    job: Job,
    make: Callable[[nn.Module, Optimizer], Lockstep],
    emulate: Callable[[StandIn, EmulatedDevice], Lockstep] | None = None,
) -> Lockstep:
    """Set up the engine: all ranks have the same weights; from then on each rank draws its own dropout."""
    spec, comm, data = job.spec, job.comm, job.source.info
    model, fresh = all_or_none(lambda: make_model(spec, data, job.place), comm)
    timing = _count_once(spec, data, model, comm) if spec.emulated else None
    emulation = all_or_none(lambda: make_emulation(spec, data, model, job.place, comm.rank, timing), comm)
    if emulation:
        assert emulate is not None, "the spec has checked that this strategy can be emulated"
        job.summary.compute_seconds = emulation.batch_seconds
        job.console.line(emulation.about)
        engine = emulate(emulation.model, emulation.device)
    else:
        engine = make(model, make_optimizer(spec, model.parameters()))
    engine.learns(spec)
    engine.parameters, engine.fresh = sum(p.numel() for p in model.parameters()), fresh
    engine.properties = properties_of(model)
    engine.setup()
    engine.tell(job.console.line)
    engine.stream = comm.rank
    seed_dropout(spec, comm.rank)
    return engine


def _count_once(spec: RunSpec, data: DataInfo, model: nn.Module, comm: Comm) -> Timing:
    """The timing of a step, which rank 0 counts for all: it takes a quarter of a second, and ranks may share cores."""
    counted = all_or_none(lambda: count_operations(spec, data, model) if comm.rank == 0 else None, comm)
    return Timing.from_json(tell(counted.to_json() if counted else "", comm))

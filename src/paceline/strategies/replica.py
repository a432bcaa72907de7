"""Creates engines for ranks that each have the whole model, or an emulation of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn
from torch.optim import Optimizer

from paceline.comm.words import all_or_none
from paceline.emulation.device import EmulatedDevice
from paceline.emulation.standin import StandIn
from paceline.models.properties import properties_of
from paceline.strategies.engine import Lockstep
from paceline.strategies.setup import make_emulation, make_model, make_optimizer, seed_dropout

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
    emulation = all_or_none(lambda: make_emulation(spec, data, model, job.place, comm.rank), comm)
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
    engine.stream = comm.rank
    seed_dropout(spec, comm.rank)
    return engine

"""Steps whose gradient norms are compared with plain autograd's, as a case that runs on each rank."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.data.batch import IGNORED, Batch
from paceline.layout import share
from paceline.strategies.engine import StepTimer
from paceline.strategies.sharded import Options as ShardedOptions
from paceline.strategies.sharded import Sharded
from paceline.strategies.synchronous import Options, Synchronous
from paceline.tasks.scoring import Scorer
from paceline.tasks.table import LANGUAGE_MODEL

SIZES = (7, 11, 2, 8)  # samples of each step; of two, the second one's targets do not count
TOKENS = 5
Norms = tuple[float | None, float | None]  # over all samples, over those of this rank


def make_engine(comm: Comm, overlap: str, *, sharded: bool = False) -> Synchronous:
    """Its buckets are so small that there are several."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)).double()
    sgd, how = partial(torch.optim.SGD, momentum=0.9), ("ring", 0.001, overlap)
    engine = (
        Sharded(comm, model, ShardedOptions(*how, record_norms=1), sgd)
        if sharded
        else Synchronous(comm, model, sgd(model.parameters()), Options(*how, record_norms=1))
    )
    engine.scorer = Scorer(LANGUAGE_MODEL)
    engine.setup()
    assert len(engine.buckets.buckets) > 2
    return engine


def samples(step: int) -> tuple[Tensor, Tensor]:
    """Of a whole step; the second one, and half of the first one, do not count."""
    generator, count = torch.Generator().manual_seed(step), SIZES[step]
    targets = torch.randint(4, (count, TOKENS), generator=generator)
    targets[0, : TOKENS // 2] = targets[1] = IGNORED
    return torch.randn(count, TOKENS, 6, generator=generator, dtype=torch.float64), targets


def part(comm: Comm, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Those of this rank."""
    own = share(len(inputs), comm.size, comm.rank)
    return inputs[own.start : own.stop], targets[own.start : own.stop]


def advance(engine: Synchronous, inputs: Tensor, targets: Tensor) -> Norms:
    """The norms that a step measures."""
    batch = Batch(*part(engine.comm, inputs, targets), len(inputs))
    result = engine.advance(batch, engine.comm.size, 0.1, 0, StepTimer())
    return result.norm, result.own_norm


def plain_norm(model: nn.Module, inputs: Tensor, targets: Tensor) -> float | None:
    """That of the gradient of the mean loss; None if no target counts."""
    if not (targets != IGNORED).any():
        return None
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    return float(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]).norm())


def measure(comm: Comm, overlap: str, clip: float, parts: int, sharded: bool) -> list[tuple[Norms, Norms]]:
    """For each step, the norms that were measured, and those by plain autograd with the same weights."""
    engine, found = make_engine(comm, overlap, sharded=sharded), list[tuple[Norms, Norms]]()
    engine.clip, engine.accumulate = clip, parts
    for step in range(len(SIZES)):
        model, whole = copy.deepcopy(engine.model), samples(step)
        wanted = plain_norm(model, *whole), plain_norm(model, *part(comm, *whole))
        found.append((advance(engine, *whole), wanted))
    engine.close()
    return found


def measured_after_changes(comm: Comm, overlap: str) -> list[bool]:
    """Whether six steps have both norms.

    In the second a parameter is frozen. In the fourth a sample is not finite, in the fifth only the loss is not.
    """
    engine, found = make_engine(comm, overlap), list[bool]()
    first, *_, last = engine.model.parameters()
    for number in range(6):
        inputs, targets = samples(0)
        if number == 1:
            first.requires_grad_(False)
        if number == 3:
            inputs[0] = torch.nan
        with torch.no_grad():
            last[0] = 1e308 if number == 4 else 0.0
        found.append(None not in advance(engine, inputs, targets))
    engine.close()
    return found

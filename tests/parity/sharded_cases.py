"""Steps of a sharded optimizer, as cases that run on each rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.data.batch import Batch
from paceline.errors import UsageError
from paceline.layout import share
from paceline.strategies.engine import StepTimer
from paceline.strategies.sharded import Options, Sharded

BUCKET_MB, STEPS, SAMPLES = 0.001, 3, 12


def make_model() -> nn.Module:
    torch.manual_seed(3)
    conv = nn.Conv2d(3, 8, 3)
    conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)
    return nn.Sequential(conv, nn.ReLU(), nn.Flatten(), nn.Linear(32, 40), nn.Tanh(), nn.Linear(40, 4))


def train(comm: Comm, between: Callable[[nn.Module], None] = lambda _: None) -> Sharded:
    """Some steps; `between` is called before each but the first."""
    torch.set_num_threads(1)
    adam = partial(torch.optim.Adam, lr=0.1, fused=True)
    engine = Sharded(comm, make_model(), Options("ring", BUCKET_MB, "off"), adam)
    engine.setup()
    own = share(SAMPLES, comm.size, comm.rank)
    for step in range(STEPS):
        if step:
            between(engine.model)
        generator = torch.Generator().manual_seed(step)
        inputs = torch.randn(SAMPLES, 3, 4, 4, generator=generator)[own.start : own.stop]
        targets = torch.randint(4, (SAMPLES,), generator=generator)[own.start : own.stop]
        engine.advance(Batch(inputs, targets, SAMPLES), comm.size, 0.1, 0, StepTimer())
    return engine


def kept_and_sent(comm: Comm) -> dict[str, Any]:
    """What a rank's optimizer keeps, what the rank sent, the sizes of its vectors, and how its weights are laid out."""
    metered = MeteredComm(comm)
    engine = train(metered)
    buckets, meter = engine.buckets, engine.gradient_meter()
    kept = [value for state in engine.optimizer.state.values() for value in state.values() if value.dim()]
    strides = [
        (p.stride(), q.stride()) for p, q in zip(engine.model.parameters(), make_model().parameters(), strict=True)
    ]
    found = {
        "moments": sum(map(len, kept)),
        "sent": (meter.bytes_sent, meter.bytes_received, meter.messages_sent),
        "lengths": list(map(len, buckets.weights)),
        "tail": len(buckets.tail),
        "as before": all(own == plain for own, plain in strides),
    }
    engine.close()
    return found


def freeze(model: nn.Module) -> None:
    next(model.parameters()).requires_grad_(False)


def replace(model: nn.Module) -> None:
    """Gives a parameter other memory."""
    parameter = next(model.parameters())
    parameter.data = parameter.data.clone()


def refusal(comm: Comm, change: str) -> str:
    """What is said if the last rank changes its parameters after the first step."""
    try:
        train(comm, globals()[change] if comm.rank == comm.size - 1 else lambda _: None)
    except UsageError as error:
        return str(error)
    return ""

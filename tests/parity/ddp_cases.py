"""Two replicas of the same model in each rank, trained side by side: one by PyTorch's DDP, one by DataParallel."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.base import Comm
from paceline.loop.data_parallel import DataParallel

STEPS = 20


class Shared(nn.Module):
    """A layer used twice, and a weight under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.enter, self.leave = nn.Linear(12, 12), nn.Linear(48, 12), nn.Linear(12, 48)
        self.leave.weight = nn.Parameter(self.enter.weight.detach().t().contiguous())
        self.again = self.enter

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        hidden = self.twice(self.twice(self.enter(x.flatten(1))).tanh())
        out: Tensor = self.again(self.leave(hidden))
        return out


class Unused(nn.Module):
    """One layer that nobody uses, one that is used now and then, and one that only rank 1 uses."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.never = nn.Linear(48, 8), nn.Linear(48, 8)
        self.sometimes, self.by_one = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        out: Tensor = self.always(x.flatten(1))
        if step % 3 == 0:
            out = out + self.sometimes(out)
        return out + self.by_one(out) if rank == 1 else out


class Images(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor, step: int, rank: int) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def convolutions() -> nn.Module:
    return Images(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 6, 2), nn.GELU(), nn.Flatten(), nn.Linear(6, 5))


def normalised() -> nn.Module:
    return Images(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(32, 5))


MODELS = {"convolutions": convolutions, "normalised": normalised, "shared": Shared, "unused": Unused}


def halve(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(0.5)


def compare_with_ddp(comm: Comm, model: str, dtype: str, micros: int, hooks: bool, store: str) -> list[str]:
    """The names of what differs in any bit, with the step; the ranks begin with different weights."""
    torch.manual_seed(comm.rank)
    mine = MODELS[model]().to(getattr(torch, dtype))
    theirs, differ = copy.deepcopy(mine), list[str]()
    with default_group(comm, store):
        ddp = DistributedDataParallel(theirs, broadcast_buffers=False, find_unused_parameters=model == "unused")
        parallel = DataParallel(mine, comm, bucket_mb=0.001)
        for p in (*mine.parameters(), *theirs.parameters()) if hooks else ():
            p.register_post_accumulate_grad_hook(halve)
        optimizers = [
            torch.optim.Adam(net.parameters(), 0.01)
            if model == "convolutions"
            else torch.optim.SGD(net.parameters(), 0.05, momentum=0.9)
            for net in (mine, theirs)
        ]
        for step in range(STEPS):
            batches = [torch.randn(4, 3, 4, 4, dtype=getattr(torch, dtype)) for _ in range(micros)]
            for optimizer in optimizers:
                optimizer.zero_grad()
            for number, x in enumerate(batches):
                for net in (ddp, parallel):
                    with nullcontext() if number == micros - 1 else net.no_sync():
                        net(x, step, comm.rank).square().mean().backward()
            for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
                same = p.grad is q.grad is None or (p.grad is not None and q.grad is not None and p.grad.equal(q.grad))
                differ += [] if same else [f"gradient of {name} in step {step}"]
            for optimizer in optimizers:
                optimizer.step()
        for (name, p), q in zip(mine.named_parameters(), theirs.parameters(), strict=True):
            differ += [] if p.equal(q) else [name]
        parallel.check_replicas(STEPS)
        parallel.close()
        del ddp
    return differ


@contextmanager
def default_group(comm: Comm, store: str) -> Iterator[None]:
    """torch's global process group, which DDP wants; over loopback."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", store=dist.FileStore(store, comm.size), rank=comm.rank, world_size=comm.size)
    try:
        yield
    finally:
        dist.destroy_process_group()

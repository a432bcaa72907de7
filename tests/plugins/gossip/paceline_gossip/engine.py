"""What ranks import."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from paceline.data.batch import Batch
from paceline.strategies.engine import Engine, Lockstep, StepResult, StepTimer
from paceline.strategies.replica import prepare_replica
from paceline.tasks.base import Sums

if TYPE_CHECKING:
    from paceline.comm.base import Comm
    from paceline.training.driver import Job


class Gossip(Lockstep):
    """In odd rounds rank 1 averages with 2, 3 with 4 …; in even ones 0 with 1, 2 with 3 …"""

    def __init__(self, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer, every: int) -> None:
        super().__init__(comm, model, optimizer)
        self.every, self.steps = every, 0

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        self.optimizer.zero_grad(set_to_none=True)
        score = self.scorer(self.model, batch)
        timer.mark("forward")
        score.loss.backward()
        timer.mark("backward")
        self.update(lr, 1, score.sums.weight)
        timer.mark("optimizer")
        if self.steps % self.every == 0:
            self.gossip(self.steps // self.every % 2)
        self.steps += 1
        totals = torch.tensor([*score.sums, ask], dtype=torch.float64)
        self.comm.allreduce(totals)
        timer.mark("wait")
        *sums, asked = totals.tolist()
        return StepResult(Sums(*sums), batch.global_count, asked)

    def gossip(self, odd: int) -> None:
        neighbour = self.comm.rank + (1 if self.comm.rank % 2 == odd else -1)
        if not 0 <= neighbour < self.comm.size:
            return
        own = nn.utils.parameters_to_vector(self.model.parameters()).detach()
        theirs = torch.empty_like(own)
        sent = self.comm.isend(own, neighbour)
        self.comm.recv(theirs, neighbour)
        sent.wait()
        nn.utils.vector_to_parameters((own + theirs) / 2, self.model.parameters())


def prepare(job: Job) -> Engine:
    return prepare_replica(job, lambda model, optimizer: Gossip(job.comm, model, optimizer, job.spec.gossip_every))


def two_layers(shape: tuple[int, ...], classes: int, dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), 8), nn.ReLU(), nn.Linear(8, classes))


def stripes() -> Any:
    """Rows or columns are bright in turn."""
    rng = np.random.default_rng(0)
    made = []
    for count in (96, 16):
        labels = np.arange(count) % 2
        rows = np.tile((np.arange(8) % 2 * 200).reshape(8, 1), (1, 8))
        images = np.where(labels.reshape(-1, 1, 1) == 1, rows, rows.T) + rng.integers(0, 50, (count, 8, 8))
        made.append((images.astype(np.uint8).reshape(count, 8, 8), labels))
    return tuple(made)

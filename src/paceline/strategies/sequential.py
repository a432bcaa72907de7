"""One process, no communication: the training that every synchronous strategy must equal."""

import torch
from torch import nn

from paceline.comm.base import Comm
from paceline.strategies.base import Batch, Laps, StepResult, Strategy, loss_and_hits, micro_batches


class Sequential(Strategy):
    """A batch can go through in `micros` parts, whose gradients are summed: less memory, the same update."""

    def __init__(
        self, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer | None, micros: int = 1, full: int = 1
    ) -> None:
        super().__init__(comm, model, optimizer)
        self.micros, self.full = micros, full

    def step(self, batch: Batch, lr: float, stop: bool, laps: Laps) -> StepResult:
        self.optimizer.zero_grad(set_to_none=True)
        loss_sum, correct = 0.0, 0
        for images, labels in zip(*micro_batches(batch, self.micros, self.full), strict=True):
            loss, hits = loss_and_hits(self.model, images, labels)
            laps.mark("forward")
            loss.backward(torch.full_like(loss, 1 / batch.global_count))
            loss_sum, correct = loss_sum + loss.item(), correct + hits
            laps.mark("backward")
        self.update(lr)
        laps.mark("optimizer")
        return StepResult(loss_sum, correct, batch.global_count, stop)

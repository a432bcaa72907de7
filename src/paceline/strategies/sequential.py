"""One process, no communication: the training that every synchronous strategy must equal."""

import torch

from paceline.strategies.base import Batch, Laps, StepResult, Strategy, loss_and_hits


class Sequential(Strategy):
    def step(self, batch: Batch, lr: float, stop: bool, laps: Laps) -> StepResult:
        self.optimizer.zero_grad(set_to_none=True)
        loss, hits = loss_and_hits(self.model, batch.images, batch.labels)
        laps.mark("forward")
        loss.backward(torch.full_like(loss, 1 / batch.global_count))
        laps.mark("backward")
        self.update(lr)
        laps.mark("optimizer")
        return StepResult(loss.item(), hits, batch.global_count, stop)

"""Synchronous data parallelism as a strategy of the training loop; the averaging is injected."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import nn

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.comm.metered import Meter, MeteredComm
from paceline.strategies.base import Batch, Evaluation, Laps, StepResult, Strategy, loss_and_hits
from paceline.strategies.data_parallel import DataParallel
from paceline.strategies.replicas import average_buffers


@dataclass(frozen=True)
class Options:
    averaging: str = "allreduce"
    bucket_mb: float = 4.0
    overlap: str = "auto"
    sync_batchnorm: bool = False
    check_replicas: int = 0
    micros: int = 1  # of sequential, of a batch of this size
    batch_size: int = 1

    def parallel(self, model: nn.Module, comm: Comm, riders: int = 0) -> DataParallel:
        return DataParallel(
            model,
            comm,
            self.averaging,
            bucket_mb=self.bucket_mb,
            overlap=self.overlap,
            sync_batchnorm=self.sync_batchnorm,
            riders=riders,
        )


RIDERS = 3


class Synchronous(Strategy):
    """Loss, hits and the wish to stop ride behind the gradients, so that a step sends nothing else."""

    def __init__(self, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer | None, options: Options) -> None:
        super().__init__(comm, model, optimizer)
        self.options, self._steps = options, 0

    def setup(self) -> None:
        self.parallel = self.options.parallel(self.model, self.comm, RIDERS)
        self.buckets, self.overlap = self.parallel.buckets, self.parallel.overlap

    def step(self, batch: Batch, lr: float, stop: bool, laps: Laps) -> StepResult:
        self.optimizer.zero_grad(set_to_none=True)
        loss, hits = None, 0
        if len(batch.labels) or self.parallel.needs_everyone:
            loss, hits = loss_and_hits(self.model, batch.images, batch.labels)
        riders = self.buckets.riders
        riders.copy_(torch.tensor([loss.item() if loss is not None else 0.0, hits, stop], dtype=torch.float64))
        laps.mark("forward")
        self.parallel.compute(loss, 1 / batch.global_count)
        laps.mark("backward")
        self.parallel.average()
        laps.mark("wait")
        self.update(lr)
        loss_sum, correct, stops = riders.tolist()
        laps.mark("optimizer")
        self._steps += 1
        if self.options.check_replicas and self._steps % self.options.check_replicas == 0:
            self.parallel.check_replicas(self._steps)
            laps.mark("check")
        return StepResult(loss_sum, correct, batch.global_count, stops > 0)

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        self.agree()
        return super().evaluate(batches)

    def agree(self, weight: float | None = None) -> None:
        average_buffers(self.model, self.comm, weight)

    def notes(self) -> dict[str, object]:
        exact = AVERAGINGS[self.options.averaging].cost(2, 1).exact
        return {"overlap": self.overlap.chosen, "wire": "exact" if exact else "opaque"}

    def gradient_meter(self) -> Meter:
        comm = self.buckets.comm
        return comm.meter if isinstance(comm, MeteredComm) and comm is not self.comm else Meter()

    def close(self) -> None:
        self.buckets.close()

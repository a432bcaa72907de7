"""Pipeline parallelism as a strategy of the training loop: stages of a model, and replicas that average each stage."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.comm.metered import Meter, MeteredComm
from paceline.layout import Grid
from paceline.pipeline.executor import Executor
from paceline.pipeline.schedule import instructions
from paceline.strategies.base import Batch, Evaluation, Laps, StepResult, Strategy, micro_batches
from paceline.strategies.replicas import average_buffers, check_equal


@dataclass(frozen=True)
class PipelineOptions:
    grid: Grid
    schedule: str
    micros: int
    batch_size: int  # of a replica
    averaging: str = "allreduce"
    bucket_mb: float = 4.0
    check_replicas: int = 0

    @property
    def micro_size(self) -> int:
        """Samples of a micro-batch: what memory is planned for, also in evaluation."""
        return -(-self.batch_size // self.micros)


class Pipeline(Strategy):
    """Runs one stage; `executor` has its layers, and talks to its neighbours."""

    timeline = True

    def __init__(
        self, comm: Comm, executor: Executor, optimizer: torch.optim.Optimizer | None, options: PipelineOptions
    ) -> None:
        super().__init__(comm, executor.training, optimizer)
        self.executor, self.options, self._steps = executor, options, 0
        self._besides = Meter()

    def setup(self) -> None:
        grid = self.options.grid
        self.spot = grid.spot(self.comm.rank)
        self.replicas = self.comm.group(grid.replicas_of(self.comm.rank)) if grid.replicas > 1 else None
        self.averaging = AVERAGINGS[self.options.averaging]
        if self.replicas:
            for tensor in (*self.model.parameters(), *self.model.buffers()):
                self.replicas.broadcast(_row(tensor))  # one by one: there may be no room for a copy of all
        self._beginning = self._sent()

    def step(self, batch: Batch, lr: float, stop: bool, laps: Laps) -> StepResult:
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        images, labels = micro_batches(batch, self.options.micros, self.options.batch_size)
        if labels:
            stages, stage = self.options.grid.stages, self.spot.stage
            program = instructions(self.options.schedule, stages, len(labels), stage)
            self.executor.run(program, images, labels, 1 / batch.global_count, laps.mark)
        if self.replicas:
            self._average(self.replicas, computed=bool(labels))
            laps.mark("average")
        if self._optimizer is not None:
            self.update(lr)
        laps.mark("optimizer")
        last = self.spot.stage == self.options.grid.stages - 1 and bool(labels)
        mine = [self.executor.loss_sum, self.executor.hits] if last else [0.0, 0]
        sums = torch.tensor([*mine, stop], dtype=torch.float64)
        self.comm.allreduce(sums)
        laps.mark("wait")
        self._steps += 1
        if self.replicas and self.options.check_replicas and self._steps % self.options.check_replicas == 0:
            check_equal(self.model, self.replicas, self._steps)
            laps.mark("check")
        loss_sum, correct, stops = sums.tolist()
        return StepResult(loss_sum, correct, batch.global_count, stops > 0)

    def _average(self, replicas: Comm, *, computed: bool) -> None:
        """Sum this stage's gradients over the replicas, in place: they are weighted by the global batch already.

        Large ones are summed where they lie, small ones in buckets. A replica without samples adds nothing.
        """
        if computed:
            self._reached = [p for p in self.model.parameters() if p.grad is not None]
        else:  # the graph is fixed: those that had a gradient before have one on the other replicas
            for p in self._reached:
                p.grad = torch.zeros_like(p)
        limit, small = int(self.options.bucket_mb * 2**20), list[Tensor]()
        for gradient in [_row(p.grad) for p in self._reached if p.grad is not None]:
            if gradient.nbytes >= limit:
                self.averaging.run(replicas, gradient)
                continue
            small.append(gradient)
            if sum(each.nbytes for each in small) >= limit:
                self._sum_together(replicas, small)
                small = []
        if small:
            self._sum_together(replicas, small)

    def _sum_together(self, replicas: Comm, small: list[Tensor]) -> None:
        together = torch.cat(small)
        self.averaging.run(replicas, together)
        torch._foreach_copy_(small, list(together.split([len(gradient) for gradient in small])))

    def evaluate(self, batches: Iterable[Batch]) -> Evaluation:
        self.agree()
        totals, before = torch.zeros(3, dtype=torch.float64), self._sent()
        sizes: list[int] = []

        def pairs() -> Iterator[tuple[Tensor, Tensor]]:
            for batch in batches:
                size = self.options.micro_size
                for images, labels in zip(batch.images.split(size), batch.labels.split(size), strict=True):
                    sizes.append(len(labels))
                    yield images, labels

        self.executor.evaluation.eval()
        with torch.inference_mode():
            for loss, hits in self.executor.evaluate(pairs()):
                totals += torch.tensor([loss, hits, sizes[-1]], dtype=torch.float64)
        self.executor.training.train()
        self._besides = self._besides.plus(self._sent()).plus(before, -1)
        if self.spot.stage < self.options.grid.stages - 1:
            totals.zero_()
        self.comm.allreduce(totals)
        loss_sum, correct, count = totals.tolist()
        return Evaluation(loss_sum / count, correct / count)

    def agree(self, weight: float | None = None) -> None:
        if self.replicas:
            before = self._sent()
            average_buffers(self.model, self.replicas, weight)
            self._besides = self._besides.plus(self._sent()).plus(before, -1)

    def notes(self) -> dict[str, object]:
        exact = self.replicas is None or self.averaging.cost(2, 1).exact
        return {"wire": "exact" if exact else "opaque"}

    def gradient_meter(self) -> Meter:
        """Activations and gradients between stages, and what averaging has sent, in steps."""
        return self._sent().plus(self._besides, -1).plus(self._beginning, -1)

    def _sent(self) -> Meter:
        mine: Sequence[Comm | None] = (self.executor.comm, self.replicas)
        return Meter(children=[c.meter for c in mine if isinstance(c, MeteredComm) and c is not self.comm]).total()

    def close(self) -> None:
        for comm in (self.executor.comm, self.replicas):
            if comm is not None and comm is not self.comm:
                comm.close()


def _row(tensor: Tensor) -> Tensor:
    """Its values where they lie, one after the other."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))

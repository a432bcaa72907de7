"""The engine of tensor parallelism: replicas of a model, each divided over the ranks that are its shards.

    replicas = 2, shards = 3       ranks 0 1 2    shards_comm: one of these rows
                                         3 4 5    replicas_comm: one of these columns

The shards of a replica get the same samples and compute the same loss; their split layers (`paceline.tensor`)
communicate in forward and backward. Ranks with the same part of the weights average its gradient over replicas.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.state import Cut
from paceline.comm.base import Comm
from paceline.comm.metered import Meter, MeteredComm
from paceline.data.batch import Batch
from paceline.errors import AgreedError, UsageError
from paceline.layout import share
from paceline.spec import RunSpec
from paceline.strategies.averager import Averager
from paceline.strategies.engine import Restored, StepResult, StepTimer
from paceline.strategies.partitioned import PartEngine, Parts, rows
from paceline.strategies.replicas import average_buffers, broadcast_state, check_equal
from paceline.strategies.setup import make_optimizer, seed_dropout
from paceline.strategies.synchronous import Options, accumulate
from paceline.strategies.weights import Piece
from paceline.tasks.base import Sums
from paceline.tensor.apply import split_wide
from paceline.tensor.layers import SplitLayer

if TYPE_CHECKING:
    from paceline.training.driver import Job


class TensorParallel(PartEngine):
    """`split` is the result of `split_wide(model, shards_comm)`; the model must have its values before `setup`.

    Rank is replica × shards + shard. Random numbers in layers must be the same on all shards of a replica: seed torch's
    generator by the replica.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        options: Options,
        shards_comm: Comm,
        replicas_comm: Comm,
        split: Mapping[str, int],
    ) -> None:
        super().__init__(comm, model, optimizer)
        assert comm.rank == replicas_comm.rank * shards_comm.size + shards_comm.rank, "shards are neighbours"
        self.options, self.shards_comm, self.replicas_comm, self.split = options, shards_comm, replicas_comm, split
        self.parallel: Averager | None = None
        self._steps, self._evaluations = 0, Meter()

    def setup(self) -> None:
        """Broadcast unsplit values within each replica, and all values over replicas."""
        broadcast_state(self._unsplit(), self.shards_comm)
        if self.replicas_comm.size > 1:
            self.parallel = self.options.parallel(self.model, self.replicas_comm)

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        self.optimizer.zero_grad(set_to_none=True)
        scale = 1 / batch.nominal
        everyone = self.parallel is not None and self.parallel.needs_everyone
        mine, score = accumulate(self, batch, timer, 1.0 if self.parallel else scale, everyone=everyone)
        timer.mark("forward")
        if self.parallel:
            self.parallel.compute(score.loss if score else None, scale)
        elif score:
            (score.loss * scale).backward()
        timer.mark("backward")
        if self.parallel:
            self.parallel.average()
        # Any rank's request must reach all ranks in this step, or a shard would wait for the others.
        first = self.shards_comm.rank == 0  # all shards of a replica have the same sums
        numbers = [*(mine if first else Sums()), ask, not self.gradients_finite(), self.squares()]
        *found, asked, bad, squares = self._total(numbers)
        timer.mark("wait")
        sums = Sums(*found)
        finite = sums.finite and not bad
        if finite:
            self.update(lr, batch.nominal, sums.weight, squares)
        timer.mark("optimizer")
        self._steps += 1
        if self.options.check_replicas and self._steps % self.options.check_replicas == 0:
            self.check_replicas()
            timer.mark("check")
        return StepResult(sums, batch.global_count, asked, finite=finite)

    def _total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of some numbers over all ranks."""
        totals = torch.tensor(numbers, dtype=torch.float64, device=self.comm.device)
        self.comm.allreduce(totals)
        found: list[float] = totals.tolist()
        return found

    def holders(self, name: str, cut: Cut | None) -> tuple[int, ...]:
        shards, every = self.shards_comm, range(self.comm.size)
        return tuple(every[shards.rank :: shards.size] if cut else every)

    def cuts(self) -> Mapping[str, Cut]:
        assert self.whole is not None
        shards, found = self.shards_comm, {}
        for name, dim in self.split.items():
            shape = tuple(self.whole.tensors[name].shape)
            part = share(shape[dim], shards.size, shards.rank)
            found[name] = Cut(shape, dim, part.start, part.stop)
        return found

    @property
    def own_buffers(self) -> bool:
        return self.replicas_comm.size > 1

    def restore(self, checkpoint: Checkpoint, *, same: bool) -> Restored:
        if same and self.parallel and self.options.overlap == "auto":
            self.parallel.overlap.chosen = checkpoint.manifest.parts[0].facts.get("overlap")
        self._steps = checkpoint.manifest.position.step
        return super().restore(checkpoint, same=same)

    def facts(self) -> dict[str, Any]:
        return {"overlap": self.parallel.overlap.chosen if self.parallel else False}

    def evaluate(self, batches: Iterable[Batch]) -> Sums:
        """Every shard of a replica counts the same batches, which does not change the means."""
        self.agree()
        before = self._exchanged()
        result = super().evaluate(batches)
        self._evaluations = self._evaluations.plus(self._exchanged()).plus(before, -1)
        return result

    def check_replicas(self) -> None:
        """Raise ReplicaError, naming a rank, if values that must be equal differ."""
        check_equal(self._unsplit().parameters(), self.comm, self._steps)
        check_equal(self.model.parameters(), self.replicas_comm, self._steps)

    def agree(self, weight: float | None = None) -> None:
        average_buffers(self.model, self.replicas_comm, weight)

    def notes(self) -> dict[str, Any]:
        return {"overlap": self.parallel.overlap.chosen if self.parallel else False, "wire": "opaque"}

    def gradient_meter(self) -> Meter:
        """Traffic of averaging and split layers in steps, without the sums of a step."""
        averaged = self.parallel.buckets.comm if self.parallel else None
        own = averaged.meter.total() if isinstance(averaged, MeteredComm) else Meter()
        return own.plus(self._exchanged()).plus(self._evaluations, -1)

    def close(self) -> None:
        if self.parallel:
            self.parallel.close()
        for comm in self._layer_comms():
            comm.close()

    def _unsplit(self) -> nn.Module:
        """What is equal on all shards of a replica: the weights that are not split, and the buffers."""
        alike: nn.Module = nn.ParameterList(p for name, p in self.model.named_parameters() if name not in self.split)
        for number, buffer in enumerate(self.model.buffers()):
            alike.register_buffer(f"buffer{number}", buffer)
        return alike

    def _layer_comms(self) -> list[Comm]:
        comms = {id(m.comm): m.comm for m in self.model.modules() if isinstance(m, SplitLayer)}
        return [comm for comm in comms.values() if comm is not self.shards_comm]

    def _exchanged(self) -> Meter:
        """Traffic of the split layers until now."""
        sent = Meter()
        for comm in self._layer_comms():
            sent = sent.plus(comm.meter if isinstance(comm, MeteredComm) else Meter())
        return sent


def options_of(spec: RunSpec) -> Options:
    return Options(spec.averaging, spec.bucket_mb / spec.shrink, spec.overlap, check_replicas=spec.check_replicas)


def prepare(job: Job) -> PartEngine:
    spec, comm, grid = job.spec, job.comm, job.spec.grid
    parts = Parts(job)
    shards = comm.group(grid.shards_of(comm.rank))
    replicas = comm.group(grid.replicas_of(comm.rank))
    model = parts.deferred.model.to(job.place.dtype)
    if spec.emulated:
        from paceline.strategies.tensor.emulated import emulate

        return emulate(job, parts, model, shards, replicas)
    try:
        split = split_wide(model, shards, spec.model, job.console.line)
    except UsageError as error:  # the same on every rank
        raise AgreedError(str(error)) from error

    def own_part(name: str, tensor: Tensor) -> Tensor:
        if name not in split:
            return tensor
        part = share(tensor.shape[split[name]], shards.size, shards.rank)
        return tensor.narrow(split[name], part.start, len(part))

    parts.fill(model, parts.deferred.names, own_part)
    options = options_of(spec)
    optimizer = make_optimizer(spec, model.parameters())
    engine = TensorParallel(comm, model, optimizer, options, shards, replicas, split)
    pieces = {}
    for name, tensor in parts.whole.items():
        dim = split.get(name)
        spans = [share(tensor.shape[dim], grid.shards, i) for i in range(grid.shards)] if dim is not None else []
        pieces[name] = [Piece(rank, dim or 0, span.start, span.stop) for rank, span in enumerate(spans)]
        pieces[name] = pieces[name] or [Piece(0, 0, 0, rows(tensor))]
    engine.stream = grid.spot(comm.rank).replica  # shards of a replica have the same dropout
    seed_dropout(spec, engine.stream)
    return parts.ready(engine, model, pieces)

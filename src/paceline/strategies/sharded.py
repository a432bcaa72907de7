"""Data parallelism with a sharded optimizer (ZeRO, Rajbhandari et al., 2020): each worker updates 1/N of the weights.

A step sends what a ring all-reduce sends, with the update between its halves: reduce-scatter gives each rank the sum
of its slice of the gradients, the rank updates this slice of the weights, and all-gather gives everyone the others'
slices. So the state of the optimizer, and the time of an update, are divided by the number of workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from paceline.collectives.ring import RING
from paceline.strategies import options
from paceline.strategies.engine import Engine, Lockstep
from paceline.strategies.synchronous import DataParallelStrategy, Synchronous
from paceline.strategies.synchronous import Options as Averaging

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from paceline.checkpoint.load import Checkpoint
    from paceline.checkpoint.save import Held
    from paceline.comm.base import Comm
    from paceline.strategies.scattered import ScatteredBuckets
    from paceline.training.driver import Job

SHARDED = DataParallelStrategy(
    "sharded",
    "data parallel; each worker updates a part of the weights, and has only this part's optimizer state (ZeRO)",
    "paceline.strategies.sharded:prepare",
    options.DataParallel,
    averaging=RING.name,
    emulates=True,
)


class Options(Averaging):
    @property
    def buckets(self) -> type[ScatteredBuckets]:
        from paceline.strategies.scattered import ScatteredBuckets

        return ScatteredBuckets


class Sharded(Synchronous):
    """A step of `Synchronous`, in which each rank's optimizer has the rank's pieces of parameters instead of them."""

    buckets: ScatteredBuckets
    in_place = True
    scale_gradients = Lockstep.scale_gradients  # the sums of its pieces are this rank's own

    def __init__(
        self, comm: Comm, model: nn.Module, options: Options, make_optimizer: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        super().__init__(comm, model, None, options)
        self._make_optimizer = make_optimizer

    def setup(self) -> None:
        import torch

        super().setup()
        # A rank has no piece if there are fewer values than ranks; an optimizer must have a parameter.
        self._optimizer = self._make_optimizer([p.weights for p in self.buckets.pieces] or [torch.empty(0)])

    def gradients(self) -> dict[str, Tensor]:
        return {p.span.name: p.weights.grad for p in self.buckets.pieces if p.weights.grad is not None}

    def hold_optimizer(self, *, own: bool) -> Iterator[Held]:
        for piece in self.buckets.pieces:
            yield from piece.span.hold(self.optimizer.state.get(piece.weights, {}))

    def load_optimizer(self, checkpoint: Checkpoint, rank: int | None) -> None:
        from paceline.checkpoint import state

        keys = state.optimizer_keys(checkpoint)
        found = {id(p.weights): p.span.load(checkpoint, keys.get(p.span.name, ())) for p in self.buckets.pieces}
        state.set_state(self.optimizer, lambda weights: found.get(id(weights), {}))


def prepare(job: Job) -> Engine:
    from paceline.strategies.emulated import EmulatedSynchronous
    from paceline.strategies.replica import prepare_replica
    from paceline.strategies.setup import make_optimizer

    own = Options.of(job.spec)
    return prepare_replica(
        job,
        lambda model, _: Sharded(job.comm, model, own, partial(make_optimizer, job.spec)),
        lambda model, device: EmulatedSynchronous(job.comm, model, own, device),
    )

"""Gradients of which each rank gets the sum of its own slice, and weights of which it updates that slice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Span
from paceline.collectives.plan import Averaging
from paceline.collectives.ring import ALL_GATHER, REDUCE_SCATTER
from paceline.comm.base import Comm
from paceline.strategies.buckets import Bucket, GradientBuckets, Slot


@dataclass(frozen=True)
class Piece:
    """The part of a parameter in this rank's slice: what the optimizer updates."""

    slot: Slot
    span: Span  # of the parameter
    place: slice  # in the bucket
    weights: Tensor


class ScatteredBuckets(GradientBuckets):
    """Leaves in each rank the sums of slice r of every bucket, in the `.grad` of its `pieces`.

    The weights are in flat memory, too, one vector for each bucket, of which parameters are views. So the optimizer
    updates the pieces, and `gather_weights` sends whole slices.

    If ranks share memory, the weights are there, once for all ranks: each updates its slices of them when all have
    computed their gradients, and waits for the others before it computes with them again.
    """

    scattered = True
    aligned = 16  # the weights, too: kernels are slower with weights that do not begin at a cache line

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        averaging: Averaging,
        bucket_bytes: int,
        extras: int = 0,
        on_backward: Callable[[], None] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        super().__init__(model, comm, averaging, bucket_bytes, extras, on_backward, in_place=in_place)
        self.weights: list[Tensor] = []
        self.pieces: list[Piece] = []
        for bucket in self.buckets[:-1]:
            weights, mine = self._vector(bucket), self.slice_of(bucket)
            for slot in self.slots:
                if slot.bucket is bucket:
                    p, start = slot.parameter, slot.start - bucket.start
                    assert p.dtype == weights.dtype, "the whole model has the dtype of --dtype"
                    view = weights[start : start + p.numel()].as_strided(p.shape, p.stride())
                    p.data = view.copy_(p.detach())
                    first, last = max(start, mine.start), min(start + p.numel(), mine.stop)
                    if first < last:
                        span = Span(slot.name, p, first - start, last - start)
                        self.pieces.append(Piece(slot, span, slice(first, last), weights[first:last]))
            self.weights.append(weights)
        self._at = [slot.parameter.data_ptr() for slot in self.slots]

    def begin(self, scale: float, *, overlap: bool, share: float | None = None) -> None:
        super().begin(scale, overlap=overlap, share=share)
        if self._changed:
            self.refuse(
                "parameters were added, replaced, frozen or unfrozen during training, but the optimizer's state is "
                "divided over workers once, at the start: use another strategy, such as ring"
            )

    def as_laid_out(self) -> bool:
        return super().as_laid_out() and self._at == [slot.parameter.data_ptr() for slot in self.slots]

    def finish(self) -> None:
        super().finish()
        for piece in self.pieces:
            piece.weights.grad = piece.slot.bucket.summed[piece.place] if piece.slot.seen else None

    def gather_weights(self) -> None:
        if self.shared:
            self.comm.barrier()
        elif self.comm.size > 1:
            for weights in self.weights:
                ALL_GATHER.run(self.comm, weights)

    def _sum(self, flat: Tensor) -> None:
        (self.averaging if flat is self.buckets[-1].flat else REDUCE_SCATTER).run(self.comm, flat)

    def _vector(self, bucket: Bucket) -> Tensor:
        """Memory for the weights of a bucket."""
        if self.shared:
            return self.comm.shared_vector(bucket.dtype, len(bucket.flat))
        return torch.empty_like(bucket.flat)

    def _give(self, slot: Slot, *, any_rank: bool) -> None:
        """Remember whether any rank has a gradient: the optimizer leaves a parameter alone that has none."""
        slot.seen, slot.own, slot.parameter.grad = any_rank, None, None

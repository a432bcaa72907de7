"""Gradients of which each rank gets the sum of its own slice, and weights of which it updates that slice."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import Span
from paceline.collectives.plan import Averaging
from paceline.collectives.ring import ALL_GATHER, REDUCE_SCATTER
from paceline.comm.base import Comm
from paceline.layout import share
from paceline.strategies.buckets import Bucket, GradientBuckets, Slot, squares
from paceline.strategies.finite import is_finite

OWN = 2  # numbers after the extras: how many ranks have a sum that is not finite, and the sum of squares


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

    The tail is a bucket of its own, in float64, which `averaging` sums on all ranks when the slices are there: it also
    carries what each rank finds in its slices.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        averaging: Averaging,
        bucket_bytes: int,
        extras: int = 0,
        on_backward: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(model, comm, averaging, bucket_bytes, extras + OWN, on_backward)
        self.weights: list[Tensor] = []
        self.pieces: list[Piece] = []
        for bucket in self.buckets[:-1]:
            weights = torch.empty_like(bucket.flat)
            mine = self._slice(weights)
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
            piece.weights.grad = piece.slot.bucket.flat[piece.place] if piece.slot.seen else None

    def finite(self) -> bool:
        return not self.extras[-2]

    def squares(self) -> float:
        return float(self.extras[-1])

    def gather_weights(self) -> None:
        if self.comm.size > 1:
            for weights in self.weights:
                ALL_GATHER.run(self.comm, weights)

    def _sum(self, flat: Tensor) -> None:
        (self.averaging if flat is self.buckets[-1].flat else REDUCE_SCATTER).run(self.comm, flat)

    def _slice(self, flat: Tensor) -> slice:
        """The part of a vector that this rank updates."""
        mine = share(len(flat), self.comm.size, self.comm.rank)
        return slice(mine.start, mine.stop)

    def _fill_tail(self) -> None:
        if self.thread:
            self.thread.wait()
        slices = [bucket.flat[self._slice(bucket.flat)] for bucket in self.buckets[:-1]]
        total = sum(float(part) for each in slices for part in squares(each))
        finite = math.isfinite(total) or all(map(is_finite, slices))
        self.extras[-OWN:] = torch.tensor([not finite, total], dtype=torch.float64)
        super()._fill_tail()

    def _give(self, slot: Slot, *, any_rank: bool) -> None:
        """Remember whether any rank has a gradient: the optimizer leaves a parameter alone that has none."""
        slot.seen, slot.own, slot.parameter.grad = any_rank, None, None

    def _last_bucket(self) -> Bucket:
        start = self._sizes.get(torch.float64, 0)
        self.buckets.append(Bucket(torch.float64, start, start))
        return self.buckets[-1]

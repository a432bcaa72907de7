"""Communication between the shards of a layer: gathering parts and summing, with their gradients.

Values that are equal on all shards are *whole*; along one dimension each shard can also have its own *part*
(`layout.share`).

    function       forward            backward               (f, g and the gather of Shoeybi et al. 2019,
    enter          identity           sums the gradients      arXiv:1909.08053)
    add_up         sums               identity
    put_together   parts to whole     takes its own part
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from paceline.comm.base import Comm, Work
from paceline.layout import share


def enter(x: Tensor, comm: Comm) -> Tensor:
    """Whole values as the input of a split layer; the shards' gradients are summed."""
    result: Tensor = _Enter.apply(x, comm) if comm.size > 1 else x  # type: ignore[no-untyped-call]
    return result


def add_up(x: Tensor, comm: Comm) -> Tensor:
    """The sum over the shards, in place: the values of `x` must not be needed for a gradient."""
    x = x.float() if x.dtype == torch.bfloat16 else x  # autocast's; not all transports have it
    result: Tensor = _AddUp.apply(x, comm) if comm.size > 1 else x  # type: ignore[no-untyped-call]
    return result


def put_together(part: Tensor, dim: int, total: int, comm: Comm) -> Tensor:
    """The whole tensor, with `total` along `dim`, from every shard's part."""
    if comm.size == 1:
        return part
    part = part.float() if part.dtype == torch.bfloat16 else part
    result: Tensor = _PutTogether.apply(part, dim % part.dim(), total, comm)  # type: ignore[no-untyped-call]
    return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.comm, ctx.layout = comm, layout_of(x)
        return x.detach()  # not a view, which may have other strides if a dimension is 1

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        # It was just created by the layer's backward, and nothing else uses it: it can be summed in place.
        grad = grad.contiguous(memory_format=ctx.layout)
        if grad.numel():
            ctx.comm.allreduce(flat(grad, ctx.layout))
        return grad, None


class _AddUp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, comm: Comm) -> Tensor:
        ctx.mark_dirty(x)
        if x.numel():
            comm.allreduce(x.view(-1))
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _PutTogether(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, dim: int, total: int, comm: Comm) -> Tensor:
        ctx.dim, ctx.own = dim, share(total, comm.size, comm.rank)
        return gather(part, dim, total, comm)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.narrow(ctx.dim, ctx.own.start, len(ctx.own)), None, None, None


def gather(part: Tensor, dim: int, total: int, comm: Comm) -> Tensor:
    """The same without gradients. Every shard sends its part to all others; a part is copied to its place while the
    next are in flight, and a part that is contiguous in the whole (along dimension 0) is received in place."""
    layout = layout_of(part)
    part = part.contiguous(memory_format=layout)
    shape = list(part.shape)
    shape[dim] = total
    whole = torch.empty(shape, dtype=part.dtype, device=part.device, memory_format=layout)
    places = [whole.narrow(dim, s.start, len(s)) for s in (share(total, comm.size, r) for r in range(comm.size))]
    receives: list[tuple[Work, Tensor, Tensor]] = []
    for other in _others(comm):
        place = places[other]
        if place.numel():
            dense = place.is_contiguous(memory_format=layout)
            buffer = place if dense else torch.empty_like(place, memory_format=layout)
            receives.append((comm.irecv(flat(buffer, layout), other), place, buffer))
    sends = [comm.isend(flat(part, layout), other) for other in reversed(_others(comm)) if part.numel()]
    places[comm.rank].copy_(part)
    for work, place, buffer in receives:
        work.wait()
        if buffer is not place:
            place.copy_(buffer)
    for send in sends:
        send.wait()
    return whole


def _others(comm: Comm) -> list[int]:
    """The other ranks, starting with the previous one: each sends first to the rank that waits for it first."""
    return [(comm.rank - i) % comm.size for i in range(1, comm.size)]


def layout_of(x: Tensor) -> torch.memory_format:
    """The memory layout of `x`, decided from what is equal on all shards, for any number of channels on each."""
    last = x.dim() == 4 and x.stride(1) == 1 and x.shape[2] * x.shape[3] > 1
    return torch.channels_last if last else torch.contiguous_format


def flat(x: Tensor, layout: torch.memory_format) -> Tensor:
    """The values in memory order, as a view."""
    return (x.permute(0, 2, 3, 1) if layout == torch.channels_last else x).view(-1)

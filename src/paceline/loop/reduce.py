"""Sums, means and extremes of a user's own numbers over ranks."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from paceline.comm.base import Comm
from paceline.errors import UsageError, unknown
from paceline.loop.nested import change_each
from paceline.loop.world import world

T = TypeVar("T")
OPERATIONS = ("sum", "mean", "max", "min")


def all_reduce(values: T, op: str = "sum", comm: Comm | None = None) -> T:
    """The sum (or `mean`, `max`, `min`) over all ranks of a number, a tensor, or a list, tuple or dict of these.

        loss, correct, samples = paceline.all_reduce((loss_sum, correct, samples))
        accuracy = correct / samples

    All ranks call it with the same structure, and get the same result; what was passed does not change. Integers are
    exact up to 2**53.
    """
    if op not in OPERATIONS:
        raise unknown("operation", op, OPERATIONS)
    ranks = comm or world()

    def reduced(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _reduced(value.detach(), op, ranks)
        if isinstance(value, Real):
            # A rank may have the int 0 where others have floats: all ranks send the same, and whether theirs is one.
            is_float = not isinstance(value, Integral) or op == "mean"
            pair = torch.tensor([float(value), -is_float if op == "min" else is_float], dtype=torch.float64)
            found, floats = _reduced(pair, op, ranks).tolist()
            return found if floats else int(found)
        raise UsageError(f"all_reduce of a {type(value).__name__}: pass numbers, tensors, or lists and dicts of them")

    found: T = change_each(reduced, values)
    return found


def _reduced(tensor: Tensor, op: str, comm: Comm) -> Tensor:
    if op in ("max", "min"):
        table = torch.zeros(comm.size, *tensor.shape, dtype=tensor.dtype, device=comm.device)
        table[comm.rank] = tensor
        comm.allreduce(table.view(-1))
        return (table.amax(0) if op == "max" else table.amin(0)).to(tensor.device)
    if not tensor.is_floating_point():
        wide = torch.float64 if op == "mean" else torch.int64
    else:
        wide = tensor.dtype if tensor.dtype.itemsize >= 4 else torch.float32
    flat = tensor.to(comm.device, wide, copy=True).reshape(-1)
    comm.allreduce(flat)
    if op == "mean":
        flat /= comm.size
    keep = tensor.dtype if tensor.is_floating_point() else wide
    return flat.view(tensor.shape).to(tensor.device, keep)

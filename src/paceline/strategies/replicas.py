"""Keeps replicas equal: checks that models match, broadcasts weights, averages buffers, compares digests."""

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import zip_longest

import torch
import xxhash
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from paceline.comm.base import Comm
from paceline.comm.words import all_or_none, tell
from paceline.errors import ReplicaError, UsageError


def check_same_model(model: nn.Module, comm: Comm, settings: str = "") -> None:
    """Raise an error on all ranks, naming the difference, if a rank's model or settings differ from rank 0's."""
    mine = [settings, *(_describe("parameter", name, p) for name, p in model.named_parameters())]
    mine += [_describe("buffer", name, buffer) for name, buffer in model.named_buffers()]
    theirs = tell("\n".join(mine), comm).split("\n")

    def compare() -> None:
        for own, other in zip_longest(mine, theirs, fillvalue="nothing"):
            if own != other:
                raise UsageError(f"ranks must have the same model: this rank has {own}, rank 0 has {other}")
            if own.endswith(_LAZY):
                raise UsageError(f"{own}: run a batch through the model first")

    all_or_none(compare, comm)


_LAZY = "without a shape"


def _describe(kind: str, name: str, tensor: Tensor) -> str:
    if is_lazy(tensor):
        return f"{kind} {name!r} {_LAZY}"
    dtype, trained = str(tensor.dtype).removeprefix("torch."), ", trained" if tensor.requires_grad else ""
    strides = "" if tensor.is_contiguous() else f", strides {tensor.stride()}"
    return f"{kind} {name!r} ({dtype}, shape {tuple(tensor.shape)}{strides}{trained})"


def broadcast_state(model: nn.Module, comm: Comm) -> None:
    """Give every rank the weights and buffers of rank 0, in one message per dtype."""
    for flat in _flattened([*model.parameters(), *model.buffers()], comm):
        comm.broadcast(flat)


def average_buffers(model: nn.Module, comm: Comm, weight: float | None = None) -> None:
    """Make buffers equal: floating-point ones (batch-norm statistics) to their mean, others to the last rank's values.

    `weight` is this rank's weight in the mean; by default each of N ranks has 1/N. The last rank has samples in every
    step (`layout.share`), so its number of batches is correct. Constants, which may be infinite, do not change, because
    the differences from the last rank's values are averaged.
    """
    if comm.size == 1:
        return
    for flat in _flattened(list(model.buffers()), comm):
        own = flat.clone()
        comm.broadcast(flat, comm.size - 1)
        if flat.is_floating_point():
            change = (own - flat).masked_fill_(own == flat, 0.0).mul_(1 / comm.size if weight is None else weight)
            comm.allreduce(change)
            flat.add_(change)


def _flattened(tensors: list[Tensor], comm: Comm) -> Iterator[Tensor]:
    """The tensors' values in one flat tensor per dtype; changes to it are copied back to the tensors."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.dtype, []).append(tensor.detach())
    for group in groups.values():
        flat = torch.cat([t.reshape(-1) for t in group]).to(comm.device)
        yield flat
        for t, values in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(values.view(t.shape))


def digest(tensors: Iterable[Tensor]) -> int:
    """63 bits of a hash of the exact values."""
    hashed = xxhash.xxh3_64()
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hashed.intdigest() >> 1


def check_equal(tensors: Iterable[Tensor], comm: Comm, step: int, what: str = "weights") -> None:
    """Compare tensors of all ranks; raise an error on all ranks that names those that differ from the majority."""
    table = torch.zeros(comm.size, dtype=torch.int64)
    table[comm.rank] = digest(tensors)
    table = table.to(comm.device)
    comm.allreduce(table)
    digests = table.tolist()
    votes = Counter(digests)
    if len(votes) == 1:
        return
    # Without a majority (two ranks), rank 0's value counts as correct.
    right = max(votes, key=lambda value: (votes[value], value == digests[0]))
    wrong = [comm.name(rank) for rank, value in enumerate(digests) if value != right]
    raise ReplicaError(
        f"replicas differ after step {step}: rank{'s' if len(wrong) > 1 else ''} "
        f"{', '.join(map(str, wrong))} {'have' if len(wrong) > 1 else 'has'} different {what} than the others; "
        f"their memory, code or input differs",
        rank=wrong[0],
    )

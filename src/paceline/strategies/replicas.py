"""Replicas that stay equal: starting from one set of weights, checking digests, averaging buffers."""

import hashlib
from collections import Counter
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.errors import ReplicaError


def broadcast_state(model: nn.Module, comm: Comm) -> None:
    """Give every rank the weights and buffers of rank 0, one message a dtype."""
    tensors: dict[torch.dtype, list[Tensor]] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        tensors.setdefault(tensor.dtype, []).append(tensor.detach())
    for group in tensors.values():
        flat = torch.cat([t.reshape(-1) for t in group]).to(comm.device)
        comm.broadcast(flat)
        for t, values in zip(group, flat.split([t.numel() for t in group]), strict=True):
            t.copy_(values.view(t.shape))


def average_buffers(model: nn.Module, comm: Comm) -> None:
    """Make buffers equal: floating ones (batch-norm statistics) by their mean, the others as rank 0 has them."""
    if comm.size == 1:
        return
    for buffer in model.buffers():
        flat = buffer.detach().reshape(-1).to(comm.device).clone()
        if buffer.is_floating_point():
            comm.allreduce(flat)
            flat /= comm.size
        else:
            comm.broadcast(flat)
        buffer.copy_(flat.view(buffer.shape))


def digest(tensors: Iterable[Tensor]) -> int:
    """63 bits of a hash over the exact values."""
    hashed = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        hashed.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return int.from_bytes(hashed.digest(), "little") >> 1


def check_equal(model: nn.Module, comm: Comm, step: int) -> None:
    """Compare every rank's weights; raise on all ranks, naming the one that is alone with its values."""
    table = torch.zeros(comm.size, dtype=torch.int64)
    table[comm.rank] = digest(model.parameters())
    table = table.to(comm.device)
    comm.allreduce(table)
    digests = table.tolist()
    votes = Counter(digests)
    if len(votes) == 1:
        return
    # Where no value has a majority (two ranks), rank 0's counts as right.
    right = max(votes, key=lambda value: (votes[value], value == digests[0]))
    wrong = [comm.name(rank) for rank, value in enumerate(digests) if value != right]
    raise ReplicaError(
        f"replicas differ after step {step}: rank{'s' if len(wrong) > 1 else ''} "
        f"{', '.join(map(str, wrong))} {'have' if len(wrong) > 1 else 'has'} other weights than the rest; "
        f"their memory, their code or their input is not the same",
        rank=wrong[0],
    )

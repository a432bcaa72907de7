"""Averagings, as cases that run on each rank."""

from __future__ import annotations

import torch

from paceline.collectives.choose import TABLE
from paceline.collectives.ring import ALL_GATHER, REDUCE_SCATTER
from paceline.comm.base import Comm
from paceline.comm.metered import Meter, MeteredComm
from paceline.layout import share
from paceline.strategies.replicas import digest


def sums_and_meters(comm: Comm, name: str, lengths: list[int], dtype: str = "float32") -> list[dict[str, int]]:
    """For each length: is the sum right, equal to the last bit on every rank, and what did the meter see?"""
    kind = getattr(torch, dtype)
    found = []
    for length in lengths:
        each = _values_of_ranks(comm.size, length, kind)
        mine = each[comm.rank].clone()
        metered = MeteredComm(comm)
        TABLE[name].run(metered, mine)
        truth = torch.stack(each).double().sum(0)
        right = torch.allclose(mine.double(), truth, rtol=1e-5, atol=1e-5)
        found.append({"right": right, "digest": digest([mine]), **_counted(metered.meter)})
    return found


def halves_and_meters(
    comm: Comm, lengths: list[int], dtype: str = "float32"
) -> list[tuple[dict[str, int], dict[str, int]]]:
    """For each length, of both halves of the ring: does every rank have what it should, and what did the meter see?"""
    found = []
    for length in lengths:
        each = _values_of_ranks(comm.size, length, getattr(torch, dtype))
        mine, own = each[comm.rank].clone(), share(length, comm.size, comm.rank)
        first, second = MeteredComm(comm), MeteredComm(comm)
        REDUCE_SCATTER.run(first, mine)
        truth = torch.stack(each).double().sum(0)[own.start : own.stop]
        scattered = torch.allclose(mine[own.start : own.stop].double(), truth, rtol=1e-5, atol=1e-5)
        mine = each[comm.rank].clone()
        ALL_GATHER.run(second, mine)
        chunks = [share(length, comm.size, rank) for rank in range(comm.size)]
        wanted = torch.cat([values[c.start : c.stop] for values, c in zip(each, chunks, strict=True)])
        found.append((
            {"right": scattered, **_counted(first.meter)},
            {"right": torch.equal(mine, wanted), **_counted(second.meter)},
        ))  # fmt: skip
    return found


def _values_of_ranks(ranks: int, length: int, kind: torch.dtype) -> list[torch.Tensor]:
    return [torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(kind) for rank in range(ranks)]


def _counted(meter: Meter) -> dict[str, int]:
    return {
        "bytes_sent": meter.bytes_sent + meter.opaque_bytes,
        "bytes_received": meter.bytes_received + meter.opaque_bytes,
        "messages_sent": meter.messages_sent,
    }

"""Averagings, as cases that run on each rank."""

from __future__ import annotations

import torch

from paceline.collectives.choose import TABLE
from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.strategies.replicas import digest


def sums_and_meters(comm: Comm, name: str, lengths: list[int], dtype: str = "float32") -> list[dict[str, int]]:
    """For each length: is the sum right, equal to the last bit on every rank, and what did the meter see?"""
    kind = getattr(torch, dtype)
    found = []
    for length in lengths:
        each = [
            torch.randn(length, generator=torch.Generator().manual_seed(rank)).to(kind) for rank in range(comm.size)
        ]
        mine = each[comm.rank].clone()
        metered = MeteredComm(comm)
        TABLE[name].run(metered, mine)
        truth = torch.stack(each).double().sum(0)
        meter = metered.meter
        found.append(
            {
                "right": torch.allclose(mine.double(), truth, rtol=1e-5, atol=1e-5),
                "digest": digest([mine]),
                "bytes_sent": meter.bytes_sent + meter.opaque_bytes,
                "bytes_received": meter.bytes_received + meter.opaque_bytes,
                "messages_sent": meter.messages_sent,
            }
        )
    return found

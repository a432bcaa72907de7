"""Measures, by round trips, how the clocks of other machines differ from that of rank 0's machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from paceline.comm.base import Comm
from paceline.comm.words import share_text
from paceline.run.records import Clock

ROUND_TRIPS = 10
RESOLUTION = 1e-6  # seconds: of a Unix time in float64, rounded up


def measure_clock(comm: Comm, machine: str | None, clock: Callable[[], float] = time.time) -> Clock | None:
    """This rank's clock beside that of rank 0, which has none; `machine` names the one that this rank is on.

    All ranks must call it. Ranks on the machine of rank 0 have its clock, and exchange no messages.
    """
    machines = share_text(machine or f"unknown, of rank {comm.rank}", comm)
    away = [rank for rank, other in enumerate(machines) if other != machines[0]]
    if comm.rank == 0:
        for rank in away:
            _answer(comm, rank, clock)
        return None
    if comm.rank not in away:
        return Clock(0.0, 0.0)
    began = time.perf_counter()
    uncertainty, offset = min(_ask(comm, clock) for _ in range(ROUND_TRIPS))
    return Clock(offset, uncertainty, round(time.perf_counter() - began, 6))


def _answer(comm: Comm, rank: int, clock: Callable[[], float]) -> None:
    message = torch.zeros(1, dtype=torch.float64, device=comm.device)
    for _ in range(ROUND_TRIPS):
        comm.recv(message, rank)
        message.fill_(clock())
        comm.send(message, rank)


def _ask(comm: Comm, clock: Callable[[], float]) -> tuple[float, float]:
    """The uncertainty of the offset, and the offset: rank 0 answered at some moment of the round trip."""
    message = torch.zeros(1, dtype=torch.float64, device=comm.device)
    sent, start = clock(), time.perf_counter()
    comm.send(message, 0)
    comm.recv(message, 0)
    half = (time.perf_counter() - start) / 2
    return half + RESOLUTION, message.item() - sent - half

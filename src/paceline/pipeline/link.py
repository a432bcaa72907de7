"""Measures how fast two ranks exchange messages, for the cost of a cut between them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from statistics import median

import torch
from torch.distributed import HashStore

from paceline.comm.base import Comm
from paceline.comm.process_group import process_group_world

# Values of 4 bytes. Messages grow from round to round until a round trip takes long enough for a good measurement.
SHORTEST, LONGEST, GROWTH = 1 << 14, 1 << 20, 4
LONG_ENOUGH = 0.05  # seconds
BUDGET = 1.0  # seconds for all rounds; a single round may take longer
ROUNDS = 5
TAG = 3


def bandwidths(comm: Comm, ranks: Sequence[int]) -> list[float]:
    """The bandwidth between each of these ranks and the next, pair by pair; all ranks call it and get the result."""
    return [bandwidth(comm, first, second) for first, second in pairwise(ranks)]


def bandwidth(comm: Comm, first: int, second: int) -> float:
    """Bytes per second from one rank to the other, measured by `first`; the others wait for the result."""
    found = torch.zeros(1, dtype=torch.float64)
    if comm.rank == first:
        found[0] = _lead(comm, second)
    elif comm.rank == second:
        _follow(comm, first)
    comm.broadcast(found, first)
    return found.item()


def _lead(comm: Comm, other: int) -> float:
    """The speed of the longest message, as the median of its rounds."""
    _rounds(comm, other, 1, 1)  # warm-up: the other rank may be late, and connections may have to be opened
    length, begun = SHORTEST, time.perf_counter()
    while True:
        times = _rounds(comm, other, length, 1)
        if times[0] >= LONG_ENOUGH or length == LONGEST:
            left = begun + BUDGET - time.perf_counter()
            more = min(ROUNDS, int(left / times[0]))
            if more > 0:
                times = _rounds(comm, other, length, more)
            # A single slow round may be an outlier.
            if more < ROUNDS or median(times) >= LONG_ENOUGH or length == LONGEST:
                break
        length *= GROWTH
    _rounds(comm, other, 0, 0)
    return length * 4 / (median(times) / 2)


def _rounds(comm: Comm, other: int, length: int, count: int) -> list[float]:
    """Round-trip seconds of `count` messages; 0 messages: the measurement is over."""
    comm.send(torch.tensor([length, count], dtype=torch.float64), other, TAG)
    message, times = torch.zeros(length), []
    for _ in range(count):
        start = time.perf_counter()
        comm.send(message, other, TAG)
        comm.recv(message, other, TAG)
        times.append(max(time.perf_counter() - start, 1e-9))
    return times


def _follow(comm: Comm, other: int) -> None:
    """Send back every message until the measurement is over."""
    coming = torch.zeros(2, dtype=torch.float64)
    while True:
        comm.recv(coming, other, TAG)
        length, count = map(int, coming.tolist())
        if not count:
            return
        message = torch.zeros(length)
        for _ in range(count):
            comm.recv(message, other, TAG)
            comm.send(message, other, TAG)


def local_bandwidth() -> float:
    """The bandwidth between two ranks on this machine, with gloo over loopback."""
    store = HashStore()

    def rank(number: int) -> float:
        with process_group_world("gloo", store, number, 2, 30.0) as comm:
            return bandwidth(comm, 0, 1)

    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(rank, range(2))
    return found

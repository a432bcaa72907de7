"""How fast two ranks exchange messages: what a cut between them would cost."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from statistics import median

import torch
from torch.distributed import HashStore

from paceline.comm.base import Comm
from paceline.comm.process_group import process_group_world

MESSAGE = 1 << 20  # values of 4 bytes: about the size of an activation
ROUNDS = 5
TAG = 3


def bandwidth(comm: Comm, first: int, second: int) -> float:
    """Bytes a second from one rank to the other, as `first` finds it; the others just wait for the answer."""
    seconds = torch.zeros(1, dtype=torch.float64)
    if comm.rank in (first, second):
        other = second if comm.rank == first else first
        message, times = torch.zeros(MESSAGE), []
        for _ in range(ROUNDS + 1):
            start = time.perf_counter()
            if comm.rank == first:
                comm.send(message, other, TAG)
                comm.recv(message, other, TAG)
            else:
                comm.recv(message, other, TAG)
                comm.send(message, other, TAG)
            times.append(time.perf_counter() - start)
        seconds[0] = median(times[1:]) / 2
    comm.broadcast(seconds, first)
    return MESSAGE * 4 / seconds.item()


def local_bandwidth() -> float:
    """Of messages between two ranks on this machine, over gloo and the loopback interface."""
    store = HashStore()

    def rank(number: int) -> float:
        with process_group_world("gloo", store, number, 2, 30.0) as comm:
            return bandwidth(comm, 0, 1)

    with ThreadPoolExecutor(2) as pool:
        found, _ = pool.map(rank, range(2))
    return found

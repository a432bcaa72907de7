"""How fast two ranks exchange messages: what a cut between them would cost."""

from __future__ import annotations

import time
from statistics import median

import torch

from paceline.comm.base import Comm

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

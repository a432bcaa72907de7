"""Sums in memory that ranks share, and waits that are cancelled, as cases that run on each rank."""

from __future__ import annotations

import itertools
import math
import random
import threading
import time
from typing import Any

import pytest
import torch
from worlds import limited_to

from paceline.comm import shm
from paceline.comm.base import Comm, Part
from paceline.comm.metered import MeteredComm
from paceline.comm.shm import ShmComm
from paceline.errors import CommError
from paceline.layout import share
from paceline.strategies.replicas import digest

KINDS = (torch.float32, torch.float64)


def values(rank: int, turn: int, dtype: torch.dtype, length: int) -> torch.Tensor:
    return torch.randn(length, generator=torch.Generator().manual_seed(100 * turn + rank), dtype=dtype)


def sums_in_place(comm: Comm, lengths: list[int], turns: int, seed: int) -> list[dict[str, int]]:
    """In each turn: is the sum right, is it the same to the last bit on all ranks, and what did the meter see?

    Ranks pause at random, and overwrite their own vectors as soon as they may, while others may still read the sums.
    """
    dice = random.Random(seed * comm.size + comm.rank)
    metered = MeteredComm(comm.dup())
    length = dict(zip(KINDS, lengths, strict=True))
    memory = metered.shared_sum(length, squares=seed % 2 == 0)
    found = []
    for turn in range(turns):
        cuts = {kind: sorted(random.Random(turn).sample(range(1, length[kind]), 2)) for kind in KINDS}
        before = metered.meter.bytes_received
        for kind in KINDS:
            memory.mine[kind].copy_(values(comm.rank, turn, kind, length[kind]))
        for number in range(3):
            for kind in KINDS:
                _pause(dice)
                start, stop = [0, *cuts[kind]][number], [*cuts[kind], length[kind]][number]
                memory.give(kind, start, stop, _keep_parts(memory.mine[kind], start, stop, comm, dice))
        squares = memory.wait()
        memory.finish()
        for kind in KINDS:
            memory.mine[kind].fill_(float("nan"))
        _pause(dice)
        truth = {
            kind: torch.stack([values(r, turn, kind, length[kind]).double() for r in range(comm.size)]).sum(0)
            for kind in KINDS
        }
        own = [
            memory.total[kind][start:stop][slice_of(stop - start, comm)].double()
            for kind in KINDS
            for start, stop in itertools.pairwise([0, *cuts[kind], length[kind]])
        ]
        wanted = math.fsum(float(part.dot(part)) for part in own) if seed % 2 == 0 else 0.0
        found.append(
            {
                "squares": math.isclose(squares, wanted, rel_tol=1e-5),
                "right": all(torch.allclose(memory.total[kind].double(), truth[kind], atol=1e-5) for kind in KINDS),
                "digest": digest(memory.total.values()),
                "received": metered.meter.bytes_received - before,
                "sent_as_much": metered.meter.bytes_sent == metered.meter.bytes_received,
            }
        )
    return found


def slice_of(length: int, comm: Comm) -> slice:
    own = share(length, comm.size, comm.rank)
    return slice(own.start, own.stop)


def _keep_parts(mine: torch.Tensor, start: int, stop: int, comm: Comm, dice: random.Random) -> list[Part]:
    """Up to two parts of what only this rank reads, which then are not in its vector."""
    own = mine[start:stop][slice_of(stop - start, comm)]
    ends = sorted(dice.randint(0, len(own)) for _ in range(dice.choice([0, 2, 4])))
    first = start + slice_of(stop - start, comm).start
    parts = []
    for low, high in zip(ends[::2], ends[1::2], strict=True):
        parts.append(Part(first + low, own[low:high] * 4, 0.25))
        own[low:high].fill_(float("nan"))
    return parts


def _pause(dice: random.Random) -> None:
    if dice.random() < 0.3:
        time.sleep(dice.uniform(0, 0.004))


def cancelled_by_a_thread(comm: Comm) -> list[str]:
    """Waits of a rank that another of its threads cancels, on a communicator and on a group of it."""
    messages = []
    for nested in (False, True):
        with limited_to(comm, 20.0) as outer:
            assert isinstance(outer, ShmComm)
            inner = outer.dup() if nested else outer
            if comm.rank == 0:
                timer = threading.Timer(0.1, outer.cancel, ["the members have changed"])
                timer.start()
                try:
                    inner.recv(torch.zeros(1), 1)
                except CommError as error:
                    messages.append(str(error))
                timer.join()
            comm.barrier()
    return messages


def of_another_length(comm: Comm, first: bool) -> str:
    """A message that is longer than its receive, which is posted before or after it comes."""
    message = ""
    if comm.rank == 1:
        comm.isend(torch.ones(5), 0)
    if first:
        comm.barrier()
    if comm.rank == 0:
        try:
            comm.recv(torch.zeros(4), 1)
        except CommError as error:
            message = str(error)
    if not first:
        comm.barrier()
    return message


def bytes_of_one_sum(comm: Comm, length: int) -> int:
    """The bytes that the meter counts for one sum of float64."""
    metered = MeteredComm(comm.dup())
    memory = metered.shared_sum({torch.float64: length})
    memory.give(torch.float64, 0, length)
    memory.finish()
    return metered.meter.bytes_received


def late_reader(comm: Comm, late: int, root: int) -> bool:
    """One rank adds up late; the others go on to the next collectives, of several pieces. Are all results right?"""
    add_up = shm.add_up

    def add_up_late(*args: Any) -> None:
        time.sleep(0.004)
        add_up(*args)

    length, right = 5 * shm.Layout(comm.size).staged_piece // 8, True
    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == late:
            patch.setattr(shm, "add_up", add_up_late)
        for turn in range(6):
            mine = torch.full((length,), float(comm.rank + turn), dtype=torch.float64)
            small = mine[: 1000 + turn].clone()
            told = torch.full((length // (1 + turn % 3),), float(comm.rank - turn), dtype=torch.float64)
            comm.allreduce(mine)
            comm.broadcast(told, root)
            comm.allreduce(small)
            comm.broadcast(told, root)
            wanted = sum(range(comm.size)) + comm.size * turn
            right = right and bool((mine == wanted).all() and (small == wanted).all() and (told == root - turn).all())
    return right

"""Ranks that share memory exchange messages and sums of random sizes, with random delays; some are killed or stopped.

No sum and no message may be wrong. If a rank is killed, all others must end with an error that names it, long before
their deadline; if one is stopped, at the deadline.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from paceline.comm import shm
from paceline.comm.base import Comm
from paceline.comm.seat import Seat
from paceline.comm.shm import PIECE, shm_world
from paceline.errors import CommError, CommTimeout

TRIALS = 200
WORLDS = 5  # of a trial: importing torch takes longer than one of them
OPERATIONS = 25
DEADLINE = 20.0  # of waits, where nobody is stopped
SHORT = 4.0  # where somebody is; longer than anything takes on a busy machine
ENDED, TIMED_OUT, WRONG = 10, 11, 12  # exit codes of ranks


def trial(seed: int, folder: Path) -> Counter[str]:
    done = Counter[str]()
    for number in range(WORLDS * seed, WORLDS * (seed + 1)):
        with tempfile.TemporaryDirectory() as meeting:  # whose path is short enough for sockets
            done += world(number, Path(meeting))
    return done


def world(seed: int, meeting: Path) -> Counter[str]:
    """Ranks that are started, exchange, and end: what happened to them."""
    dice = random.Random(seed)
    size, fate = dice.randint(2, 6), dice.choice(["none", "none", "killed", "stopped"])
    victim, moment = dice.randrange(size), dice.randrange(OPERATIONS)
    timeout = SHORT if fate == "stopped" else DEADLINE
    forks = multiprocessing.get_context("fork")
    ranks = [
        forks.Process(target=be_rank, args=(rank, size, seed, meeting, timeout, fate, victim, moment))
        for rank in range(size)
    ]
    for process in ranks:
        process.start()
    if fate == "killed":
        ranks[victim].join(60)
    fell = time.monotonic()
    others = [process for rank, process in enumerate(ranks) if fate == "none" or rank != victim]
    for process in others:
        process.join(60)
    took, stuck = time.monotonic() - fell, [n for n, process in enumerate(ranks) if process.is_alive()]
    for process in ranks:
        process.kill()
        process.join()
    assert stuck == ([victim] if fate == "stopped" else []), f"{fate} {victim} at {moment}: {stuck} did not end"
    codes = [process.exitcode for process in others]
    if fate == "none":
        assert codes == [0] * size, codes
    elif fate == "killed":
        assert set(codes) <= {ENDED}, codes
        assert took < DEADLINE / 2, f"{took} s"
    else:
        # Whoever waits for the stopped rank gives up at the deadline; the others may then see that it has ended.
        assert set(codes) <= {ENDED, TIMED_OUT}, codes
        assert TIMED_OUT in codes
    return Counter({"worlds without a fault" if fate == "none" else f"ranks {fate}": 1, "worlds": 1, "ranks": size})


def be_rank(
    rank: int, size: int, seed: int, meeting: Path, timeout: float, fate: str, victim: int, moment: int
) -> None:
    torch.set_num_threads(1)
    plan, own = random.Random(seed + 1), random.Random(seed * 100 + rank)
    if own.random() < 0.4:
        shm.add_up = slowly(shm.add_up, own)
    try:
        comm = shm_world(Seat(rank, size, rank, size, "soak", sockets=str(meeting)), timeout)
        group = comm.dup()
        for turn in range(OPERATIONS):
            if rank == victim and turn == moment and fate != "none":
                os.kill(os.getpid(), signal.SIGKILL if fate == "killed" else signal.SIGSTOP)
            action, length, root = plan.choice(ACTIONS), _length(plan), plan.randrange(size)
            chosen = comm if plan.random() < 0.5 else group
            if own.random() < 0.3:
                time.sleep(own.uniform(0, 0.005))
            if not action(chosen, length, root, turn):
                os._exit(WRONG)
        comm.barrier()
        comm.close()
    except CommTimeout:
        os._exit(TIMED_OUT)
    except CommError as error:
        named = fate != "killed" or f"rank {victim}" in str(error) or "lost rank" in str(error)
        os._exit(ENDED if named else WRONG)
    os._exit(0)


def slowly(add_up: Callable[..., None], dice: random.Random) -> Any:
    """A rank that reads late what others have written: they must not write there again before it has."""

    def add_up_late(*args: Any) -> None:
        if dice.random() < 0.5:
            time.sleep(dice.uniform(0, 0.004))
        add_up(*args)

    return add_up_late


def _length(dice: random.Random) -> int:
    """From one value to several pieces, often around the sizes where something changes."""
    near = dice.choice([1, 4, 16_384, PIECE // 4, 4 * PIECE // 4, 5 * PIECE // 4])
    return max(1, near + dice.randint(-3, 3)) if dice.random() < 0.6 else dice.randint(1, 2_400_000)


def _values(rank: int, turn: int, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64).remainder_(97).add_(1000 * rank + turn)


def _sum(size: int, turn: int, length: int) -> torch.Tensor:
    return torch.arange(length, dtype=torch.float64).remainder_(97).add_(turn).mul_(size).add_(500 * size * (size - 1))


def sums(comm: Comm, length: int, root: int, turn: int) -> bool:
    mine = _values(comm.rank, turn, length)
    comm.allreduce(mine)
    return torch.equal(mine, _sum(comm.size, turn, length))


def sums_in_place(comm: Comm, length: int, root: int, turn: int) -> bool:
    memory = comm.shared_sum({torch.float64: length})
    for again in range(3):
        memory.mine[torch.float64].copy_(_values(comm.rank, turn + again, length))
        for start in range(0, length, 100_000):
            memory.give(torch.float64, start, min(start + 100_000, length))
        memory.finish()
        memory.mine[torch.float64].fill_(-1.0)
        if not torch.equal(memory.total[torch.float64], _sum(comm.size, turn + again, length)):
            return False
    return True


def broadcasts(comm: Comm, length: int, root: int, turn: int) -> bool:
    mine = _values(comm.rank, turn, length)
    comm.broadcast(mine, root)
    return torch.equal(mine, _values(root, turn, length))


def exchanges(comm: Comm, length: int, root: int, turn: int) -> bool:
    """Each rank sends two messages to each other one, and receives them in the other order of tags."""
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    mine = {tag: _values(comm.rank, turn + tag, length) for tag in (1, 2)}
    sent = [comm.isend(mine[tag], rank, tag) for tag in (1, 2) for rank in others]
    got = {(rank, tag): torch.empty(length, dtype=torch.float64) for tag in (2, 1) for rank in others}
    for work in [comm.irecv(place, rank, tag) for (rank, tag), place in got.items()]:
        work.wait()
    for work in sent:
        work.wait()
    return all(torch.equal(place, _values(rank, turn + tag, length)) for (rank, tag), place in got.items())


def barriers(comm: Comm, length: int, root: int, turn: int) -> bool:
    comm.barrier()
    return True


Action = Callable[[Comm, int, int, int], bool]
ACTIONS: list[Action] = [sums, sums_in_place, broadcasts, exchanges, barriers]

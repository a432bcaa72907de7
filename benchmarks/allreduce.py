"""All-reduce on one machine: shared memory beside Open MPI, our ring over MPI, and gloo, interleaved in one run.

    python benchmarks/allreduce.py [--ranks 2,4] [--lengths 690590,25000000] [--rounds 15]

All contenders run in the same processes, in a new random order in every round; nothing else should run on the machine.
The time of a sum is from a barrier to the end on the last rank. The floor is what must be done without any waiting, by
all ranks at once: each adds up its part of all ranks' vectors (`floor, in place`), and for tensors of the caller's each
also copies its vector once (`floor, private`).
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mpi4py import MPI

from paceline.collectives.ring import RING
from paceline.comm.mpi import MpiComm
from paceline.comm.process_group import gloo_world
from paceline.comm.seat import Seat
from paceline.comm.shm import add_up, shm_world
from paceline.launch.spawn import _mpi_variables, _mpiexec_command
from paceline.layout import share

TIMEOUT = 60.0
OURS = ("shm, in place", "shm, private")
PEERS = ("Open MPI", "ring over MPI", "gloo")
FLOORS = ("floor, in place", "floor, private")


def contenders(length: int, seat: Seat) -> dict[str, Callable[[], object]]:
    mpi, gloo, shm = MpiComm(MPI.COMM_WORLD.Dup(), TIMEOUT), gloo_world(seat, TIMEOUT), shm_world(seat, TIMEOUT)
    summed = shm.shared_sum({torch.float32: length})
    summed.mine[torch.float32].fill_(1.0)
    mine, own = torch.ones(length), share(length, seat.size, seat.rank)
    parts = [torch.ones(len(own)) for _ in range(seat.size)]
    out, copy = torch.empty(len(own)), torch.empty(length)

    def in_place() -> None:
        summed.give(torch.float32, 0, length)
        summed.finish()

    def private_floor() -> None:
        add_up(parts, out)
        copy.copy_(mine)

    return {
        "shm, in place": in_place,
        "shm, private": lambda: shm.allreduce(mine),
        "Open MPI": lambda: mpi.allreduce(mine),
        "ring over MPI": lambda: RING.run(mpi, mine),
        "gloo": lambda: gloo.allreduce(mine),
        "floor, in place": lambda: add_up(parts, out),
        "floor, private": private_floor,
    }


def rank(length: int, rounds: int, folder: str) -> None:
    world = MPI.COMM_WORLD
    number, size = world.Get_rank(), world.Get_size()
    torch.set_num_threads(1)
    seat = Seat(number, size, number, size, "mpiexec", store_file=f"{folder}/store", sockets=folder)
    todo = contenders(length, seat)
    times: dict[str, list[float]] = {name: [] for name in todo}
    repeats = max(1, 2_000_000 // length)
    for turn in range(rounds + 1):
        order = list(todo)
        random.Random(turn).shuffle(order)
        for name in order:
            world.Barrier()
            start = time.perf_counter()
            for _ in range(repeats):
                todo[name]()
            took = world.allreduce((time.perf_counter() - start) / repeats, MPI.MAX)
            if turn:  # the first round allocates
                times[name].append(took)
    if number == 0:
        show(times, length, size, rounds)


def show(times: dict[str, list[float]], length: int, ranks: int, rounds: int) -> None:
    best = [min(each) for each in zip(*(times[name] for name in PEERS), strict=True)]
    print(f"\n{length:,} floats, {ranks} ranks, {rounds} rounds, {os.cpu_count()} cores\n")
    print(f"{'':<18}{'ms':>8}{'best peer ÷ it':>24}{'it ÷ its floor':>24}")
    for name, mine in times.items():
        floor = times[FLOORS[name == OURS[1]]]
        cells = ["", ""]
        if name in OURS:
            cells = [interval([b / a for a, b in zip(mine, best, strict=True)]),
                     interval([a / b for a, b in zip(mine, floor, strict=True)])]  # fmt: skip
        print(f"{name:<18}{1e3 * statistics.median(mine):>8.3f}{cells[0]:>24}{cells[1]:>24}")


def interval(ratios: list[float]) -> str:
    """The median, and the 95 % interval of the median (order statistics of a sign test)."""
    found, n = sorted(ratios), len(ratios)
    low = max(0, int((n - 1.96 * n**0.5) / 2))
    return f"{statistics.median(found):.2f} ({found[low]:.2f}–{found[n - 1 - low]:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--lengths", default="690590,25000000")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rank-in", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank_in:
        rank(int(args.lengths), args.rounds, args.rank_in)
        return
    for length in args.lengths.split(","):
        for ranks in map(int, args.ranks.split(",")):
            with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
                command = [*_mpiexec_command(ranks), sys.executable, __file__, "--lengths", length]
                command += ["--rounds", str(args.rounds), "--rank-in", folder]
                variables = _mpi_variables(Path(folder), dict(os.environ) | {"OMP_NUM_THREADS": "1"})
                subprocess.run(command, env=variables, check=True, timeout=600)


if __name__ == "__main__":
    main()

"""Resident memory of many ranks on CIFAR-10 together: one mapped file beside "every rank loads everything".

    python benchmarks/memory.py [--workers 8]

Each row is real processes that have opened the data set and gone once through their parts of a shuffled epoch, in
batches of 128, with the same libraries loaded. Memory is the sum over the processes of the kernel's proportional set
size (Pss in /proc/PID/smaps_rollup), in which a page that eight processes share counts once.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from paceline.comm.single import SingleComm
from paceline.data.course import Course
from paceline.data.input import OwnInput
from paceline.data.load import load
from paceline.data.prepare import prepare
from paceline.data.sampler import Sampler
from paceline.data.transforms import PrepareImages

WAYS = {
    "nothing": "no data at all",
    "mapped": "paceline: one mapped file",
    "bytes": "every rank loads everything, as bytes",
    "floats": "every rank loads everything, as float32 (the first seed's way)",
}


def rank(way: str, number: int, size: int) -> None:
    """Go through an epoch, say so, and stay until told to go."""
    torch.set_num_threads(1)
    ready = PrepareImages(torch.float32, torch.device("cpu"))
    kept: list[np.ndarray[tuple[int, ...], np.dtype[np.generic]]] = []
    data = load("cifar10", prepared=True)
    sampler = Sampler(50_000, 128 * size, number, size)
    if way == "mapped":
        comm = SingleComm()
        comm.rank, comm.size = number, size
        for batch in OwnInput(data, 0, 0, comm, ready).epoch(Course(50_000, 128 * size), 0, range(len(sampler))):
            assert batch.inputs.shape[1:] == (3, 32, 32)
    elif way != "nothing":
        path = data.train.where[0].path if data.train.where else Path()
        records = np.fromfile(path, np.uint8).reshape(-1, 3073)
        images, labels = records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].astype(np.int64)
        kept = [images.astype(np.float32) / 255 if way == "floats" else images, labels]
        del records, images
        for numbers in sampler:
            ready.test(torch.from_numpy(kept[0][numbers]))
    print("ready", flush=True)
    sys.stdin.readline()


def proportional(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def measure(way: str, size: int) -> int:
    crew = [
        subprocess.Popen(
            [sys.executable, __file__, "--rank", str(number), "--workers", str(size), "--way", way],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for number in range(size)
    ]  # fmt: skip
    try:
        for process in crew:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return sum(proportional(process.pid) for process in crew)
    finally:
        for process in crew:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--way", choices=WAYS)
    args = parser.parse_args()
    if args.rank is not None:
        rank(args.way, args.rank, args.workers)
        return
    prepare("cifar10")
    found = {way: measure(way, args.workers) for way in WAYS}
    print(f"CIFAR-10, {args.workers} ranks, MB (10^6 bytes) of all together")
    for way, about in WAYS.items():
        more = "" if way == "nothing" else f"   {(found[way] - found['nothing']) / 1e6:>8,.0f} for the data"
        print(f"  {about:<64}{found[way] / 1e6:>8,.0f}{more}")


if __name__ == "__main__":
    main()

"""What saving a checkpoint costs a training on one process, beside torch.save and torch's own asynchronous checkpoints.

    python benchmarks/checkpoints.py [--rounds 20] [--models mnist-cnn resnet18] [--interval 30]

A round trains for one or four seconds with each way to save, in a new random order: it saves once at the beginning, and
trains until the file is written and the time is over; one of the ways saves nothing. What a save costs is the time of
such a block beyond that of as many steps without saving in the same round; shown are its mean with a 95 % interval, and
the part of the throughput that it costs with a save every `interval` seconds. The stall is the time that the call that
saves takes. All ways save the same: weights, buffers and optimizer state. Memory is what the process has at its peak
beyond a process that saves nothing; each way has a process of its own for that.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from scipy import stats

from paceline import Checkpoints
from paceline.data import table as datasets
from paceline.models.build import construct

BATCH = {"mnist-cnn": 64, "resnet18": 64}
# A block is long enough for a save, and no longer: what else the machine does adds to it.
SECONDS = {"mnist-cnn": 1.0, "resnet18": 4.0}
SHAPES = {"mnist-cnn": "mnist", "resnet18": "cifar10"}


class Training:
    """A model, its optimizer, and a batch."""

    def __init__(self, name: str) -> None:
        info, self.seconds = datasets.describe(SHAPES[name]), SECONDS[name]
        assert info is not None
        torch.manual_seed(0)
        self.model = construct(name, info.shape, info.classes, None, None)
        self.optimizer = torch.optim.Adam(self.model.parameters(), fused=True)
        self.images = torch.randn(BATCH[name], *info.shape)
        self.labels = torch.randint(info.classes, (BATCH[name],))

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(self.images), self.labels).backward()
        self.optimizer.step()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


class Ways:
    """Each function saves, and returns a function that says whether the checkpoint is on the disk."""

    def __init__(self, training: Training, folder: Path) -> None:
        self.training, self.folder, self.count = training, folder, 0
        self.ours = Checkpoints(folder / "ours", model=training.model, optimizer=training.optimizer)
        self.all: dict[str, Callable[[], Callable[[], bool]]] = {
            "nothing": lambda: lambda: True,
            "paceline.Checkpoints": self.paceline,
            "torch.save and fsync": self.save,
            "dcp.async_save": self.dcp,
        }

    def paceline(self) -> Callable[[], bool]:
        self.count += 1
        self.ours.save(self.count)
        return lambda: not self.ours.busy

    def save(self) -> Callable[[], bool]:
        with (self.folder / "plain.pt").open("wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())
        return lambda: True

    def dcp(self) -> Callable[[], bool]:
        self.count += 1
        for old in self.folder.glob("dcp*"):
            shutil.rmtree(old)
        where = self.folder / f"dcp{self.count}"
        future = dcp.async_save(self.training.state(), checkpoint_id=where, no_dist=True)
        assert isinstance(future, Future)
        return future.done


def block(training: Training, way: Callable[[], Callable[[], bool]]) -> tuple[float, float, int]:
    """The stall, the seconds, and the number of steps."""
    start = time.perf_counter()
    is_done = way()
    stall, steps = time.perf_counter() - start, 0
    while time.perf_counter() - start < training.seconds or not is_done():
        training.step()
        steps += 1
    return stall, time.perf_counter() - start, steps


def interval(values: list[float]) -> tuple[float, float]:
    """The mean, and half of its 95 % interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return statistics.fmean(values), float(half)


def compare(name: str, rounds: int, every: float) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", dir=".") as folder:
        training = Training(name)
        ways = Ways(training, Path(folder))
        for first in ways.all.values():
            block(training, first)
        stalls: dict[str, list[float]] = {way: [] for way in ways.all}
        costs: dict[str, list[float]] = {way: [] for way in ways.all}
        for turn in range(rounds):
            order = list(ways.all)
            random.Random(turn).shuffle(order)
            found = {way: block(training, ways.all[way]) for way in order}
            _, seconds, steps = found["nothing"]
            for way, (stall, taken, made) in found.items():
                stalls[way].append(stall)
                costs[way].append(taken - made * seconds / steps)
            print(f"\r{name}: round {turn + 1} of {rounds}", end="", file=sys.stderr, flush=True)
        print(file=sys.stderr)
        ways.ours.close()
        size = sum(f.stat().st_size for f in (Path(folder) / "ours").rglob("*.safetensors")) / 2 / 1e6
    print(f"\n{name}, {size:.0f} MB, a step of {1e3 * seconds / steps:.0f} ms, {rounds} rounds:\n")
    print(f"| | stall, ms (median) | cost of a save, ms | every {every:g} s, % of the throughput | extra memory, MB |")
    print("|---|---|---|---|---|")
    for way in list(ways.all)[1:]:
        mean, half = interval(costs[way])
        print(f"| {way} | {1e3 * statistics.median(stalls[way]):.1f} | {1e3 * mean:.0f} ± {1e3 * half:.0f} | "
              f"{100 * mean / every:.2f} ± {100 * half / every:.2f} | {_memory(name, way):.0f} |")  # fmt: skip


def _memory(name: str, way: str) -> float:
    """Peak memory of a process that saves twice, beyond that of one that saves nothing."""
    peaks = []
    for each in (way, "nothing"):
        command = [sys.executable, __file__, "--models", name, "--peak", each]
        peaks.append(float(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    return peaks[0] - peaks[1]


def peak(name: str, way: str) -> None:
    with tempfile.TemporaryDirectory(prefix="paceline-bench-", dir=".") as folder:
        training = Training(name)
        ways = Ways(training, Path(folder))
        for _ in range(2):
            block(training, ways.all[way])
        ways.ours.close()
    # Not getrusage: a process's ru_maxrss begins with that of the process that started it.
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    print(int(status["VmHWM"].split()[0]) / 1e3)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--models", nargs="*", default=list(BATCH))
    parser.add_argument("--interval", type=float, default=30.0)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in args.models:
        if args.peak:
            peak(name, args.peak)
        else:
            compare(name, args.rounds, args.interval)


if __name__ == "__main__":
    main()

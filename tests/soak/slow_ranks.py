"""Slow one rank of a training down, or none: exactly this rank must be named at the end, or none."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from live_run import BIN, PACELINE, PATIENCE, LiveRun, until

from paceline.run.folder import read_ranks
from paceline.run.records import COMPLETED

TRIALS = 150
FACTORS = (1.0, 1.5, 3.0)
WAYS = ("it computes more", "it is stopped in turns")
RUNS = 0.004  # seconds, less than a step computes: so long a rank runs that is stopped in turns

STEPS, BATCH = 150, 512  # long enough that computing, which is slowed, takes most of a step
# How trainings are made: our own loop with these strategies, and recorded loops of users under torchrun.
STRATEGIES, LOOPS = ("ring", "allreduce"), ("paceline.DataParallel", "DistributedDataParallel")

# A network that, on the slowed rank, computes the gradients of some samples again, and does not use them.
MODEL = """
import os
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(channels * 28 * 28, 512), nn.ReLU(), nn.Linear(512, 512),
                                    nn.ReLU(), nn.Linear(512, classes))

    def forward(self, x):
        mine = os.environ.get("PACELINE_RANK", os.environ.get("RANK"))
        again = FACTOR - 1 if mine == RANK and torch.is_grad_enabled() else 0
        while again > 0:
            part = x[: round(min(1, again) * len(x))]
            torch.autograd.grad(self.layers(part).sum(), list(self.parameters()))
            again -= 1
        return self.layers(x)

def build(channels, classes):
    return Net(channels, classes)
"""

LOOP = """
import sys
import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
import paceline
from slowed import build

torch.set_num_threads(1)
wrapper, folder, steps, batch = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
plain = build(1, 10)
if wrapper == "DistributedDataParallel":
    dist.init_process_group("gloo")
    model = DistributedDataParallel(plain)
else:
    model = paceline.DataParallel(plain)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
inputs, targets = torch.rand(batch, 1, 28, 28), torch.arange(batch) % 10
with paceline.record(folder, model) as run:
    for _ in range(steps):
        with run.step() as step:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            step.log(loss=loss)
if dist.is_initialized():
    dist.destroy_process_group()
"""


def trial(seed: int, folder: Path) -> Counter[str]:
    dice = random.Random(seed)
    factor, workers = FACTORS[seed % len(FACTORS)], dice.choice([2, 4])
    rank, way, how = dice.randrange(workers), dice.choice(WAYS), dice.choice([*STRATEGIES, *LOOPS])
    check(folder, how, workers, rank, factor, way)
    return Counter({f"slowed {factor} times, and named" if factor > 1 else "not slowed, and none named": 1})


def check(folder: Path, how: str, workers: int, rank: int, factor: float, way: str) -> None:
    """A training names the slowed rank, and no other."""
    more, stopped = (factor, 1.0) if way == WAYS[0] else (1.0, factor)
    (folder / "slowed.py").write_text(f"RANK, FACTOR = {str(rank)!r}, {more}\n{MODEL}")
    (folder / "loop.py").write_text(LOOP)
    ours = [*PACELINE, "--workers", str(workers), "--strategy", how, "--model", "slowed.py:build", "--threads", "1",
            "--batch-size", str(BATCH), "--steps", str(STEPS), "--no-test"]  # fmt: skip
    users = [str(BIN / "torchrun"), "--nproc-per-node", str(workers), "loop.py", how, str(folder / "run"), str(STEPS),
             str(BATCH)]  # fmt: skip
    with LiveRun(users if how in LOOPS else ours, folder, cwd=folder) as run:
        if stopped > 1:
            until("the ranks are known", lambda: read_ranks(run.folder) or run.process.poll() is not None)
            stop_in_turns(run.pid(rank), stopped)
        assert run.end() == 0, run.stderr()
        summary, printed = run.summary(), run.stdout()
    assert summary.status == COMPLETED
    assert summary.verdict
    assert summary.verdict in printed.splitlines()
    assert summary.slow_rank == (rank if factor > 1 else None), (
        f"{workers} workers, {how}, rank {rank} slowed {factor} times, {way}: {summary.verdict}"
    )


def stop_in_turns(pid: int, factor: float) -> None:
    """Until the process ends, stop it for factor - 1 times as long as it has just run, however busy the machine is."""
    deadline, process, began = time.monotonic() + PATIENCE, os.pidfd_open(pid), time.monotonic()
    with suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            time.sleep(RUNS)
            signal.pidfd_send_signal(process, signal.SIGSTOP)
            time.sleep((time.monotonic() - began) * (factor - 1))
            signal.pidfd_send_signal(process, signal.SIGCONT)
            began = time.monotonic()
    os.close(process)

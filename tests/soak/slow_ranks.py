"""Slow one rank of a training down, or none: exactly this rank must be named at the end, or none."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

from live_run import PACELINE, PATIENCE, LiveRun, until

from paceline.run.records import COMPLETED

TRIALS = 150
FACTORS = (1.0, 1.5, 3.0)
WAYS = ("it computes more", "it is stopped in turns")
RUNS = 0.004  # seconds, less than a step computes: so long a rank runs that is stopped in turns

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


def trial(seed: int, folder: Path) -> Counter[str]:
    dice = random.Random(seed)
    factor, workers = FACTORS[seed % len(FACTORS)], dice.choice([2, 4])
    rank, way, strategy = dice.randrange(workers), dice.choice(WAYS), dice.choice(["ring", "allreduce"])
    more, stopped = (factor, 1.0) if way == WAYS[0] else (1.0, factor)
    (folder / "slowed.py").write_text(f"RANK, FACTOR = {str(rank)!r}, {more}\n{MODEL}")
    command = [*PACELINE, "--workers", str(workers), "--strategy", strategy, "--model", "slowed.py:build", "--threads",
               "1", "--batch-size", "512", "--steps", "150", "--no-test"]  # fmt: skip
    with LiveRun(command, folder, cwd=folder) as run:
        if stopped > 1:
            stop_in_turns(until("the rank is there", lambda: run.starting(rank)), stopped)
        assert run.end() == 0, run.stderr()
        summary = run.summary()
    what = f"{workers} workers, {strategy}, rank {rank} slowed {factor} times, {way}"
    assert summary.status == COMPLETED
    assert summary.slow_rank == (rank if factor > 1 else None), f"{what}: {summary.verdict}"
    return Counter({f"slowed {factor} times, and named" if factor > 1 else "not slowed, and none named": 1})


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

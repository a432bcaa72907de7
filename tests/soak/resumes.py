"""Kill a training at random moments, continue it with the same command, and compare it with one that nobody killed."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from pathlib import Path

from live_run import PACELINE, LiveRun, logged, until
from safetensors.torch import load_file
from torch import equal

from paceline.run.folder import read_steps, read_summary
from paceline.run.records import COMPLETED

TRIALS = 100
STEPS = 60
# Batch-norm, dropout and a few layers, as a user would write them.
MODEL = """
from torch import nn

def build(channels, classes):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(4), nn.Dropout2d(0.2),
        nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(64, 256), nn.ReLU(), nn.Dropout(0.3), nn.Linear(256, classes))
"""
DATA = ["--data", "synthetic:1x16x16,classes=10,train=1500,test=100", "--augment", "crop", "--batch-size", "20",
        "--threads", "1", "--validation", "0.1"]  # fmt: skip
FAMILIES = {
    "ring-gloo": ["--strategy", "ring", "--workers", "3"],
    "ring-mpi": ["--strategy", "ring", "--workers", "2", "--transport", "mpi"],
    "sharded": ["--strategy", "sharded", "--workers", "3"],
    "ps-sync": ["--strategy", "ps-sync", "--workers", "2", "--servers", "2"],
    "pipeline": ["--strategy", "pipeline", "--workers", "3", "--microbatches", "2", "--cut", "layers"],
    "tensor": ["--strategy", "tensor", "--workers", "2"],
    "local-sgd": ["--strategy", "local-sgd", "--workers", "2", "--sync-every", "4", "--averaging", "ring"],
}


def command(family: str, dice: random.Random) -> list[str]:
    optimizer = dice.choice(["adam", "adamw", "sgd"])
    every = dice.choice(["1", "4", "7"])
    validated = dice.choice(["0", "3", "8"])
    return [*PACELINE, "--model", "net.py:build", *DATA, "--optimizer", optimizer, "--steps", str(STEPS),
            "--checkpoint-every", every, "--evaluate-every", validated, "--seed", str(dice.randrange(1000)),
            *FAMILIES[family]]  # fmt: skip


def trial(seed: int, folder: Path) -> Counter[str]:
    dice = random.Random(seed)
    return kill_and_continue(dice.choice(list(FAMILIES)), dice, folder)


def kill_and_continue(family: str, dice: random.Random, folder: Path) -> Counter[str]:
    """One to three times; the weights at the end are those of a training that nobody killed, to the last bit."""
    (folder / "net.py").write_text(MODEL)
    words = command(family, dice)
    whole = folder / "whole"
    subprocess.run([*words, "--output-dir", str(whole), "--name", "run"], cwd=folder, check=True,
                   stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    parts, done = folder / "parts", Counter[str]()
    parts.mkdir()
    for _ in range(dice.randint(1, 3)):
        with LiveRun(words, parts, cwd=folder) as run:
            step, moment = dice.choice([0, 10, 20, 30, 40]), dice.uniform(0, 0.5)
            before = logged(run.folder)
            until("it trains", lambda: run.process.poll() is not None or logged(run.folder) >= before + step)  # noqa: B023
            time.sleep(moment)
            if run.process.poll() is None:
                kill_all(run)
                done["trainings killed"] += 1
    with LiveRun(words, parts, cwd=folder) as run:
        code = run.end()
        assert code == 0 or "is complete" in run.stderr(), run.stderr()
        done[f"{family} continued to the end"] += 1
    check_same(whole / "run", parts / "run")
    return done


def kill_all(run: LiveRun) -> None:
    """Kill the launcher and every rank, as a power cut would."""
    processes = [run.process.pid, *run.living()]
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait()
    until("all are gone", lambda: not run.living())


def check_same(whole: Path, parts: Path) -> None:
    """The weights, the summary and the steps of two runs; the second was continued."""
    left, right = load_file(whole / "model.safetensors"), load_file(parts / "model.safetensors")
    assert left.keys() == right.keys()
    for name, values in left.items():
        assert equal(values, right[name]), f"{name} differs by {(values - right[name]).abs().max()}"
    one, other = read_summary(whole), read_summary(parts)
    assert one is not None
    assert other is not None
    assert (one.status, other.status) == (COMPLETED, COMPLETED)
    for field in ("steps", "test_loss", "test_accuracy", "validation_loss", "validation_steps", "best_step", "epochs"):
        assert getattr(one, field) == getattr(other, field), field
    assert [s.step for s in read_steps(parts / "rank_0.jsonl")] == list(range(STEPS))
    losses = [[s.loss for s in read_steps(folder / "rank_0.jsonl")] for folder in (whole, parts)]
    assert losses[0] == losses[1]

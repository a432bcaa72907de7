"""Kill processes while they save checkpoints: the newest complete one always loads, with the values of its step."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import torch

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import Manifest, checkpoints, latest, remove_unfinished, step_of
from paceline.checkpoint.save import Held, Saver
from paceline.checkpoint.state import hold
from paceline.data.course import Position

TRIALS = 25
KILLS = 20  # of a trial
RANKS = 3
SIZES = (10, 1_000, 50_000, 400_000)


def values(step: int, number: int, size: int) -> torch.Tensor:
    """What a tensor holds after a step."""
    return torch.full((size,), step + number / 10)


def save_for_ever(folder: Path, rank: int, start: int, attempt: str) -> None:
    """One rank: saves after every step."""
    everyone = tuple(range(RANKS))
    saver = Saver(folder, rank, everyone, 2, 60.0)
    for step in range(start + 1, start + 100_000):
        held = [hold(f"model.{i}", values(step, i, size), None, everyone) for i, size in enumerate(SIZES)]
        saver.copy([*held, Held("model.own", torch.tensor([step, rank]), (2,), own=True)])
        saver.write(step, attempt, {"step": step}, lambda parts, step=step: Manifest(Position(step), {}, {}, parts))  # type: ignore[misc]
        saver.wait()
        while rank and not any(step_of(each) >= step for each in checkpoints(folder)):
            time.sleep(0.0005)  # as all ranks take part in the next step


def trial(seed: int, folder: Path) -> Counter[str]:
    dice, newest, done = random.Random(seed), 0, Counter[str]()
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    for number in range(KILLS):
        ranks = [_fork(folder, rank, newest, f"{seed}.{number}") for rank in range(RANKS)]
        time.sleep(dice.uniform(0, 0.15))
        victims = ranks if dice.random() < 0.5 else [dice.choice(ranks)]
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        time.sleep(dice.choice([0, 0.01]))
        for pid in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        found = check(folder, newest)
        done["kills while saving"] += 1
        done["with an unfinished checkpoint"] += any(folder.glob(".step_*"))
        remove_unfinished(folder)
        newest = found
    return done


def _fork(folder: Path, rank: int, start: int, attempt: str) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            save_for_ever(folder, rank, start, attempt)
        finally:
            os._exit(1)
    return pid


def check(folder: Path, before: int) -> int:
    """Every folder with a checkpoint's name is whole; the newest one is not older than the newest before."""
    found = latest(folder)
    if found is None:
        assert before == 0
        return 0
    path, manifest, damaged = found
    assert not damaged, damaged
    step = manifest.position.step
    assert step == step_of(path) >= before
    checkpoint = Checkpoint(path, manifest)
    for number, size in enumerate(SIZES):
        assert torch.equal(checkpoint.tensor(f"model.{number}"), values(step, number, size))
    for rank in range(RANKS):
        assert checkpoint.tensor("model.own", rank).tolist() == [step, rank]
    assert all(part.facts == {"step": step} for part in manifest.parts)
    return step

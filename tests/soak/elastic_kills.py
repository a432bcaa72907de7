"""Kill or stop workers of an elastic training: the others go on, and together they train what one process trains."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from live_run import PACELINE, LiveRun, until
from parity_cases import distance
from raw_lines import raw_lines
from safetensors.torch import load_file
from server_kills import train_alone

from paceline.run.records import COMPLETED

TRIALS = 100
STEPS = 200
GLOBAL_BATCH = 96  # as `train_alone` has it
MODEL = ["--model", "mlp", "--hidden", "32", "--data", "synthetic:1x12x12,train=1920,test=64", "--dtype", "float64",
         "--no-scale-lr", "--threads", "1"]  # fmt: skip
OPTIMIZERS = {"sgd": ["--optimizer", "sgd", "--lr", "0.01"], "adam": ["--optimizer", "adam", "--lr", "0.001"]}
STRATEGIES = ("allreduce", "ring", "reduce-bcast", "gather")


def elastic(strategy: str, workers: int, least: int, *more: str, steps: int = STEPS) -> list[str]:
    return [*PACELINE, *MODEL, "--strategy", strategy, "--workers", str(workers), "--elastic", f"{least}:{workers}",
            "--global-batch", str(GLOBAL_BATCH), "--steps", str(steps), "--timeout", "20", *more]  # fmt: skip


def trial(seed: int, folder: Path) -> Counter[str]:
    """Up to eight times, at random moments, one or two workers are killed, or one is stopped until it is evicted."""
    dice = random.Random(seed)
    strategy, workers, optimizer = dice.choice(STRATEGIES), dice.choice([3, 4]), dice.choice(list(OPTIMIZERS))
    done: Counter[str] = Counter({f"{strategy} trainings": 1})
    with LiveRun(elastic(strategy, workers, 1, *OPTIMIZERS[optimizer], steps=10 * STEPS), folder) as run:
        for _ in range(dice.randint(1, 8)):
            time.sleep(dice.expovariate(2))
            kind = dice.choice(["one", "one", "one", "two", "stop"])
            victims = dice.sample(range(workers), 2 if kind == "two" else 1)
            pids = [until("it is there", lambda w=w: ended(run) or run.starting(w)) for w in victims]  # type: ignore[misc]
            if ended(run):
                break
            for pid in pids:
                os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
                done["workers stopped" if kind == "stop" else "workers killed"] += 1
            if kind == "stop":
                until("it is evicted", lambda pid=pids[0]: ended(run) or pid not in run.living())  # type: ignore[misc]
        check(run, folder, 10 * STEPS, OPTIMIZERS[optimizer])
    done["generations"] = max(line["generation"] for line in regrouped(run, workers))
    return done


def ended(run: LiveRun) -> bool:
    return run.process.poll() is not None


def regrouped(run: LiveRun, workers: int) -> list[dict[str, Any]]:
    """What all workers have recorded of generations."""
    files = [run.folder / f"rank_{worker}.jsonl" for worker in range(workers)]
    return [line for file in files for line in raw_lines(file) if line["kind"] == "regrouped"]


def check(run: LiveRun, folder: Path, steps: int = STEPS, more: list[str] | None = None) -> None:
    """The run completes, leaves nothing behind, and has the weights of one process."""
    assert run.end() == 0, run.stderr()
    summary = run.summary()
    assert (summary.status, summary.steps) == (COMPLETED, steps)
    assert len(summary.epoch_seconds) == len(summary.train_loss) == -(-steps // 20)  # each once
    run.check_nothing_is_left()
    check_records(run, summary.workers)
    alone = train_alone(folder / "alone", steps, *MODEL, *(more or OPTIMIZERS["sgd"]))
    assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11


def check_records(run: LiveRun, workers: int, batch: int = GLOBAL_BATCH) -> None:
    """No two generations have the same number and other members, and a step of a generation has each sample once."""
    members, own = dict[int, set[int]](), dict[tuple[int, int], dict[int, int]]()
    for worker in range(workers):
        number = 0
        for line in raw_lines(run.folder / f"rank_{worker}.jsonl"):
            if line["kind"] == "regrouped":
                number = line["generation"]
                assert members.setdefault(number, set(line["members"])) == set(line["members"])
            elif line["kind"] == "step":
                assert worker in members[number]
                assert worker not in own.setdefault((number, line["step"]), {})
                own[number, line["step"]][worker] = line["own"]
    for (number, step), shares in own.items():
        if shares.keys() == members[number]:  # a worker that was killed had not written its last lines
            assert sum(shares.values()) in (batch, 1920 % batch), (number, step, shares)

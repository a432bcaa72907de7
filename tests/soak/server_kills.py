"""Kill or stop workers and servers of a training with parameter servers: it completes all the same."""

from __future__ import annotations

import argparse
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from live_run import PACELINE, LiveRun, until
from parity_cases import distance, train_here
from raw_lines import raw_lines
from safetensors.torch import load_file
from worlds import ThreadWorld

from paceline.cli.train import add_arguments, layers_of
from paceline.run.records import COMPLETED

TRIALS = 300
STEPS = 600
MODEL = ["--model", "mlp", "--hidden", "32", "--data", "synthetic:1x12x12,train=1920,test=64", "--dtype", "float64",
         "--optimizer", "sgd", "--lr", "0.01", "--no-scale-lr"]  # fmt: skip
GLOBAL_BATCH = 96


def trial(seed: int, folder: Path) -> Counter[str]:
    """One to three times, at random steps, a worker, servers or both are killed at once; one worker is never killed.

    Killed workers are started again in half of the trials. The launcher starts a killed server again up to three times.
    """
    dice = random.Random(seed)
    strategy = dice.choice(["ps-sync", "ps-sync", "ps-async", "ps-bounded"])
    servers, workers, restarts = dice.randint(1, 3), dice.choice([2, 3, 4]), dice.choice([0, 9])
    spared, *exposed = dice.sample(range(servers, servers + workers), workers)
    more = ["--servers", str(servers), "--checkpoint-every", "20", "--restarts", str(restarts)]
    done: Counter[str] = Counter({f"{strategy} trainings": 1})
    with LiveRun(served(strategy, workers, *more), folder) as run:
        for step in sorted(dice.sample(range(STEPS - 100), dice.randint(1, 3))):
            kind = dice.choice(["worker", "worker", "server", "server", "both", "stop"])
            victims = dice.sample(range(servers), dice.randint(1, servers)) if kind in ("server", "both") else []
            if kind != "server" and exposed:
                victims.append(dice.choice(exposed))
            if not victims or not (pids := living(run, step, victims)):
                continue
            if kind == "stop":
                stop_for_a_while(run, pids[0])
                done["workers stopped and continued"] += 1
                continue
            for rank, pid in zip(victims, pids, strict=True):
                os.kill(pid, signal.SIGKILL)
                done["servers killed" if rank < servers else "workers killed"] += 1
            exposed = [rank for rank in exposed if restarts or rank not in victims]
        check_completed(run)
        summary, weights = run.summary(), load_file(run.folder / "model.safetensors")
        assert spared not in [lost["rank"] for lost in summary.own_figures["lost_workers"] if lost["back"] is None]
        if strategy == "ps-async" and not done["servers killed"]:
            assert sum(summary.own_figures["gradients"]) == STEPS
    if strategy == "ps-sync":
        assert distance(weights, train_alone(folder / "alone")) <= 1e-11
    return done


def living(run: LiveRun, step: int, ranks: list[int]) -> list[int]:
    """The processes of these ranks when the run has made so many steps; none if it ends first."""

    def process_of(rank: int) -> int:
        pid: int = until(f"rank {rank} is there", lambda: run.process.poll() is not None or run.starting(rank))
        return pid

    until(f"step {step}", lambda: run.process.poll() is not None or run.steps(0) >= step)
    pids = [process_of(rank) for rank in ranks]
    return pids if run.process.poll() is None else []


def stop_for_a_while(run: LiveRun, pid: int) -> None:
    """Until the leader has given it up, or the run has ended without it."""

    def lost() -> int:
        return sum(record["kind"] == "lost" for record in raw_lines(run.folder / "rank_0.jsonl"))

    before = lost()
    os.kill(pid, signal.SIGSTOP)
    until("the leader gives it up", lambda: run.process.poll() is not None or lost() > before)
    if run.process.poll() is None:
        os.kill(pid, signal.SIGCONT)


def served(strategy: str, workers: int = 3, *more: str, steps: int = STEPS) -> list[str]:
    batch = GLOBAL_BATCH // workers
    return [*PACELINE, *MODEL, "--strategy", strategy, "--workers", str(workers), "--batch-size", str(batch),
            "--steps", str(steps), "--worker-timeout", "1.5", "--timeout", "30", *more]  # fmt: skip


def train_alone(folder: Path, steps: int = STEPS, *more: str) -> Any:
    """The weights of one process, this one, with the same global batch."""
    words = [*MODEL, "--strategy", "sequential", "--batch-size", str(GLOBAL_BATCH), "--steps", str(steps), *more]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    ((_, values),) = layers_of(parser.parse_args(words))
    ThreadWorld(1).run(train_here, folder=str(folder), values=values | {"workers": 1})
    return load_file(folder / "model.safetensors")


def check_completed(run: LiveRun, steps: int = STEPS) -> None:
    assert run.end() == 0, run.stderr()
    summary = run.summary()
    assert (summary.status, summary.steps) == (COMPLETED, steps)
    run.check_nothing_is_left()

"""Kill a rank, the launcher or the zygote of a training at a random moment, also while it starts."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

from live_run import ENDLESS, LAUNCHERS, OURS, LiveRun, until
from safetensors.torch import load_file

from paceline.run.folder import read_summary
from paceline.run.liveness import current_summary
from paceline.run.records import FAILED, INTERRUPTED, RUNNING

TRIALS = 300
STRATEGIES = ("allreduce", "ring", "reduce-bcast", "gather", "sharded", "pipeline")


def trial(seed: int, folder: Path) -> Counter[str]:
    dice = random.Random(seed)
    launcher, strategy = dice.choice(["shm", "shm", *LAUNCHERS]), dice.choice(STRATEGIES)
    ours = launcher in OURS
    victims = ["rank", "rank", *(["launcher", "starting launcher", "interrupted rank"] if ours else [])]
    victim = dice.choice([*victims, *(["zygote", "starting rank"] if launcher == "shm" else [])])
    rank, step, moment = dice.randrange(3), dice.randint(4, 100), dice.uniform(0, 3)
    with LiveRun([*LAUNCHERS[launcher], *ENDLESS, "--strategy", strategy], folder) as run:
        if victim == "starting launcher":
            time.sleep(moment)
            kill_launcher(run)
        elif victim == "starting rank":
            until("the rank is there", lambda: run.starting(rank))
            time.sleep(moment / 3)
            kill_rank(run, launcher, rank)
        else:
            run.wait_until_training(step)
            if victim == "launcher":
                kill_launcher(run)
            elif victim == "zygote":
                kill_zygote(run)
            elif victim == "interrupted rank":
                interrupt_rank(run, rank)
            else:
                kill_rank(run, launcher, rank)
    return Counter({"ranks interrupted (SIGTERM)" if victim == "interrupted rank" else f"{victim}s killed": 1})


def kill_rank(run: LiveRun, launcher: str, rank: int) -> None:
    """The run ends, and names the rank."""
    os.kill(run.starting(rank) or run.pid(rank), signal.SIGKILL)
    code = run.end()
    # A foreign mpiexec has an exit code of its own.
    assert code == 137 if launcher == "mpiexec" else code == 1, run.stderr()
    summary = run.summary()
    assert (summary.status, summary.failed_rank) == (FAILED, rank), run.stderr()
    if launcher in OURS:
        assert f"paceline: rank {rank} failed: its process" in run.stderr()
        assert f"logs/rank_{rank}.log" in run.stderr()
    run.check_nothing_is_left()


def kill_launcher(run: LiveRun) -> None:
    """Its ranks end too, and the run, if there is one yet, has ended."""
    run.process.kill()
    run.process.wait()
    assert read_summary(run.folder) is None or current_summary(run.folder).status != RUNNING
    run.check_nothing_is_left()
    until("the summary says so", lambda: not (found := read_summary(run.folder)) or found.status != RUNNING, 10)


def kill_zygote(run: LiveRun) -> None:
    """All ranks have it as their parent, and die with it."""
    (shared,) = {parent(run.pid(rank)) for rank in range(3)}
    assert parent(shared) == run.process.pid
    os.kill(shared, signal.SIGKILL)
    assert run.end() == 1
    assert "the process that starts the ranks (their zygote) was killed by signal 9" in run.stderr()
    assert (run.summary().status, run.summary().failed_rank) == (FAILED, None)
    run.check_nothing_is_left()


def interrupt_rank(run: LiveRun, rank: int) -> None:
    """All ranks finish the same step and save."""
    os.kill(run.pid(rank), signal.SIGTERM)
    assert run.end() == 130, run.stderr()
    summary = run.summary()
    assert summary.status == INTERRUPTED
    assert {run.steps(rank) for rank in range(3)} == {summary.steps}
    assert load_file(run.folder / "model.safetensors")
    run.check_nothing_is_left()


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])

"""Parameter servers survive their workers and are brought back themselves; real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from live_run import LAUNCHERS, PACELINE, LiveRun, until
from parity_cases import distance
from raw_lines import raw_lines
from safetensors.torch import load_file
from server_kills import GLOBAL_BATCH, check_completed, served, train_alone

from paceline.checkpoint.manifest import checkpoints, step_of
from paceline.run.folder import CHECKPOINTS
from paceline.run.records import FAILED, INTERRUPTED

# Some seconds: whoever is killed in the first steps is missed.
STEPS, ENDLESS = 300, 1_000_000


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of one process that was left in peace."""
    return train_alone(tmp_path_factory.mktemp("alone"), STEPS)


def test_a_synchronous_run_that_loses_workers_trains_the_same_model(alone: Any, tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", steps=STEPS), tmp_path) as run:
        os.kill(until("rank 3 is started", lambda: run.starting(3)), signal.SIGKILL)  # before it can say anything
        run.wait_until_training()
        os.kill(run.pid(2), signal.SIGKILL)
        check_completed(run, STEPS)
        early, late = run.summary().own_figures["lost_workers"]
        assert (early["rank"], early["update"], early["why"]) == (3, 0, "its process was killed by signal 9")
        assert (late["rank"], late["back"]) == (2, None)
        assert "has sent nothing" in late["why"]
        assert "Lost rank 2" in run.stdout()
        assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11


@pytest.mark.parametrize("strategy", ["ps-async", "ps-sync"])
def test_a_worker_that_was_stopped_comes_back_and_no_sample_is_used_twice(strategy: str, tmp_path: Path) -> None:
    """Ctrl-C then finishes what is under way, and saves."""
    with LiveRun(served(strategy, 3, steps=ENDLESS), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(3), signal.SIGSTOP)
        until("the leader gives rank 3 up", lambda: _records(run, "lost"))
        os.kill(run.pid(3), signal.SIGCONT)
        until("rank 3 is back", lambda: _records(run, "joined"))
        done = run.logged()
        until("they go on", lambda: run.logged() > done + 20)
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.stderr()
        summary = run.summary()
        assert summary.status == INTERRUPTED
        (lost,) = summary.own_figures["lost_workers"]
        assert lost["rank"] == 3
        assert lost["back"] is not None
        assert done < summary.steps < ENDLESS
        # Each update is made of the gradients of all its samples, no less and no more.
        counts = [r["samples"] for r in raw_lines(run.folder / "rank_0.jsonl") if r["kind"] == "step"]
        assert counts == [GLOBAL_BATCH if strategy == "ps-sync" else GLOBAL_BATCH // 3] * summary.steps
        assert strategy == "ps-sync" or sum(summary.own_figures["gradients"]) == summary.steps
        assert load_file(run.folder / "model.safetensors")
        run.check_nothing_is_left()


def _records(run: LiveRun, kind: str) -> list[dict[str, Any]]:
    return [record for record in raw_lines(run.folder / "rank_0.jsonl") if record["kind"] == kind]


def test_a_worker_that_stays_stopped_does_not_keep_the_command(tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", 2, steps=STEPS), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(2), signal.SIGSTOP)
        check_completed(run, STEPS)
        assert [lost["rank"] for lost in run.summary().own_figures["lost_workers"]] == [2]


def test_a_killed_worker_can_be_started_again(alone: Any, tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", 2, "--restarts", "1", "--worker-timeout", "1", steps=STEPS), tmp_path) as run:
        run.wait_until_training()
        old = run.pid(1)
        os.kill(old, signal.SIGKILL)
        until("another process is rank 1", lambda: run.pid(1) != old)
        check_completed(run, STEPS)
        assert run.summary().own_figures["lost_workers"][0]["back"] is not None
        assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11


@pytest.mark.parametrize(("servers", "victim"), [(2, 0), (2, 1)])
def test_a_killed_server_is_brought_back_and_trains_the_same_model(
    alone: Any, tmp_path: Path, servers: int, victim: int
) -> None:
    more = ["--servers", str(servers), "--checkpoint-every", "20"]
    with LiveRun(served("ps-sync", 2, *more, steps=STEPS), tmp_path) as run:
        run.wait_until_training()
        complete = [step_of(folder) for folder in checkpoints(run.folder / CHECKPOINTS)]
        os.kill(run.pid(victim), signal.SIGKILL)
        check_completed(run, STEPS)
        (back,) = run.summary().own_figures["returns"]
        assert back["lost"] >= 0
        assert back["number"] >= max(complete, default=0)  # what was there is not lost
        assert back["number"] % 20 == 0
        assert f"rank {victim} was restarted" in back["why"]
        assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11


@pytest.mark.parametrize(("servers", "victim"), [(1, 0)])
def test_a_killed_asynchronous_server_loses_few_updates_and_tells_how_many(
    tmp_path: Path, servers: int, victim: int
) -> None:
    more = ["--servers", str(servers), "--checkpoint-every", "20"]
    with LiveRun(served("ps-async", 2, *more, steps=STEPS), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(victim), signal.SIGKILL)
        check_completed(run, STEPS)
        (back,) = run.summary().own_figures["returns"]
        assert 0 <= back["lost"] <= 20 + 2
        assert sum(run.summary().own_figures["gradients"]) == STEPS


def test_without_workers_a_run_fails_and_says_so(tmp_path: Path) -> None:
    with LiveRun(served("ps-bounded", 2, steps=ENDLESS), tmp_path) as run:
        run.wait_until_training()
        for rank in (1, 2):
            os.kill(run.pid(rank), signal.SIGKILL)
        assert run.end() == 1
        summary = run.summary()
        assert summary.status == FAILED
        assert summary.failed_rank in (1, 2)
        run.check_nothing_is_left()


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", 2, "--servers", "2", steps=ENDLESS), tmp_path) as run:
        run.wait_until_training()
        run.process.kill()
        run.process.wait()
        run.check_nothing_is_left()


# Three ranks under every launcher: one server and two workers. However far it comes, one process can do the same.
CONSTANT = ["--warmup-epochs", "0", "--decay", "none"]
UNDER = {"ours": served("ps-sync", 2, *CONSTANT, steps=ENDLESS)}
UNDER |= {launcher: [*LAUNCHERS[launcher], *UNDER["ours"][2:]] for launcher in ("torchrun", "mpiexec")}


@pytest.mark.parametrize("launcher", UNDER)
def test_a_signal_to_a_worker_takes_it_out_and_one_to_all_ranks_saves_the_sequential_model(
    launcher: str, tmp_path: Path
) -> None:
    with LiveRun(UNDER[launcher], tmp_path) as run:
        run.wait_until_training()
        rows = json.loads((run.folder / "env.json").read_text())["ranks"]
        assert [row["role"] for row in rows] == ["server", "worker", "worker"]
        os.kill(run.pid(2), signal.SIGTERM)
        until("the leader knows that rank 2 has left", lambda: _records(run, "lost"))
        done = run.logged()
        until("rank 1 goes on", lambda: run.logged() > done)
        for rank in (1, 0):  # as a scheduler does; in any order
            os.kill(run.pid(rank), signal.SIGTERM)
        assert run.end() == 130 if launcher == "ours" else run.end() != 0, run.stderr()
        summary = run.summary()
        assert summary.status == INTERRUPTED
        assert [(lost["rank"], lost["why"]) for lost in summary.own_figures["lost_workers"]] == [
            (2, "it was interrupted")
        ]
        wanted = train_alone(tmp_path / "alone", summary.steps, *CONSTANT)
        assert distance(load_file(run.folder / "model.safetensors"), wanted) <= 1e-11
        run.check_nothing_is_left()


@pytest.mark.parametrize("ranks", [(1,), (2, 3)])
def test_a_signal_to_any_server_or_to_all_workers_ends_the_run_and_saves(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    with LiveRun(served("ps-sync", 2, "--servers", "2", steps=ENDLESS), tmp_path) as run:
        run.wait_until_training()
        for rank in ranks:
            os.kill(run.pid(rank), signal.SIGTERM)
        assert run.end() == 130, run.stderr()
        assert run.summary().status == INTERRUPTED
        assert {lost["rank"] for lost in run.summary().own_figures["lost_workers"]} == {2, 3} & {*ranks}
        assert load_file(run.folder / "model.safetensors")
        run.check_nothing_is_left()


def test_a_worker_that_is_asked_to_stop_before_it_has_joined_is_not_waited_for(tmp_path: Path) -> None:
    # Long enough that it leaves before the end, also if it joins just before the signal.
    steps = 5 * STEPS
    with LiveRun(served("ps-sync", 2, steps=steps), tmp_path) as run:
        pid = until("rank 2 handles signals", lambda: (found := run.starting(2)) and catches(found))
        os.kill(pid, signal.SIGTERM)
        check_completed(run, steps)
        assert [lost["rank"] for lost in run.summary().own_figures["lost_workers"]] == [2]


def catches(pid: int) -> int | None:
    """The process, if it has a handler for SIGTERM."""
    status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return pid if int(status["SigCgt"], 16) >> (signal.SIGTERM - 1) & 1 else None


def test_a_training_that_diverges_ends_all_ranks(tmp_path: Path) -> None:
    command = [*PACELINE, "--strategy", "ps-sync", "--model", "shallow-cnn", "--optimizer", "sgd", "--lr", "1e9",
               "--warmup-epochs", "0", "--log-every", "0"]  # fmt: skip
    with LiveRun(command, tmp_path) as run:
        assert run.end() == 1
        assert "diverged" in run.stderr()
        assert (run.summary().status, run.summary().failed_rank) == (FAILED, None)
        run.check_nothing_is_left()

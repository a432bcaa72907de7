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
from server_kills import GLOBAL_BATCH, STEPS, check_completed, served, train_alone

from paceline.run.records import FAILED, INTERRUPTED


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of one process that was left in peace."""
    return train_alone(tmp_path_factory.mktemp("alone"))


def test_a_synchronous_run_that_loses_workers_trains_the_same_model(alone: Any, tmp_path: Path) -> None:
    with LiveRun(served("ps-sync"), tmp_path) as run:
        os.kill(until("rank 3 is started", lambda: run.starting(3)), signal.SIGKILL)  # before it can say anything
        run.wait_until_training()
        os.kill(run.pid(2), signal.SIGKILL)
        check_completed(run)
        early, late = run.summary().own_figures["lost_workers"]
        assert (early["rank"], early["update"], early["why"]) == (3, 0, "its process was killed by signal 9")
        assert (late["rank"], late["back"]) == (2, None)
        assert "silent" in late["why"]
        assert "Lost rank 2" in run.stdout
        assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11


@pytest.mark.parametrize("strategy", ["ps-async", "ps-sync"])
def test_a_worker_that_was_stopped_comes_back_and_no_sample_is_used_twice(strategy: str, tmp_path: Path) -> None:
    # Longer than the stop: the worker must find training still going on.
    with LiveRun(served(strategy, 3, steps=2000), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(3), signal.SIGSTOP)
        until("the leader gives rank 3 up", lambda: _records(run, "lost"))
        os.kill(run.pid(3), signal.SIGCONT)
        until("rank 3 is back", lambda: _records(run, "joined"))
        assert run.end() == 0, run.stderr()
        summary = run.summary()
        (lost,) = summary.own_figures["lost_workers"]
        assert lost["rank"] == 3
        assert lost["back"] is not None
        assert summary.steps == 2000
        # Each update is made of the gradients of all its samples, no less and no more.
        counts = [r["samples"] for r in raw_lines(run.folder / "rank_0.jsonl") if r["kind"] == "step"]
        assert counts == [GLOBAL_BATCH if strategy == "ps-sync" else GLOBAL_BATCH // 3] * 2000
        assert strategy == "ps-sync" or sum(summary.own_figures["gradients"]) == 2000
        run.check_nothing_is_left()


def _records(run: LiveRun, kind: str) -> list[dict[str, Any]]:
    return [record for record in raw_lines(run.folder / "rank_0.jsonl") if record["kind"] == kind]


def test_a_worker_that_stays_stopped_does_not_keep_the_command(tmp_path: Path) -> None:
    with LiveRun(served("ps-async", 3), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(3), signal.SIGSTOP)
        check_completed(run)
        assert [lost["rank"] for lost in run.summary().own_figures["lost_workers"]] == [3]
        assert not (run.folder / "snapshots").exists()


def test_a_killed_worker_can_be_started_again(alone: Any, tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", 2, "--restarts", "1", "--worker-timeout", "1"), tmp_path) as run:
        run.wait_until_training()
        old = run.pid(1)
        os.kill(old, signal.SIGKILL)
        until("another process is rank 1", lambda: run.pid(1) != old)
        check_completed(run)
        assert run.summary().own_figures["lost_workers"][0]["back"] is not None
        assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11


@pytest.mark.parametrize(("servers", "victim"), [(2, 0), (2, 1)])
def test_a_killed_server_is_brought_back_and_trains_the_same_model(
    alone: Any, tmp_path: Path, servers: int, victim: int
) -> None:
    more = ["--servers", str(servers), "--snapshot-every", "20"]
    with LiveRun(served("ps-sync", 2, *more), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(victim), signal.SIGKILL)
        check_completed(run)
        (back,) = run.summary().own_figures["returns"]
        assert 0 <= back["lost"] <= 20
        assert back["number"] % 20 == 0
        assert f"rank {victim} was restarted" in back["why"]
        assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11


@pytest.mark.parametrize(("servers", "victim"), [(1, 0)])
def test_a_killed_asynchronous_server_loses_few_updates_and_tells_how_many(
    tmp_path: Path, servers: int, victim: int
) -> None:
    more = ["--servers", str(servers), "--snapshot-every", "20"]
    with LiveRun(served("ps-async", 2, *more), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(victim), signal.SIGKILL)
        check_completed(run)
        (back,) = run.summary().own_figures["returns"]
        assert 0 <= back["lost"] <= 20 + 2
        assert sum(run.summary().own_figures["gradients"]) == STEPS


def test_without_workers_a_run_fails_and_says_so(tmp_path: Path) -> None:
    with LiveRun(served("ps-async", 2, steps=100_000), tmp_path) as run:
        run.wait_until_training()
        for rank in (1, 2):
            os.kill(run.pid(rank), signal.SIGKILL)
        assert run.end() == 1
        summary = run.summary()
        assert summary.status == FAILED
        assert summary.failed_rank in (1, 2)
        run.check_nothing_is_left()


def test_nothing_is_left_when_the_launcher_is_killed(tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", 2, "--servers", "2", steps=100_000), tmp_path) as run:
        run.wait_until_training()
        run.process.kill()
        run.process.wait()
        run.check_nothing_is_left()


@pytest.mark.parametrize("strategy", ["ps-sync", "ps-async"])
def test_ctrl_c_finishes_what_is_under_way_and_saves(strategy: str, tmp_path: Path) -> None:
    with LiveRun(served(strategy, 2, steps=100_000), tmp_path) as run:
        run.wait_until_training()
        run.process.send_signal(signal.SIGINT)
        assert run.end() == 130, run.stderr()
        assert run.summary().status == INTERRUPTED
        assert 3 < run.summary().steps < 100_000
        assert (run.folder / "model.safetensors").exists()
        run.check_nothing_is_left()


# Three ranks under every launcher: one server and two workers.
UNDER = {"ours": served("ps-sync", 2, steps=100_000)} | {
    launcher: [*LAUNCHERS[launcher], *served("ps-sync", 2, steps=100_000)[2:]] for launcher in ("torchrun", "mpiexec")
}


@pytest.mark.parametrize("launcher", UNDER)
def test_a_signal_to_a_worker_takes_it_out_and_one_to_all_ranks_saves(launcher: str, tmp_path: Path) -> None:
    with LiveRun(UNDER[launcher], tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(2), signal.SIGTERM)
        until("the leader knows that rank 2 has left", lambda: _records(run, "lost"))
        done = run.steps(0)
        until("rank 1 goes on", lambda: run.steps(0) > done + 3)
        for rank in (1, 0):  # as a scheduler does; in any order
            os.kill(run.pid(rank), signal.SIGTERM)
        assert run.end() == 130 if launcher == "ours" else run.end() != 0, run.stderr()
        summary = run.summary()
        assert summary.status == INTERRUPTED
        assert [(lost["rank"], lost["why"]) for lost in summary.own_figures["lost_workers"]] == [
            (2, "it was interrupted")
        ]
        assert load_file(run.folder / "model.safetensors")
        run.check_nothing_is_left()


@pytest.mark.parametrize("ranks", [(1,), (2, 3)])
def test_a_signal_to_any_server_or_to_all_workers_ends_the_run_and_saves(
    ranks: tuple[int, ...], tmp_path: Path
) -> None:
    with LiveRun(served("ps-sync", 2, "--servers", "2", steps=100_000), tmp_path) as run:
        run.wait_until_training()
        for rank in ranks:
            os.kill(run.pid(rank), signal.SIGTERM)
        assert run.end() == 130, run.stderr()
        assert run.summary().status == INTERRUPTED
        assert {lost["rank"] for lost in run.summary().own_figures["lost_workers"]} == {2, 3} & {*ranks}
        assert load_file(run.folder / "model.safetensors")
        run.check_nothing_is_left()


def test_a_worker_that_is_asked_to_stop_before_it_has_joined_is_not_waited_for(tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", 2), tmp_path) as run:
        pid = until("rank 2 handles signals", lambda: (found := run.starting(2)) and catches(found))
        os.kill(pid, signal.SIGTERM)
        check_completed(run)
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


@pytest.mark.parametrize("launcher", ["torchrun", "mpiexec"])
def test_under_a_launcher_the_first_ranks_are_servers(alone: Any, launcher: str, tmp_path: Path) -> None:
    # Three ranks: one server and two workers.
    command = [*LAUNCHERS[launcher], *served("ps-sync", 2)[2:]]
    with LiveRun(command, tmp_path) as run:
        run.wait_until_training()
        rows = json.loads((run.folder / "env.json").read_text())["ranks"]
        assert [row["role"] for row in rows] == ["server", "worker", "worker"]
        check_completed(run)
        assert distance(load_file(run.folder / "model.safetensors"), alone) <= 1e-11

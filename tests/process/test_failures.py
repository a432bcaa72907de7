"""A rank that fails, is killed or stops ends the run, by name, within seconds, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import kills
import pytest
from live_run import ENDLESS, LAUNCHERS, PACELINE, LiveRun, launchers

from paceline.run.folder import HELD
from paceline.run.records import FAILED


# Where mpiexec ends the others, it does not matter how many there are; elsewhere they may blame each other.
def among(launcher: str) -> list[str]:
    return launchers(2 if launcher.startswith("mpi") else 3)[launcher]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_killed_rank_is_named(launcher: str, tmp_path: Path) -> None:
    with LiveRun(among(launcher) + ENDLESS, tmp_path) as run:
        run.wait_until_training()
        kills.kill_rank(run, launcher, 1)


@pytest.mark.parametrize("launcher", ["shm", "mpi", "torchrun"])
def test_an_error_in_one_rank_is_told_first_and_written_to_its_log(launcher: str, tmp_path: Path) -> None:
    with LiveRun(LAUNCHERS[launcher] + ENDLESS, tmp_path, fault="2 5") as run:
        assert run.end() == 1
        message = "ZeroDivisionError: a fault that the test put here"
        told = [line for line in run.stderr().splitlines() if line.startswith("paceline:") and "failed" in line]
        assert all(f"rank 2 failed: {message}" in line for line in told), told
        assert told
        assert "Traceback" in (run.folder / "logs" / "rank_2.log").read_text()
        summary = run.summary()
        assert (summary.status, summary.failed_rank) == (FAILED, 2)
        assert str(summary.error).startswith(message)
        assert "sitecustomize.py, line" in str(summary.error)  # where the user's code failed
        assert summary.steps == 5 or launcher != "shm"  # other launchers give ranks no time to write their last lines
        run.check_nothing_is_left()


@pytest.mark.parametrize(("launcher", "strategy"), [("shm", "allreduce"), ("gloo", "ring"), ("mpiexec", "allreduce")])
def test_a_rank_that_stops_answering_is_found_at_the_deadline(launcher: str, strategy: str, tmp_path: Path) -> None:
    command = [*LAUNCHERS[launcher], *ENDLESS, "--timeout", "2", "--strategy", strategy]
    with LiveRun(command, tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(1), signal.SIGSTOP)
        assert run.end(25) == 1
        summary = run.summary()  # MPI_Abort sends SIGTERM to the others, and that is no interruption
        assert (summary.status, summary.failed_rank) == (FAILED, 1)
        assert "waited 2 s" in str(summary.error)
        run.check_nothing_is_left()


# Two replicas of a pipeline of two stages: a wait of a stage, and of a stage's replica, ends.
DIVIDED = {
    "pipeline": ["--strategy", "pipeline", "--workers", "4", "--stages", "2", "--microbatches", "4", "--cut", "layers"],
    "tensor": ["--strategy", "tensor", "--workers", "4", "--tensor", "2"],
}


SMALL = [*PACELINE, "--model", "mlp", "--hidden", "64", "--steps", "1000000"]


@pytest.mark.parametrize("strategy", DIVIDED)
def test_a_part_of_a_model_that_dies_ends_the_run_and_is_named(strategy: str, tmp_path: Path) -> None:
    with LiveRun([*SMALL, *DIVIDED[strategy]], tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(2), signal.SIGKILL)
        assert run.end(20) == 1, run.stderr()
        assert (run.summary().status, run.summary().failed_rank) == (FAILED, 2)
        assert "paceline: rank 2 failed: its process" in run.stderr()
        run.check_nothing_is_left()


def test_a_stage_that_stops_answering_is_found_at_the_deadline(tmp_path: Path) -> None:
    with LiveRun([*SMALL, *DIVIDED["pipeline"], "--timeout", "2"], tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(3), signal.SIGSTOP)
        assert run.end(25) == 1
        assert (run.summary().status, run.summary().failed_rank) == (FAILED, 3)
        assert "waited 2 s" in str(run.summary().error)
        run.check_nothing_is_left()


def test_an_error_in_a_rank_that_is_a_thread_ends_the_run(tmp_path: Path) -> None:
    command = [*PACELINE, "--workers", "3", "--transport", "threads", *ENDLESS]
    with LiveRun(command, tmp_path, fault="1 5") as run:
        assert run.end() == 1
        assert run.summary().failed_rank == 1
        assert "rank 1 failed: ZeroDivisionError" in run.stderr()
        run.check_nothing_is_left()


def test_a_training_that_diverges_in_its_last_step_says_so_and_saves_nothing(tmp_path: Path) -> None:
    command = [*PACELINE, "--workers", "2", "--strategy", "ring", "--model", "shallow-cnn", "--optimizer", "sgd",
               "--lr", "1e37", "--weight-decay", "1e3", "--warmup-epochs", "0", "--steps", "1"]  # fmt: skip
    with LiveRun(command, tmp_path) as run:
        assert run.end() == 1
        assert "the model is not finite after step 1: the training has diverged" in run.stderr()
        assert (run.summary().status, run.summary().failed_rank) == (FAILED, None)
        assert not (run.folder / "model.safetensors").exists()
        run.check_nothing_is_left()


@pytest.mark.parametrize("launcher", ["shm", "mpi"])
def test_nothing_survives_the_launchers_own_death_and_the_run_has_ended(launcher: str, tmp_path: Path) -> None:
    with LiveRun(among(launcher) + ENDLESS, tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(1), signal.SIGSTOP)  # so that the others cannot end their step
        kills.kill_launcher(run)
        # mpiexec continues stopped ranks before it ends them, so that they finish their step and save.
        if launcher == "shm" or run.summary().status == FAILED:
            assert run.summary().error == "the launcher was killed"
            assert not (run.folder / HELD).exists()


def test_ranks_started_with_different_options_refuse_to_train(tmp_path: Path) -> None:
    torchrun, *_ = LAUNCHERS["torchrun"]
    flags = " ".join([*ENDLESS, "--output-dir", str(tmp_path), "--name", "run"])
    script = tmp_path / "uneven.sh"
    script.write_text(f'#!/bin/sh\nexec {" ".join(PACELINE)} {flags} --seed "$RANK"\n')
    script.chmod(0o755)
    with LiveRun([torchrun, "--nproc-per-node", "2", "--no-python", str(script)], tmp_path) as run:
        assert run.end() != 0
        assert "rank 1 was started with different options than rank 0" in run.stderr()
        run.check_nothing_is_left()

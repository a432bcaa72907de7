"""The first signal ends the run after a step that all ranks agree on, a second Ctrl-C at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import kills
import pytest
from live_run import ENDLESS, LAUNCHERS, PACELINE, LiveRun, launchers, until
from safetensors.torch import load_file

from paceline.run.records import INTERRUPTED


@pytest.mark.parametrize(("launcher", "ranks"), [("shm", 3), ("mpi", 2), ("torchrun", 2)])
def test_a_signal_to_all_finishes_a_common_step_and_saves(launcher: str, ranks: int, tmp_path: Path) -> None:
    with LiveRun(launchers(ranks)[launcher] + ENDLESS, tmp_path) as run:
        run.wait_until_training()
        for pid in (*map(run.pid, range(ranks)), run.process.pid):  # as a scheduler does
            os.kill(pid, signal.SIGTERM)
        if launcher != "torchrun":
            until("the launcher knows", lambda: "stopping after this step" in run.stderr())
            os.kill(run.process.pid, signal.SIGTERM)  # which repeats itself
        code = run.end(20)
        assert code == 130 if launcher != "torchrun" else code != 0
        summary = run.summary()
        assert summary.status == INTERRUPTED
        assert {run.steps(rank) for rank in range(ranks)} == {summary.steps}
        assert load_file(run.folder / "model.safetensors")
        run.check_nothing_is_left()


def test_a_signal_to_one_stage_of_a_pipeline_stops_all_and_saves(tmp_path: Path) -> None:
    with LiveRun([*LAUNCHERS["shm"], *ENDLESS, "--strategy", "pipeline"], tmp_path) as run:
        run.wait_until_training()
        kills.interrupt_rank(run, 2)


def test_one_worker_and_ranks_that_are_threads_stop_as_well(tmp_path: Path) -> None:
    for name, flags in {"one": [], "threads": ["--workers", "2", "--transport", "threads"]}.items():
        output = tmp_path / name
        output.mkdir()
        with LiveRun([*PACELINE, "--model", "mlp", "--steps", "1000000", *flags], output) as run:
            run.wait_until_training()
            os.kill(run.process.pid, signal.SIGTERM)
            assert run.end(20) == 130
            assert run.summary().status == INTERRUPTED
            run.check_nothing_is_left()


def test_under_a_foreign_mpiexec_the_summary_still_says_interrupted(tmp_path: Path) -> None:
    with LiveRun(launchers(2)["mpiexec"] + ENDLESS, tmp_path) as run:
        run.wait_until_training()
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end(20) != 0
        assert run.summary().status == INTERRUPTED
        run.check_nothing_is_left()


@pytest.mark.parametrize("module", ["argparse", "paceline.spec", "torch.nn"])
def test_an_interrupt_while_modules_are_imported_ends_quietly(module: str) -> None:
    """Modules of the command line, of the launcher, and of a rank that torchrun started."""
    faulty = {"PACELINE_TEST_INTERRUPT": module, "PYTHONPATH": str(Path(__file__).parent / "faulty")}
    seat = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"} if module.startswith("torch") else {}
    done = subprocess.run(PACELINE, env=dict(os.environ) | faulty | seat, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")


ENDINGS = """
import atexit, os
from paceline.launch.worker import finish

class Kept:
    def __del__(self):
        print("torn down")

kept = Kept()
atexit.register(print, "exit handler")
for code in (0, 130, 1):
    if not (child := os.fork()):
        print("last words of", code)
        finish(code)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
os._exit(0)
"""


def test_a_rank_ends_with_its_exit_code_and_without_tearing_the_interpreter_down() -> None:
    done = subprocess.run([sys.executable, "-c", ENDINGS], capture_output=True, text=True, timeout=60, check=True)
    expected = [
        "last words of 0",
        "exit handler",
        "0",
        "last words of 130",
        "exit handler",
        "130",
        "last words of 1",
        "1",
    ]
    assert done.stdout.splitlines() == expected


@pytest.mark.parametrize("launcher", ["shm", "mpi"])
def test_an_interrupt_before_the_ranks_are_up_ends_at_once(launcher: str, tmp_path: Path) -> None:
    with LiveRun(launchers(2)[launcher] + ENDLESS, tmp_path) as run:
        until("the folder is there", (run.folder / "summary.json").exists)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end(20) == 130
        assert run.summary().status == INTERRUPTED
        assert "Traceback" not in run.stderr()
        run.check_nothing_is_left()


@pytest.mark.parametrize("launcher", ["shm", "mpi"])
def test_the_second_interrupt_does_not_wait_for_anybody(launcher: str, tmp_path: Path) -> None:
    with LiveRun(launchers(2)[launcher] + ENDLESS, tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(1), signal.SIGSTOP)  # so that the last step cannot be finished
        os.kill(run.process.pid, signal.SIGINT)
        until("the first is told", lambda: "stopping after this step" in run.stderr())
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end(20) == 130
        assert run.summary().status == INTERRUPTED
        run.check_nothing_is_left()

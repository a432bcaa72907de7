"""A run that was killed is not taken for one that is running."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.runs import LeftOut, read_run
from paceline.emulation.measured import seconds_per_sample
from paceline.errors import UsageError
from paceline.run.folder import read_summary, write_summary
from paceline.run.liveness import OWNER, claim, current_summary
from paceline.run.records import COMPLETED, FAILED, RUNNING, Summary


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run that says it is running, and whose owner is this process."""
    write_summary(tmp_path, Summary(RUNNING, "ring", 2, "gloo", "mlp", "mnist-mini", 8, 16, 1, 0))
    (tmp_path / "spec.toml").write_text("")
    claim(tmp_path)
    return tmp_path


def disown(folder: Path, **other: Any) -> None:
    path = folder / OWNER
    path.write_text(json.dumps(json.loads(path.read_text()) | other))


def status(folder: Path) -> tuple[str, str]:
    summary = current_summary(folder)
    return summary.status, summary.error or ""


def be_silent(folder: Path, seconds: float) -> None:
    then = time.time() - seconds
    for path in (*folder.iterdir(), folder):
        os.utime(path, (then, then))


def test_a_run_whose_owner_lives_is_running_however_long_it_is_silent(folder: Path) -> None:
    be_silent(folder, 1e6)
    assert status(folder) == (RUNNING, "")
    assert read_run(folder) == LeftOut(folder, "running")


def test_a_run_whose_owner_was_killed_has_failed_for_every_reader(folder: Path) -> None:
    claim = f"import pathlib, paceline.run.liveness as l, os; l.claim(pathlib.Path({str(folder)!r}))"
    code = f"{claim}; os.kill(os.getpid(), 9)"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert status(folder)[0] == FAILED  # nobody has taken note of its end yet
    why = f"its process {process.pid} on {os.uname().nodename} is gone"
    assert why in status(folder)[1]
    left_out = read_run(folder)
    assert isinstance(left_out, LeftOut)
    assert left_out.why.startswith(f"failed: {why}")
    with pytest.raises(UsageError, match="is of a run that is failed"):
        seconds_per_sample(folder, "mlp", None)
    summary = read_summary(folder)
    assert summary is not None
    assert summary.status == RUNNING, "looking changes nothing"


def test_another_process_of_the_same_number_is_not_the_owner(folder: Path) -> None:
    disown(folder, started=json.loads((folder / OWNER).read_text())["started"] - 1)
    assert status(folder)[0] == FAILED


@pytest.mark.parametrize("elsewhere", [{"boot": "another"}, {"namespace": "pid:[1]"}, {"pid": "x"}])
def test_a_run_of_another_machine_is_told_by_its_last_sign_of_life(folder: Path, elsewhere: dict[str, Any]) -> None:
    disown(folder, **elsewhere)
    assert status(folder) == (RUNNING, "")
    be_silent(folder, 1000)
    said, error = status(folder)
    assert said == RUNNING
    assert "no sign of life" in error
    assert "for 1000 s" in error
    (folder / "node_a.jsonl").write_text("")
    assert status(folder) == (RUNNING, "")


def test_a_run_that_has_ended_needs_no_owner(folder: Path) -> None:
    write_summary(folder, Summary(COMPLETED, "ring", 2, "gloo", "mlp", "mnist-mini", 8, 16, 1, 0))
    disown(folder, pid=2**30)
    assert status(folder) == (COMPLETED, "")

"""A bench says which of its runs other programs disturbed: at the start, after each, and at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from raw_lines import RawWriter

from paceline.bench import run as making
from paceline.bench.experiment import Task
from paceline.bench.store import Store
from paceline.cli.main import main
from paceline.launch.folder import begin_summary, open_run
from paceline.run.folder import write_summary
from paceline.run.records import COMPLETED, Summary

WHY = "other processes used 1.6 of 2 cores"


def make(task: Task, store: Store) -> tuple[Summary, None]:
    """A run of one step; of the larger batch, a disturbed one."""
    spec, folder = task.point.resolved.spec, store.clear(task)
    folder.mkdir()
    open_run(folder, task.point.resolved)
    summary = begin_summary(spec)
    summary.status, summary.steps = COMPLETED, 1
    summary.disturbed = WHY if spec.batch_size == 16 else None
    write_summary(folder, summary)
    lines = RawWriter(folder / "rank_0.jsonl")
    lines.write("step", step=0, epoch=0, time=1.0, seconds=1.0, samples=8, spans={})
    lines.close()
    return summary, None


def test_it_says_so_and_what_was_there_already_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(making, "_make", make)
    monkeypatch.setattr(making, "busy_now", lambda: WHY)
    path, out = tmp_path / "try.toml", tmp_path / "out"
    path.write_text('repeats = 1\n[[grid]]\nmodel = "mlp"\nbatch_size = [8, 16]\n')
    assert main(["bench", str(path), "-o", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith(f"This machine is busy: {WHY}") for line in lines)
    assert [line.endswith(f"; DISTURBED: {WHY}") for line in lines if line.startswith("[")] == [False, True]
    [end] = [line for line in lines if line.startswith("Other programs disturbed")]
    assert end.startswith("Other programs disturbed 1 of 2 runs (")
    assert main(["bench", str(path), "-o", str(out)]) == 0
    again = capsys.readouterr().out
    assert end in again
    assert "This machine is busy" not in again, "there is nothing to measure"
    assert main(["bench", str(path), "-o", str(out), "--fresh", "--quiet"]) == 0
    assert capsys.readouterr() == (f"{end}\n", ""), "of all that is said, the warning is left"

"""paceline export: what it writes and says, and what it refuses."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest
from event_files import scalars
from made_up import write_run
from raw_lines import RawWriter
from refusal import refusal
from trace_check import check_trace

from paceline.cli.main import main
from paceline.export.trace import MOST_STEPS
from paceline.run.folder import check_summary, write_summary
from paceline.run.liveness import claim
from paceline.run.records import RUNNING


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "one", [0.1] * 30, workers=2, moves={"here": (1e6, 1e6)})


def test_a_trace_is_in_the_run_folder_unless_another_file_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--trace"]) == 0
    said = capsys.readouterr().out
    events = check_trace(run / "trace.json.gz")
    assert f"{run / 'trace.json.gz'}: all 30 steps, {len(events):,} events" in said
    assert main(["export", str(run), "--trace", str(tmp_path / "new" / "t.json"), "--steps", "5:10"]) == 0
    assert "steps 5 to 9 of 30" in capsys.readouterr().out
    assert len(check_trace(tmp_path / "new" / "t.json")) < len(events)
    assert main(["export", str(run), "--trace", "--force", "--steps", "29:"]) == 0
    assert len(check_trace(run / "trace.json.gz")) < len(events)


def test_the_trace_of_a_long_run_says_what_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "long", [0.001] * (MOST_STEPS + 50))
    assert main(["export", str(run), "--trace"]) == 0
    assert f"steps 50 to {MOST_STEPS + 49:,} of {MOST_STEPS + 50:,}" in (said := capsys.readouterr().out)
    assert "Earlier steps are left out, as the trace would be large: --steps 0:50 writes them" in said


def test_events_are_in_the_run_folder_unless_another_one_is_named(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(run), "--tensorboard"]) == 0
    assert f"tensorboard --logdir {run / 'tensorboard'}" in capsys.readouterr().out
    assert {path.name for path in (run / "tensorboard").iterdir()} == {"rank_0", "rank_1", "node_here"}
    assert len(scalars(run / "tensorboard" / "rank_1")["seconds/step"]) == 30
    (run / "tensorboard" / "rank_1" / "notes.txt").write_text("mine")
    assert main(["export", str(run), "--tensorboard", "--force", "--steps", ":7"]) == 0
    assert len(scalars(run / "tensorboard" / "rank_1")["seconds/step"]) == 7, "instead of the events, not beside them"
    assert (run / "tensorboard" / "rank_1" / "notes.txt").exists(), "only events are replaced"
    assert main(["export", str(run), "--tensorboard", str(tmp_path / "logs")]) == 0
    assert len(scalars(tmp_path / "logs" / "rank_0")["seconds/step"]) == 30


def test_what_is_not_one_run_folder_is_refused(run: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "none is not a folder: give a run folder" in refusal(tmp_path, "export", "none", "--trace")
    assert "empty is not a run folder: it has no summary.json; give one, such as" in refusal(
        tmp_path, "export", "empty", "--trace"
    )
    assert "give one of those in it, such as runs/one" in refusal(tmp_path, "export", "runs", "--tensorboard")
    (run / "summary.json").write_text('{"status": "comp')
    assert "has no summary that can be read" in refusal(tmp_path, "export", "runs/one", "--trace")


def test_neither_both_nor_none_and_no_odd_steps(run: Path, tmp_path: Path) -> None:
    assert "one of the arguments --tensorboard --trace is required" in refusal(tmp_path, "export", "runs/one")
    both = refusal(tmp_path, "export", "runs/one", "--trace", "--tensorboard")
    assert "--tensorboard: not allowed with argument --trace" in both
    for steps in ("5", ":", "a:b", "9:3", "-3:"):
        assert "--steps" in refusal(tmp_path, "export", "runs/one", "--trace", f"--steps={steps}")
    beyond = refusal(tmp_path, "export", "runs/one", "--trace", "--steps", "30:40")
    assert "--steps 30:40: the run has the steps 0 to 29" in beyond


def test_nothing_is_replaced_without_being_asked(run: Path, tmp_path: Path) -> None:
    (tmp_path / "t.json").write_text("mine")
    assert "t.json is there already: --force replaces it" in refusal(
        tmp_path, "export", "runs/one", "--trace", "t.json"
    )
    assert "name a file, such as runs/trace.json.gz" in refusal(tmp_path, "export", "runs/one", "--trace", "runs")
    assert "it is a file; give a folder" in refusal(tmp_path, "export", "runs/one", "--tensorboard", "t.json")
    assert main(["export", str(run), "--tensorboard"]) == 0
    assert "tensorboard has events already: --force" in refusal(tmp_path, "export", "runs/one", "--tensorboard")
    claim(run)  # by this process, which lives
    write_summary(run, replace(check_summary(run), status=RUNNING))
    assert "the run is writing events into" in refusal(tmp_path, "export", "runs/one", "--tensorboard", "--force")


def test_a_damaged_line_is_named_and_nothing_is_left_behind(run: Path, tmp_path: Path) -> None:
    lines = RawWriter(run / "rank_1.jsonl")
    lines.write("step", step=29, epoch=0, time=-5, seconds=1.0, samples=8, spans={})
    lines.close()
    for what in ("--trace", "--tensorboard"):
        said = refusal(tmp_path, "export", "runs/one", what)
        assert "runs/one is damaged: rank_1.jsonl: time is -5" in said


def test_without_tensorboardx_it_is_refused_before_anything_starts(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "tensorboardX" else find(name))
    missing = "--tensorboard: tensorboardX is not installed; use `pip install"
    assert missing in refusal(tmp_path, "export", "runs/one", "--tensorboard")
    assert missing in refusal(tmp_path, "train", "--tensorboard")

"""What a rank does when it cannot start, or cannot write: no folder is left of a mistake, and no error gets lost."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from raw_lines import raw_lines

from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.errors import UsageError, refuse_pipe, visible
from paceline.launch.folder import make_folder, open_run
from paceline.launch.rank import Rank
from paceline.run.folder import HELD, read_summary
from paceline.run.records import FAILED
from paceline.spec import Resolved, read_config, resolve

SMALL = {"model": "mlp", "data": "synthetic:1x8x8,train=24,test=6", "batch_size": 8, "log_every": 0, "epochs": 1}


def a_run(output: Path, **more: Any) -> Resolved:
    return resolve(("test", SMALL | {"output_dir": str(output), "name": "run"} | more))


def start_alone(resolved: Resolved) -> int:
    """As one process that another launcher started."""
    return Rank(resolved, Seat(0, 1, 0, 1, "torchrun"), None, None).run(SingleComm())


def test_a_mistake_that_a_rank_finds_is_told_as_it_is_and_leaves_no_folder(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not weights" * 10)
    assert start_alone(a_run(tmp_path, weights=str(broken))) == 2
    assert capfd.readouterr().err.startswith(f"paceline: --weights {broken} cannot be read as safetensors: ")
    assert list(tmp_path.iterdir()) == [broken]


def test_a_disk_with_too_little_space_is_refused_before_the_first_step(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=9000))
    assert start_alone(a_run(tmp_path)) == 2
    said = capfd.readouterr().err
    assert "is on a disk with 0.0 MB free, and the weights take" in said
    assert "choose another --output-dir" in said
    assert list(tmp_path.iterdir()) == []


def test_a_crash_keeps_its_folder_and_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr("paceline.launch.rank.train", crash)
    assert start_alone(a_run(tmp_path)) == 1
    assert "ZeroDivisionError" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_a_rank_that_finds_the_disk_full_uses_the_space_that_was_held_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        assert (tmp_path / "run" / HELD).stat().st_size > 500_000
        raise OSError(28, "No space left on device", "weights")

    monkeypatch.setattr("paceline.launch.rank.train", full)
    assert start_alone(a_run(tmp_path)) == 1
    folder = tmp_path / "run"
    summary = read_summary(folder)
    assert summary is not None
    assert (summary.status, summary.failed_rank) == (FAILED, 0)
    assert f"there is no space left in {folder}" in str(summary.error)
    assert [record["own"] for record in raw_lines(folder / "rank_0.jsonl") if record["kind"] == "error"] == [True]
    assert not (folder / HELD).exists()


def test_a_run_folder_that_cannot_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    resolved = a_run(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    folder = make_folder(resolved.spec)
    with pytest.raises(
        UsageError, match=r"cannot write to the run folder .*: No space left on device; see --output-dir"
    ):
        open_run(folder, resolved)
    assert not folder.exists()


def test_a_completed_run_holds_no_space(tmp_path: Path) -> None:
    assert start_alone(a_run(tmp_path)) == 0
    assert not (tmp_path / "run" / HELD).exists()
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_named_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(UsageError, match="is a pipe or a device: give a regular file"):
        read_config(str(pipe))
    with pytest.raises(UsageError, match="it is not a regular file"):
        a_run(tmp_path, weights=str(pipe))
    refuse_pipe(tmp_path / "nowhere", "the file")
    refuse_pipe("/dev/stdin", "the file")  # what the process was given


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, größer\n\tnext", "plain, größer\n\tnext"),
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("\x9b31m\r\x7f", r"\x9b31m\r\x7f"),
        ("\u202eevil\udcff", r"\u202eevil\udcff"),
    ],
)
def test_what_would_control_a_terminal_is_made_visible(text: str, shown: str) -> None:
    assert visible(text) == shown

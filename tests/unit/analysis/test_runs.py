"""Reading run folders, and leaving out those that cannot be used."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import steady, write_run

from paceline.analysis.runs import LeftOut, Run, find_folders, read_run


def check_read(folder: Path) -> Run:
    found = read_run(folder)
    assert isinstance(found, Run), found
    return found


def test_a_run_without_its_warm_up(tmp_path: Path) -> None:
    run = check_read(write_run(tmp_path / "a", [1.0] * 5 + steady(0.1), workers=2))
    assert 4 <= run.warm_up <= 8
    assert run.images_per_second == pytest.approx(64 / 0.1, rel=0.03)
    assert not run.emulated


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda f: (f / "summary.json").write_text("{"), "no summary that can be read"),
        (lambda f: (f / "summary.json").unlink(), "no summary that can be read"),
        (lambda f: (f / "env.json").write_text("["), "damaged"),
        (lambda f: (f / "spec.toml").unlink(), "damaged"),
        (lambda f: (f / "rank_0.jsonl").write_text('{"kind": "step"}\n'), "damaged: KeyError"),
        (lambda f: (f / "rank_0.jsonl").write_text(""), "0 steps are written down"),
    ],
)
def test_damaged_folders_are_left_out_with_the_reason(tmp_path: Path, spoil, why: str) -> None:  # type: ignore[no-untyped-def]
    folder = write_run(tmp_path / "a", steady(0.1))
    spoil(folder)
    found = read_run(folder)
    assert isinstance(found, LeftOut)
    assert why in found.why


def test_runs_that_did_not_complete_are_left_out(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path / "a", steady(0.1), status="failed", error="rank 1 was killed"))
    assert isinstance(found, LeftOut)
    assert found.why == "failed: rank 1 was killed"


def test_folders_are_found_below(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / "x" / name, steady(0.1)) for name in "ab")
    assert find_folders([tmp_path]) == [a, b]
    assert find_folders([a, tmp_path]) == [a, b]
    (tmp_path / "empty").mkdir()
    assert find_folders([tmp_path / "empty"]) == [tmp_path / "empty"]

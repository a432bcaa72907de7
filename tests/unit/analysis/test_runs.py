"""Reading run folders, and leaving out those that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import steady, write_run

from paceline.analysis.runs import LeftOut, Run, read_run
from paceline.analysis.scaling import group
from paceline.run.folder import find_folders


def check_read(folder: Path) -> Run:
    found = read_run(folder)
    assert isinstance(found, Run), found
    return found


def test_a_run_without_its_warm_up(tmp_path: Path) -> None:
    run = check_read(write_run(tmp_path / "a", [1.0] * 5 + steady(0.1), workers=2))
    assert 4 <= run.warm_up <= 8
    assert run.samples_per_second == pytest.approx(64 / 0.1, rel=0.03)
    assert not run.emulated


def bursts(rounds: int, workers: int, period: float = 0.4) -> list[float]:
    """All workers' gradients come at once, and then none for a period."""
    return [value for _ in range(rounds) for value in [period - 0.001 * (workers - 1), *[0.001] * (workers - 1)]]


def test_the_speed_of_updates_that_come_in_bursts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", bursts(30, 4), servers=1, workers=4, strategy="ps-async")
    run = check_read(folder)
    assert 1 / np.median(run.seconds_per_sample) == pytest.approx(4 * 32 / 0.4)
    assert np.median(run.step_seconds) == pytest.approx(0.1)
    assert run.samples_per_second == pytest.approx(4 * 32 / 0.4, rel=0.02)
    [one] = group([run])
    assert one.samples_per_second().value == pytest.approx(4 * 32 / 0.4)
    brief = check_read(write_run(tmp_path / "b", [0.1, 0.2], servers=1, workers=4, strategy="ps-async"))
    assert list(brief.step_seconds) == pytest.approx([0.15])


def change(name: str, **values: Any) -> Callable[[Path], None]:
    """Other values in a JSON file; "gone" takes one out."""

    def spoil(folder: Path) -> None:
        given = json.loads((folder / name).read_text()) | values
        (folder / name).write_text(json.dumps({key: value for key, value in given.items() if value != "gone"}))

    return spoil


def spoil_step(**values: Any) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        lines = (folder / "rank_0.jsonl").read_text().splitlines()
        (folder / "rank_0.jsonl").write_text("\n".join([json.dumps(json.loads(lines[0]) | values), *lines[1:]]))

    return spoil


def shorten(folder: Path) -> None:
    lines = (folder / "rank_1.jsonl").read_text().splitlines()
    (folder / "rank_1.jsonl").write_text("\n".join(lines[:5]) + "\n")


DAMAGED: list[tuple[Callable[[Path], object], str]] = [
    (lambda f: (f / "summary.json").write_text("{"), "no summary that can be read: Expecting"),
    (lambda f: (f / "summary.json").unlink(), "no summary that can be read: it did not begin"),
    (lambda f: (f / "env.json").write_text("["), "damaged: env.json: Expecting"),
    (lambda f: (f / "env.json").write_text("[]"), "damaged: env.json: a table is expected"),
    (change("env.json", ranks="gone"), "damaged: env.json: ranks is missing"),
    (change("env.json", ranks=[]), "damaged: env.json: it names no ranks"),
    (change("env.json", ranks=[{"rank": 7, "host": "here"}]), "damaged: env.json does not say where rank 0 was"),
    (change("env.json", ranks=[{"rank": 0}]), "damaged: env.json: host is missing"),
    (change("env.json", lab={"nodes": [{}]}), "damaged: env.json: up is missing"),
    (change("env.json", lab=[]), "damaged: env.json: a table is expected for Lab"),
    (change("summary.json", epoch_seconds=None), "epoch_seconds is None, and a list is expected"),
    (change("summary.json", train_loss=[None]), "damaged: train_loss has a value that is not finite"),
    (change("summary.json", workers="2"), "workers is '2', and a whole number of 1 to 100000 is expected"),
    (spoil_step(samples=0), "damaged: rank_0.jsonl: samples is 0, and a whole number of 1 or more is expected"),
    (spoil_step(seconds=0.0), "damaged: rank_0.jsonl: seconds is 0.0"),
    (spoil_step(epoch=2**40), "damaged: step 0 cannot be of epoch 1099511627776: the run has 120 steps"),
    (lambda f: (f / "spec.toml").unlink(), "damaged"),
    (lambda f: (f / "rank_0.jsonl").write_text('{"kind": "step"}\n'), "damaged: rank_0.jsonl: step is missing"),
    (lambda f: (f / "rank_0.jsonl").write_text(""), "0 steps are written down"),
    (lambda f: (f / "rank_1.jsonl").unlink(), "rank 1 has 0 steps written down, and the run 120"),
    (shorten, "rank 1 has 5 steps written down, and the run 120"),
]


@pytest.mark.parametrize(("spoil", "why"), DAMAGED)
def test_damaged_folders_are_left_out_with_the_reason(
    tmp_path: Path, spoil: Callable[[Path], object], why: str
) -> None:
    folder = write_run(tmp_path / "a", steady(0.1), workers=2)
    spoil(folder)
    found = read_run(folder)
    assert isinstance(found, LeftOut)
    assert why in found.why


def test_a_server_goes_on_without_a_worker(tmp_path: Path) -> None:
    lost = [{"rank": 1, "why": "silent", "update": 5, "samples": 32, "back": None}]
    folder = write_run(tmp_path / "a", steady(0.1), workers=2, servers=1, lost_workers=lost)
    shorten(folder)
    assert len(check_read(folder).steps[1]) == 5


def test_runs_that_did_not_complete_are_left_out(tmp_path: Path) -> None:
    found = read_run(write_run(tmp_path / "a", steady(0.1), status="failed", error="rank 1 was killed"))
    assert isinstance(found, LeftOut)
    assert found.why == "failed: rank 1 was killed"


def test_folders_are_found_below(tmp_path: Path) -> None:
    a, b = (write_run(tmp_path / "x" / name, steady(0.1)) for name in "ab")
    assert find_folders([tmp_path]) == [a, b]
    assert find_folders([a, tmp_path]) == [a, b]
    stopped = tmp_path / "x" / "c"
    stopped.mkdir()
    (stopped / "spec.toml").write_text("")
    assert find_folders([tmp_path]) == [a, b, stopped]
    assert isinstance(read_run(stopped), LeftOut)
    (tmp_path / "empty").mkdir()
    assert find_folders([tmp_path / "empty"]) == [tmp_path / "empty"]

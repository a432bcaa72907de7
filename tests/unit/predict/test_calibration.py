"""Calibrated intervals have 90 % of runs; probes, calibration and scored runs are disjoint."""

from __future__ import annotations

import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import steady, write_run
from prediction import REAL, draw_sets

from paceline.errors import UsageError
from paceline.predict.calibration import calibrate, check_disjoint, distance, fingerprint
from paceline.predict.probes import Probe, read_probes
from paceline.predict.ranges import Range

SPACE = Path(__file__).parents[3] / "experiments" / "prediction.toml"


def test_a_run_at_an_end_of_its_interval_has_distance_one() -> None:
    predicted = Range(1.0, 0.8, 1.5)
    assert [distance(at, predicted) for at in (0.8, 1.0, 1.5, 0.64)] == pytest.approx([1.0, 0.0, 1.0, 2.0])


@pytest.mark.parametrize("count", [9, 20, 50])
def test_nine_of_ten_further_runs_are_inside(count: int) -> None:
    """Split conformal prediction: at least 90 %, and at most 1 / (count + 1) more, whatever the distribution is."""
    dice, inside = np.random.default_rng(1), []
    for _ in range(2000):
        *known, new = dice.standard_t(3, count + 1)
        factor = calibrate(np.abs(known).tolist()).factor
        inside.append(abs(new) <= factor)
    assert 0.9 - 0.02 < np.mean(inside) < 0.9 + 1 / (count + 1) + 0.02


def test_a_wider_interval_keeps_its_value() -> None:
    drawn = np.array([1.0, *np.exp(0.1 * np.random.default_rng(0).standard_normal(2000))])
    narrow, wide = Range.of(drawn), Range.of(drawn, 2.0)
    assert wide.value == narrow.value == 1.0
    assert np.log(wide.high) == pytest.approx(2 * np.log(narrow.high))
    assert np.log(wide.low) == pytest.approx(2 * np.log(narrow.low))


def test_eight_runs_are_too_few() -> None:
    with pytest.raises(UsageError, match="8 runs to calibrate with: at least 9 are needed"):
        calibrate([1.0] * 8)


@pytest.fixture
def runs(tmp_path: Path) -> list[Probe]:
    for number in range(3):
        write_run(tmp_path / str(number), steady(0.1, 60, seed=number), spec={"model": "mnist-cnn", "data": "mnist"})
    return read_probes([tmp_path])


def test_no_run_can_be_in_two_of_the_three(runs: list[Probe], tmp_path: Path) -> None:
    probe, calibration, scored = runs
    mark = fingerprint(calibration)
    check_disjoint([probe], {mark}, [scored])
    shutil.copytree(probe.run.folder, tmp_path / "copy")
    (copy,) = read_probes([tmp_path / "copy"])
    for wrong, said in (
        (([probe], {mark}, [probe]), "is a probe, and cannot be scored"),
        (([probe], {mark}, [copy]), "is a probe, and cannot be scored"),
        (([probe], {mark}, [calibration]), "was used to calibrate"),
        (([calibration], {mark}, [scored]), "was used to calibrate"),
    ):
        with pytest.raises(UsageError, match=said):
            check_disjoint(*wrong)


def test_sets_of_the_experiment_share_no_setting() -> None:
    """What is drawn for calibration differs from what is scored, and held-out runs from probes, by their settings."""
    space: dict[str, Any] = tomllib.loads(SPACE.read_text())
    sets = draw_sets(space)
    assert sets == draw_sets(space)  # the seed decides
    assert sum(each.runs for each in sets if each.role == "scored") == 120
    emulated = [each for each in sets if each.role != REAL]
    machines = [(each.fixed["model"], str(each.probes[1]["lab"] | {"node": each.probes[1]["lab"]["node"][-1:]}))
                for each in emulated]  # fmt: skip
    assert len(set(machines)) == len(emulated)
    for each in sets:
        real = each.role == REAL
        assert {run["workers"] for run in each.probes} <= ({1} if real else {1, 2, 4})
        assert {run["workers"] for run in each.held} <= ({2} if real else {3, 6, 8, 12, 16})
        assert len(each.held) >= each.runs

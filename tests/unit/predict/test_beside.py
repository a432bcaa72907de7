"""Runs with the most workers are predicted from those with fewer, never from themselves, and no code of others runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run

from paceline.analysis.runs import LeftOut, Run, read_run
from paceline.predict.beside import predictions_beside
from paceline.predict.fit import Fit, fit_probes
from paceline.predict.probes import Probe

SPEC = {"model": "mlp", "data": "mnist-mini", "overlap": "off"}


def run(folder: Path, workers: int, seconds: float, **more: Any) -> Run:
    spec = SPEC | more.pop("spec", {})
    if workers == 1:
        spec.pop("overlap", None)
    parts = [0.07 / seconds] * workers
    path = write_run(folder / f"{workers}-{seconds}", steady(seconds, 60, spread=0.01), workers=workers, compute=parts,
                     spec=spec, **more)  # fmt: skip
    found = read_run(path)
    assert not isinstance(found, LeftOut)
    return found


def test_the_most_workers_are_predicted_from_fewer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[int]()

    def fitted(probes: Sequence[Probe], draws: int) -> Fit:
        used.extend(probe.workers for probe in probes)
        return fit_probes(probes, draws)

    monkeypatch.setattr("paceline.predict.beside.fit_probes", fitted)
    runs = [run(tmp_path, workers, seconds) for workers, seconds in ((1, 0.1), (2, 0.11), (4, 0.115))]
    (found,) = predictions_beside(runs)
    assert used == [1, 2]
    assert found.fewer == (1, 2)
    (scored,) = found.scored
    assert scored.workers == 4
    assert scored.measured == pytest.approx(0.115, rel=0.02)
    assert found.mean_error == pytest.approx(abs(scored.predicted.value / scored.measured - 1))
    assert found.inside == int(scored.predicted.low <= scored.measured <= scored.predicted.high)


@pytest.mark.parametrize(
    "other",
    [
        {"spec": {"model": "own.py:build"}},
        {"spec": {"data": "images:photos"}},
        {"others": 2.0},
        {"machine": {"processor": "another"}},
    ],
)
def test_runs_that_cannot_be_used_are_left_out(tmp_path: Path, other: dict[str, Any]) -> None:
    """Own code, disturbed runs, and another machine: nothing with several numbers of workers is left."""
    first, second = run(tmp_path, 1, 0.1), run(tmp_path, 2, 0.11, **other)
    assert predictions_beside([first, second]) == []


def test_a_collective_that_was_not_measured_with_fewer_workers_is_not_predicted(tmp_path: Path) -> None:
    (found,) = predictions_beside([run(tmp_path, 1, 0.1), run(tmp_path, 2, 0.11)])
    assert found.scored == ()
    assert found.left_out == ("ring has no run with fewer workers, but more than one",)


def test_workers_that_share_cores_as_no_run_has_are_not_predicted(tmp_path: Path) -> None:
    runs = [run(tmp_path, workers, 0.1, cores=2) for workers in (1, 2, 4)]
    (found,) = predictions_beside(runs)
    assert found.scored == ()
    assert "would share cores" in found.left_out[0]

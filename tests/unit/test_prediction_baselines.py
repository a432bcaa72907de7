"""The published models find their own curves again, and are scored on the runs that Paceline is scored on."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import steady, write_run
from prediction_baselines import Point, ernest, errors_in, pollux

SPEC = {"model": "mnist-cnn", "data": "mnist", "overlap": "on"}


def test_ernest_is_exact_where_time_follows_its_formula() -> None:
    def truth(workers: int, batch: int) -> Point:
        return Point(workers, workers, batch, 0.02 + 1e-3 * batch + 0.01 * math.log(workers) + 2e-3 * workers, 0.05)

    found = ernest([truth(workers, batch) for workers in (1, 2, 4) for batch in (32, 64)])
    for held in (truth(8, 32), truth(16, 64), truth(64, 48)):
        assert found(held) == pytest.approx(held.seconds, rel=1e-6)


def test_ernest_uses_no_negative_terms() -> None:
    falling = [Point(workers, 1, 32, 1.0 / workers, 0.1) for workers in (1, 2, 4)]
    assert ernest(falling)(replace(falling[0], workers=1000)) >= 0


@pytest.mark.parametrize("exponent", [1.0, 2.0])
def test_pollux_is_exact_where_time_follows_its_formula(exponent: float) -> None:
    def truth(workers: int, nodes: int) -> Point:
        compute = 0.1
        a, b = (0.08, 0.004) if nodes > 1 else (0.03, 0.001)
        sync = a + b * (workers - 2) if workers > 1 else 0.0
        return Point(workers, nodes, 32, (compute**exponent + sync**exponent) ** (1 / exponent), compute)

    settings = [(1, 1), (2, 1), (4, 1), (2, 2), (4, 4), (8, 8)]
    found = pollux([truth(*each) for each in settings])
    for held in (truth(6, 6), truth(12, 12), truth(6, 1)):
        assert found(held) == pytest.approx(held.seconds, rel=0.02)


def test_pollux_has_no_sync_with_one_worker() -> None:
    alone = Point(1, 1, 32, 0.1, 0.1)
    assert pollux([alone, Point(2, 2, 32, 0.2, 0.1)])(alone) == pytest.approx(0.1, rel=0.02)


def test_all_models_are_scored_on_the_same_runs(tmp_path: Path) -> None:
    alone = {"model": "mnist-cnn", "data": "mnist"}
    write_run(tmp_path / "probes" / "one", steady(0.10, 60), spec=alone)
    write_run(tmp_path / "probes" / "two", steady(0.12, 60), workers=2, spec=SPEC)
    write_run(tmp_path / "held" / "two", steady(0.12, 60, seed=3), workers=2, spec=SPEC)
    write_run(tmp_path / "held" / "gather", steady(0.12, 60), workers=2, strategy="gather", spec=SPEC)
    errors = errors_in(tmp_path)
    assert {name: len(each) for name, each in errors.items()} == {"Paceline": 1, "Ernest": 1, "Pollux": 1}
    assert max(errors["Ernest"]) < 0.02
    assert max(errors["Pollux"]) < 0.05

"""Speedup, efficiency and where the time went, on runs with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.breakdown import by_rank
from paceline.analysis.scaling import curves, group


def test_repeats_are_one_group_and_other_settings_another(tmp_path: Path) -> None:
    runs = [check_read(write_run(tmp_path / f"{seed}", steady(0.1, seed=seed), seed=seed)) for seed in range(3)]
    runs.append(check_read(write_run(tmp_path / "other", steady(0.1), batch=64)))
    assert [len(one.runs) for one in group(runs)] == [3, 1]


def test_strong_scaling_by_amdahl(tmp_path: Path) -> None:
    """A fixed batch of 64, of which a fifth of the time is serial."""
    times = {n: 0.1 * (0.2 + 0.8 / n) for n in (1, 2, 4, 8)}
    runs = []
    for n, seconds in times.items():
        for seed in range(3):
            steps = steady(seconds, seed=10 * n + seed)
            runs.append(check_read(write_run(tmp_path / f"{n}-{seed}", steps, workers=n, batch=64 // n, seed=seed)))
    [curve] = curves(group(runs), "strong")
    assert [point.workers for point in curve.points] == [2, 4, 8]
    for point in curve.points:
        assert point.speedup.value == pytest.approx(times[1] / times[point.workers], rel=0.03)
        assert point.efficiency.value == pytest.approx(point.speedup.value / point.workers)
        assert point.speedup.low <= point.speedup.value <= point.speedup.high
    assert curve.serial == pytest.approx(0.2, abs=0.02)
    assert curves(group(runs), "weak") == []


def test_weak_scaling_by_gustafson(tmp_path: Path) -> None:
    """32 samples a worker; a step grows from 0.1 s, so that a tenth of the scaled work is lost."""
    times = {n: 0.1 * n / (n - 0.1 * (n - 1)) for n in (1, 2, 4)}
    runs = [check_read(write_run(tmp_path / f"{n}", steady(t, seed=n), workers=n)) for n, t in times.items()]
    [curve] = curves(group(runs), "weak")
    assert curve.serial == pytest.approx(0.1, abs=0.03)


def test_without_a_run_of_one_worker_there_is_no_speedup(tmp_path: Path) -> None:
    runs = [check_read(write_run(tmp_path / "2", steady(0.1), workers=2))]
    assert curves(group(runs), "strong") == curves(group(runs), "weak") == []


def test_a_step_s_time_is_divided_without_rest(tmp_path: Path) -> None:
    """Rank 1 computes for 0.8 of the step, the others for 0.5: they wait 0.3 of it for the slowest."""
    run = check_read(write_run(tmp_path / "3", [0.1] * 50, workers=3, compute=[0.5, 0.8, 0.5]))
    parts = by_rank(run)
    assert parts[0].slowest == pytest.approx(0.03)
    assert parts[1].slowest == pytest.approx(0.0, abs=1e-9)
    for each in parts.values():
        assert each.total == pytest.approx(0.1)
        assert each.communication == pytest.approx(0.01, rel=1e-4)

"""Speedup, efficiency and where the time went, on runs with known answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.breakdown import by_rank
from paceline.analysis.scaling import curves, group, label


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


def test_one_worker_with_as_many_threads_is_the_baseline_and_else_the_fastest_one(tmp_path: Path) -> None:
    one = check_read(write_run(tmp_path / "1", steady(0.1), spec={"threads": 1}))
    two = check_read(write_run(tmp_path / "2", steady(0.06), spec={"threads": 2}))
    ring = check_read(write_run(tmp_path / "3", steady(0.1), workers=2, spec={"threads": 1}))
    free = check_read(write_run(tmp_path / "4", steady(0.1), workers=2, strategy="gather"))
    found = {curve.label["strategy"]: curve for curve in curves(group([one, two, ring, free]), "weak")}
    assert found["ring"].points[0].speedup.value == pytest.approx(2.0, rel=0.02)
    assert found["gather"].points[0].speedup.value == pytest.approx(1.2, rel=0.02)


def test_nodes_that_were_varied_make_lines_of_their_own(tmp_path: Path) -> None:
    places = {2: [["a", "a"], ["a", "b"]], 4: [["a"] * 4, ["a", "a", "b", "b"]]}
    runs = [check_read(write_run(tmp_path / "1", steady(0.1)))]
    for workers, wheres in places.items():
        runs += [check_read(write_run(tmp_path / f"{workers}-{i}", steady(0.1, seed=i), workers=workers, hosts=where))
                 for i, where in enumerate(wheres)]  # fmt: skip
    groups = group(runs)
    assert len(groups) == 5
    found = {curve.label["nodes"]: [p.workers for p in curve.points] for curve in curves(groups, "weak")}
    assert found == {1: [2, 4], 2: [2, 4]}
    apart = [check_read(write_run(tmp_path / f"apart-{n}", steady(0.1), workers=n, hosts=list("abcd"[:n])))
             for n in (1, 2, 4)]  # fmt: skip
    assert [[p.workers for p in curve.points] for curve in curves(group(apart), "weak")] == [[2, 4]]


def test_a_label_says_only_what_tells_settings_apart(tmp_path: Path) -> None:
    link = {"nodes": [{"up": 10**8, "down": 10**8, "cpu": None, "speed": 1.0, "rack": 0}] * 2}
    runs = [
        check_read(write_run(tmp_path / "1", steady(0.1))),
        check_read(write_run(tmp_path / "2", steady(0.1), workers=2, hosts=["a", "b"], lab=link)),
        check_read(write_run(tmp_path / "3", steady(0.1), workers=2, hosts=["a", "a"], lab=link)),
        check_read(write_run(tmp_path / "4", steady(0.1), workers=2, servers=1, hosts=["a", "b", "c"])),
        check_read(write_run(tmp_path / "5", steady(0.1), workers=2, servers=2, hosts=["a", "b", "c", "d"])),
    ]
    groups = group(runs)
    assert [label(one, groups) for one in groups] == [
        "sequential, 1 worker", "ring, 2 workers, 2 nodes", "ring, 2 workers, 1 node",
        "ps-sync, 2 workers, 1 server", "ps-sync, 2 workers, 2 servers"]  # fmt: skip
    assert label(groups[1], groups[:2]) == "ring, 2 workers"

"""Speedup, efficiency and where the time went, on runs with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.breakdown import by_rank
from paceline.analysis.compare import compare
from paceline.analysis.problems import problems
from paceline.analysis.scaling import curves, group
from paceline.analysis.study import read_study
from paceline.report.draw import draw
from paceline.report.page import page
from paceline.strategies.table import describe


def test_repeats_are_one_group_and_other_settings_another(tmp_path: Path) -> None:
    runs = [check_read(write_run(tmp_path / f"{seed}", steady(0.1, seed=seed), seed=seed)) for seed in range(3)]
    runs.append(check_read(write_run(tmp_path / "other", steady(0.1), batch=64)))
    assert [len(one.runs) for one in group(runs)] == [3, 1]


# What earlier versions wrote of every run, whatever its strategy.
OF_ALL = {"overlap": "auto", "bucket_mb": 4.0, "sync_batchnorm": False, "staleness_lr": False, "worker_timeout": 5.0,
          "snapshot_every": 100, "restarts": 0, "encrypt": True, "cut": "measured", "recompute": False}  # fmt: skip


@pytest.mark.parametrize("strategy", ["sequential", "ring", "ps-sync", "ps-async", "pipeline", "tensor"])
def test_versions_that_write_other_options_have_the_same_settings(tmp_path: Path, strategy: str) -> None:
    method = describe(strategy)
    workers = 1 if method.single else 2
    given: dict[str, Any] = {"workers": workers, "servers": int("servers" in method.names), "strategy": strategy}
    given |= {"stages": 2, "schedule": "1f1b", "microbatches": 8} if "stages" in method.names else {}
    given |= {"tensor": 2} if "tensor" in method.names else {}
    own = {key: value for key, value in OF_ALL.items() if key in method.names}
    total = 32 if method.part or method.updates_by_worker else 32 * workers
    old = OF_ALL | ({"staleness": 0} if strategy == "ps-sync" else {"overlap": "off"} if method.single else {})
    for name, spec in {"old": old, "new": own | {"global_batch": total}}.items():
        write_run(tmp_path / name, steady(0.1), spec=spec, **given | {"global_batch": total})
    [one] = group(check_read(tmp_path / name) for name in ("old", "new"))
    assert len(one.runs) == 2
    assert not compare(*(group([run])[0] for run in one.runs)).differences


def test_a_global_batch_that_is_divided_unevenly_is_another_setting_of_the_same_line(tmp_path: Path) -> None:
    for total in (10, 12):
        write_run(tmp_path / f"one{total}", steady(0.12), batch=total)
        for workers, each in ((2, total // 2), (4, 3)):
            write_run(tmp_path / f"{total}-{workers}", steady(0.12 / workers), workers=workers, batch=each,
                      spec={"global_batch": total}, global_batch=total)  # fmt: skip
    groups = group(check_read(folder) for folder in sorted(tmp_path.iterdir()))
    assert len(groups) == 6
    found = {curve.batch: [point.workers for point in curve.points] for curve in curves(groups, "strong")}
    assert found == {10: [2, 4], 12: [2, 4]}
    names = {one.label(groups) for one in groups if one.workers == 4}
    assert names == {"ring, 4 workers, batch 3", "ring, 4 workers, batch 3, global batch 10"}


def test_a_strategy_that_is_not_installed_here_is_compared_like_others(tmp_path: Path) -> None:
    write_run(tmp_path / "one", steady(0.1), spec=OF_ALL | {"scale_lr": True})
    for far, seconds in ((1, 0.06), (2, 0.05)):
        write_run(tmp_path / f"far{far}", steady(seconds), workers=2, strategy="elastic", batch=16,
                  spec={"global_batch": 32, "far": far, "stages": far})  # fmt: skip
    study = read_study([tmp_path])
    assert not study.left_out
    assert len(study.groups) == 3
    assert [[round(point.speedup.value, 1) for point in curve.points] for curve in study.strong] == [[1.7], [2.0]]
    assert {one.label(study.groups) for one in study.groups if one.workers == 2} == {
        "elastic, 2 workers, far 1, batch 16",
        "elastic, 2 workers, far 2, batch 16",
    }
    assert "elastic" in page(study, draw(study), "")


def test_runs_of_few_independent_steps_are_too_short(tmp_path: Path) -> None:
    """Their steps count, not their number: a slow walk says less than noise. Repeats add up."""
    walk = list(0.1 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.01, 200))))
    runs = [check_read(write_run(tmp_path / name, seconds, seed=seed, batch=batch)) for name, seconds, seed, batch in (
        ("walk", walk, 0, 8), ("short", steady(0.1, 15), 0, 16), ("long", steady(0.1, 80), 0, 32),
        ("again", steady(0.1, 20, seed=1), 0, 64), ("and again", steady(0.1, 20, seed=2), 1, 64))]  # fmt: skip
    assert [one.too_short for one in group(runs)] == [True, True, False, False]
    assert runs[0].effective_samples < 20 < runs[2].effective_samples


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


def test_laws_are_fitted_to_what_can_be_ranked_alone(tmp_path: Path) -> None:
    times = {n: 0.1 * (0.2 + 0.8 / n) * (3 if n == 8 else 1) for n in (1, 2, 4, 8)}
    runs = [check_read(write_run(tmp_path / f"{n}", steady(t, seed=n), workers=n, batch=64 // n))
            for n, t in times.items()]  # fmt: skip

    def serial(*busy: int) -> float | None:
        for run, n in zip(runs, times, strict=True):
            vars(run)["disturbed"] = "other processes used 1.6 of 2 cores" if n in busy else None
        [curve] = curves(group(runs), "strong")
        assert [point.certain for point in curve.points] == [1 not in busy and n not in busy for n in (2, 4, 8)]
        return curve.serial

    assert serial() != pytest.approx(0.2, abs=0.1)
    assert serial(8) == pytest.approx(0.2, abs=0.02)
    assert serial(4, 8) is None
    assert serial(1) is None


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


def test_compute_is_what_had_a_core_where_cores_were_shared(tmp_path: Path) -> None:
    """Workers compute for 0.7 of a step of 0.1 s."""
    shared = check_read(write_run(tmp_path / "a", [0.1] * 50, workers=2, queued=0.5))
    for each in by_rank(shared).values():
        assert (each.compute, each.core) == pytest.approx((0.035, 0.035))
        assert each.total == pytest.approx(0.1)
    alone = check_read(write_run(tmp_path / "b", [0.1] * 50, workers=2, queued=0.05))
    asleep = check_read(write_run(tmp_path / "c", [0.1] * 50, workers=2, queued=0.5))
    asleep.summary.compute = "emulated:k80"
    for run in (alone, asleep):
        assert all((each.compute, each.core) == pytest.approx((0.07, 0.0)) for each in by_rank(run).values())


def test_one_worker_with_as_many_threads_is_the_baseline_and_else_the_fastest_one(tmp_path: Path) -> None:
    one = check_read(write_run(tmp_path / "1", steady(0.1), spec={"threads": 1}))
    two = check_read(write_run(tmp_path / "2", steady(0.06), spec={"threads": 2}))
    ring = check_read(write_run(tmp_path / "3", steady(0.1), workers=2, spec={"threads": 1}))
    free = check_read(write_run(tmp_path / "4", steady(0.1), workers=2, strategy="gather"))
    found = {curve.points[0].group.strategy: curve for curve in curves(group([one, two, ring, free]), "weak")}
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
    found = {curve.points[-1].group.setting.get("nodes"): [p.workers for p in curve.points]
             for curve in curves(groups, "weak")}  # fmt: skip
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
    assert [one.label(groups) for one in groups] == [
        "sequential, 1 worker", "ring, 2 workers, 2 nodes", "ring, 2 workers, 1 node",
        "ps-sync, 2 workers, 1 server", "ps-sync, 2 workers, 2 servers"]  # fmt: skip
    assert groups[1].label(groups[:2]) == "ring, 2 workers"


def lab_of(nodes: int, up: int = 10**9, speed: float = 1.0, **more: Any) -> dict[str, Any]:
    return {"nodes": [{"up": up, "down": up, "cpu": None, "speed": speed, "rack": 0}] * nodes} | more


def named(folder: Path, settings: list[dict[str, Any]]) -> list[str]:
    runs = []
    for i, given in enumerate(settings):
        options = {"workers": 2} | given
        ranks = options["workers"] + options.get("servers", 0)
        hosts = [f"n{k}" for k in range(ranks)]
        runs.append(check_read(write_run(folder / str(i), steady(0.1), hosts=hosts, **options)))
    groups = group(runs)
    assert len(groups) == len(settings)
    return [one.label(groups).removeprefix("ring, 2 workers, ") for one in groups]


def test_a_label_says_what_one_strategy_was_varied_in(tmp_path: Path) -> None:
    varied: list[dict[str, Any]] = [{"spec": {"overlap": "on"}}, {"spec": {"overlap": "off"}}, {"workers": 1}]
    assert named(tmp_path / "overlap", varied) == ["overlap on", "overlap off", "sequential, 1 worker"]
    served: list[dict[str, Any]] = [{"servers": 1, "strategy": "ps-bounded", "spec": {"staleness": n}} for n in (1, 4)]
    assert named(tmp_path / "stale", [*served, {}]) == [
        "ps-bounded, 2 workers, staleness 1", "ps-bounded, 2 workers, staleness 4", "ring, 2 workers"]  # fmt: skip
    secret = [{"servers": 1, "spec": {"encrypt": each}} for each in (True, False)]
    assert named(tmp_path / "secret", secret) == ["ps-sync, 2 workers", "ps-sync, 2 workers, no encryption"]
    assert named(tmp_path / "long", [{"spec": {"steps": n}} for n in (10, 20)]) == ["10 steps", "20 steps"]


def test_a_label_tells_machines_and_labs_apart(tmp_path: Path) -> None:
    machines = [{"machine": {"processor": "x", "torch": torch, "python": python}}
                for torch, python in (("2.1", "3.11"), ("2.2", "3.12"))]  # fmt: skip
    assert named(tmp_path / "machines", machines) == ["torch 2.1", "torch 2.2"]
    labs = [lab_of(2), lab_of(2, mtu=9000), lab_of(2, racks=[{"up": 10**8, "down": 10**8}] * 2),
            lab_of(2, faults=[{"at": 5.0, "do": "slow", "node": "n1"}]), lab_of(2, 10**8)]  # fmt: skip
    assert named(tmp_path / "labs", [{"lab": each} for each in labs]) == [
        "links of 1 Gbit/s", "links of 1 Gbit/s, MTU 9000",
        "links of 1 Gbit/s, 100 Mbit/s between racks", "links of 1 Gbit/s, n1 slow at 5 s",
        "links of 100 Mbit/s"]  # fmt: skip


def test_links_of_runs_with_smaller_gradients_are_named_by_what_they_stand_for(tmp_path: Path) -> None:
    compute = "emulated:k80"
    runs = [check_read(write_run(tmp_path / f"{shrink}-{n}", steady(0.1), workers=n, hosts=["n1", "n2"][:n],
                                 lab=lab_of(2, 5 * 10**8, 8.0), spec={"shrink": shrink, "compute": compute}))
            for shrink in (32, 256) for n in (1, 2)]  # fmt: skip
    for run in runs:
        run.summary.compute, run.summary.shrink = compute, run.spec["shrink"]
    groups = group(runs)
    assert [one.setting.get("links_as_of") for one in groups] == [2e9, 2e9, 16e9, 16e9]
    assert [one.label(groups) for one in groups] == [
        "sequential, 1 worker, links as of 2 Gbit/s", "ring, 2 workers, links as of 2 Gbit/s",
        "sequential, 1 worker, links as of 16 Gbit/s", "ring, 2 workers, links as of 16 Gbit/s"]  # fmt: skip
    [plain] = group([check_read(write_run(tmp_path / "plain", steady(0.1), workers=2, lab=lab_of(2)))])
    assert plain.setting.get("links_as_of") is None


def test_what_was_varied_makes_curves_of_its_own(tmp_path: Path) -> None:
    uneven = lab_of(3)
    uneven["nodes"] = [*uneven["nodes"][:2], {**uneven["nodes"][2], "up": 10**7}]
    runs = [check_read(write_run(tmp_path / "1", steady(0.1), lab=lab_of(1)))]
    for number, (overlap, lab) in enumerate((("on", lab_of(3)), ("off", lab_of(3)), ("on", uneven))):
        runs += [check_read(write_run(tmp_path / f"{number}-{n}", steady(0.1, seed=n), workers=n, lab=lab,
                                      spec={"overlap": overlap})) for n in (2, 3)]  # fmt: skip
    assert [[p.workers for p in curve.points] for curve in curves(group(runs), "weak")] == [[2, 3]] * 3


def test_one_worker_of_another_machine_is_no_baseline(tmp_path: Path) -> None:
    one = check_read(write_run(tmp_path / "1", steady(0.1), machine={"processor": "x"}))
    two = check_read(write_run(tmp_path / "2", steady(0.1), workers=2, machine={"processor": "y"}))
    assert curves(group([one, two]), "weak") == []


def test_the_batch_of_asynchronous_workers_is_not_divided(tmp_path: Path) -> None:
    runs = [check_read(write_run(tmp_path / f"{n}", steady(0.1 / n), workers=n, servers=int(n > 1),
                                 strategy="ps-async" if n > 1 else None)) for n in (1, 2, 4)]  # fmt: skip
    assert curves(group(runs), "strong") == []
    [curve] = curves(group(runs), "weak")
    assert [point.speedup.value for point in curve.points] == pytest.approx([2.0, 4.0], rel=0.02)


@pytest.mark.parametrize("strategy", ["ps-async", "ps-bounded"])
def test_workers_that_need_not_be_together_do_not_wait_for_the_slowest(tmp_path: Path, strategy: str) -> None:
    run = check_read(write_run(tmp_path / "a", [0.1] * 60, workers=3, servers=1, strategy=strategy,
                               compute=[0.5, 0.8, 0.5]))  # fmt: skip
    assert all(parts.slowest == 0 for parts in by_rank(run).values())
    together = check_read(write_run(tmp_path / "b", [0.1] * 60, workers=3, servers=1, compute=[0.5, 0.8, 0.5]))
    assert by_rank(together)[1].slowest == pytest.approx(0.03, rel=0.1)


def test_settings_that_cannot_be_ranked_together_are_problems_of_their_own(tmp_path: Path) -> None:
    specs: list[dict[str, Any]] = [{}, {"image_size": 64}, {"hidden": [256, 64]}, {"dtype": "float64"},
                                   {"augment": "crop"}]  # fmt: skip
    runs = [check_read(write_run(tmp_path / str(i), steady(0.1), spec=each)) for i, each in enumerate(specs)]
    slow = lab_of(1)
    slow["nodes"][0]["cpu"] = 0.5
    runs += [check_read(write_run(tmp_path / f"lab-{i}", steady(0.1), lab=each))
             for i, each in enumerate((lab_of(1), lab_of(1, speed=2.0), slow))]  # fmt: skip
    found = problems(group(runs))
    assert len(found) == len(runs)
    assert "images of 64 pixels" in found[1].label
    assert "hidden layers of 256 and 64" in found[2].label
    assert len({each.label for each in found}) == len(found)


def test_steps_that_differ_in_turn_are_timed_together(tmp_path: Path) -> None:
    """Of four steps one sends, and takes ten times as long: the median step knows nothing of it."""
    times = [0.1, 0.1, 0.1, 1.0] * 40
    run = check_read(write_run(tmp_path / "run", times, workers=2, strategy="local-sgd", spec={"sync_every": 4}))
    assert run.at_once == 4
    assert np.median(run.step_seconds) == pytest.approx(0.325)

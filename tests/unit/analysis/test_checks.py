"""Every warning is found in a made-up run that has its fault, and none in runs without."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.checks import all_warnings, check_run
from paceline.analysis.runs import Run
from paceline.analysis.scaling import curves, group


def kinds(runs: list[Run]) -> set[str]:
    groups = group(runs)
    found = [*curves(groups, "strong"), *curves(groups, "weak")]
    return {warning.kind for warning in all_warnings(groups, found)}


def three(folder: Path, mean: float, **options: object) -> list[Run]:
    found = []
    for seed in range(3):
        name = f"{mean}-{options.get('workers', 1)}-{seed}"
        found.append(check_read(write_run(folder / name, steady(mean, seed=seed), seed=seed, **options)))  # type: ignore[arg-type]
    return found


def test_sound_runs_raise_no_doubt(tmp_path: Path) -> None:
    assert kinds(three(tmp_path, 0.1, threads=8) + three(tmp_path, 0.06, workers=2, batch=16, threads=4)) == set()


def test_the_first_paper_s_baseline_is_seen(tmp_path: Path) -> None:
    """Epochs of 142, 142, 142, 82 and 82 s: a median hides the second state of the machine."""
    seconds = steady(1.42, 90) + steady(0.82, 60, seed=1)
    assert "bimodal" in kinds([check_read(write_run(tmp_path / "a", seconds))])


def test_other_programs_are_seen_and_a_quiet_machine_raises_no_doubt(tmp_path: Path) -> None:
    quiet, busy = (check_read(write_run(tmp_path / str(others), steady(0.1), others=others)) for others in (0.1, 1.5))
    assert quiet.disturbed is None
    assert busy.disturbed == "other processes used 1.5 of 4 cores"
    assert [warning.text for warning in check_run(quiet) if warning.kind == "disturbed"] == []
    [text] = [warning.text for warning in check_run(busy) if warning.kind == "disturbed"]
    assert text.startswith(
        "other processes used 1.5 of 4 cores while it trained (its ranks were preempted 3 times per second"
    )


def test_a_drift_is_seen(tmp_path: Path) -> None:
    seconds = [value * (1 + i / 200) for i, value in enumerate(steady(0.1, 200))]
    assert "drift" in kinds([check_read(write_run(tmp_path / "a", seconds))])


def test_epochs_that_take_longer_than_the_run_are_seen(tmp_path: Path) -> None:
    assert "sum" in kinds([check_read(write_run(tmp_path / "a", steady(0.1), total_seconds=5.0))])


def test_more_processes_than_cores_are_seen(tmp_path: Path) -> None:
    assert "oversubscribed" in kinds([check_read(write_run(tmp_path / "a", steady(0.1), workers=4, cores=2))])


def test_emulation_is_told(tmp_path: Path) -> None:
    run = check_read(write_run(tmp_path / "a", steady(0.1), workers=4, cores=2, compute=None, train_loss=[]))
    run.summary.compute = "emulated:k80"
    assert "emulated" in kinds([run])
    assert "oversubscribed" not in kinds([run])


def test_a_lab_that_was_too_slow_is_told(tmp_path: Path) -> None:
    lab = {"nodes": [], "flags": ["n1: 10 Gbit/s is out of reach"]}
    assert "lab" in kinds([check_read(write_run(tmp_path / "a", steady(0.1), lab=lab))])


def test_too_few_repeats_and_repeats_that_differ_are_seen(tmp_path: Path) -> None:
    assert "repeats" in kinds(three(tmp_path / "x", 0.1)[:2])
    apart = [check_read(write_run(tmp_path / f"{i}", steady(mean), seed=i)) for i, mean in enumerate((0.1, 0.13, 0.16))]
    assert "spread" in kinds(apart)


def test_a_baseline_that_flatters_is_seen(tmp_path: Path) -> None:
    one = three(tmp_path, 0.1, threads=1, cores=8)
    four = three(tmp_path, 0.02, workers=4, batch=8, threads=1, cores=8)
    assert {"baseline", "superlinear"} <= kinds(one + four)


PAPER = {1: 142.04, 2: 82.06, 4: 34.40, 8: 20.52}  # seconds per epoch of 60,000 images, by processes on one node


@pytest.mark.parametrize("spread", [0.001, 0.2])
def test_the_first_paper_s_impossible_speedups_are_seen(tmp_path: Path, spread: float) -> None:
    """4 processes are 4.13 times as fast as one and 2.39 times as fast as 2, whatever the intervals."""
    runs = [check_read(write_run(tmp_path / str(n), steady(seconds * n / 469, seed=n, spread=spread), workers=n,
                                 batch=128)) for n, seconds in PAPER.items()]  # fmt: skip
    groups = group(runs)
    found = {warning.kind: warning for warning in all_warnings(groups, curves(groups, "weak"))}
    assert found["superlinear"].about.startswith("ring, 4 workers")
    assert "are inconsistent: 4 workers are 2." in found["efficiency"].text
    if spread < 0.01:
        assert "4.13 times as fast as one worker" in found["superlinear"].text
        assert "efficiencies of 0.87, 1.03, 0.87 with 2, 4, 8 workers" in found["efficiency"].text
        assert "4 workers are 2.39 times as fast as 2" in found["efficiency"].text


@pytest.mark.parametrize("batches", [(16, 8), (16, 16)], ids=["strong", "weak"])
def test_neighbours_are_compared_without_one_worker_too(tmp_path: Path, batches: tuple[int, int]) -> None:
    """4 workers are 2.39 times as fast as 2, in samples per second."""
    for gain, found in ((2.39, True), (1.9, False)):
        times = (0.1, 0.1 / gain * 4 * batches[1] / (2 * batches[0]))
        runs = [run for n, batch, mean in zip((2, 4), batches, times, strict=True)
                for run in three(tmp_path / str(gain), mean, workers=n, batch=batch)]  # fmt: skip
        texts = [warning.text for warning in all_warnings(group(runs), []) if warning.kind == "efficiency"]
        assert bool(texts) == found
        assert not found or texts[0].startswith("4 workers are 2.39 times as fast as 2, more than")


def test_linear_speedups_and_falling_efficiencies_raise_no_doubt(tmp_path: Path) -> None:
    for name, times in {"linear": (0.1, 0.05, 0.025), "falling": (0.1, 0.055, 0.035)}.items():
        runs = [run for n, mean in zip((1, 2, 4), times, strict=True)
                for run in three(tmp_path / name, mean, workers=n, batch=32 // n)]  # fmt: skip
        assert not {"superlinear", "efficiency"} & kinds(runs)


def test_runs_that_are_too_short_are_told(tmp_path: Path) -> None:
    few = check_read(write_run(tmp_path / "few", steady(0.1, 15)))
    walk = list(0.1 * np.exp(np.cumsum(np.random.default_rng(0).normal(0, 0.01, 200))))
    alike = check_read(write_run(tmp_path / "alike", walk))
    texts = [
        warning.text for run in (few, alike) for warning in all_warnings(group([run]), []) if warning.kind == "short"
    ]
    assert texts[0].startswith("15 steps after warm-up: too short to rank")
    assert "independent ones because of autocorrelation" in texts[1]


def pair(folder: Path, losses: tuple[float, float], first: dict[str, Any], second: dict[str, Any]) -> set[str]:
    """One worker and two, of one global batch; specs as runs write them, which have no dropout unless it was given."""
    runs = [check_read(write_run(folder / "a", steady(0.1), train_loss=[losses[0], 0.4], spec=first))]
    runs.append(check_read(write_run(folder / "b", steady(0.06), workers=2, batch=16, train_loss=[losses[1], 0.1],
                                     spec=second)))  # fmt: skip
    return kinds(runs)


ALIKE: list[dict[str, Any]] = [
    {"model": "mlp"},
    {"model": "shallow-cnn"},
    {"model": "mnist-cnn", "dropout": 0.0},
    {"model": "resnet18", "sync_batchnorm": True},
]


@pytest.mark.parametrize("spec", ALIKE)
def test_replicas_that_differ_are_seen(tmp_path: Path, spec: dict[str, Any]) -> None:
    assert "differ" in pair(tmp_path / "x", (0.5, 0.9), spec, spec)
    assert "differ" not in pair(tmp_path / "y", (0.5, 0.505), spec, spec)


@pytest.mark.parametrize("spec", [{"model": "mnist-cnn"}, {"model": "resnet18"}, {"model": "own:net"},
                                  {"model": "mlp", "dropout": 0.2}])  # fmt: skip
def test_models_that_learn_by_how_batches_are_divided_are_left_out(tmp_path: Path, spec: dict[str, Any]) -> None:
    assert "differ" not in pair(tmp_path, (0.5, 0.9), spec, spec)


@pytest.mark.parametrize("other", [{"scale_lr": True}, {"lr": 0.02}, {"momentum": 0.5}, {"validation": 0.1},
                                   {"augment": "crop"}, {"decay": "none"}, {"weight_decay": 0.1}])  # fmt: skip
def test_other_trainings_may_learn_something_else(tmp_path: Path, other: dict[str, Any]) -> None:
    assert "differ" not in pair(tmp_path, (0.5, 0.9), {}, other)


def test_a_rate_that_was_scaled_is_compared_as_it_was(tmp_path: Path) -> None:
    scaled = {"scale_lr": True, "warmup_epochs": 0.0}
    assert "differ" in pair(tmp_path, (0.5, 0.9), scaled | {"lr": 0.02}, scaled | {"lr": 0.01})


def test_a_warm_up_is_compared_where_there_is_one(tmp_path: Path) -> None:
    one, two = {"warmup_steps": 10}, {"warmup_steps": 20}
    assert "differ" in pair(tmp_path / "same", (0.5, 0.9), one, one)
    assert "differ" not in pair(tmp_path / "other", (0.5, 0.9), one, two)
    assert "differ" in pair(tmp_path / "none", (0.5, 0.9), {"warmup_steps": 0}, {"warmup_epochs": 0.0})


def test_several_machines_are_told_and_are_no_repeats(tmp_path: Path) -> None:
    runs = [check_read(write_run(tmp_path / f"{i}", steady(0.1), seed=i, machine={"processor": name, "torch": "2.1"}))
            for i, name in enumerate(("slow", "fast", "fast"))]  # fmt: skip
    groups = group(runs)
    assert [len(one.runs) for one in groups] == [1, 2]
    [found] = [warning for warning in all_warnings(groups, []) if warning.kind == "mixed"]
    assert "2 machines or versions: slow (1 run) and fast (2 runs)" in found.text
    assert "mixed" not in kinds(runs[1:])


def test_doubts_name_their_setting(tmp_path: Path) -> None:
    places = (["a", "a"], ["a", "b"])
    groups = group(check_read(write_run(tmp_path / f"{i}", steady(0.1), workers=2, hosts=where))
                   for i, where in enumerate(places))  # fmt: skip
    found = {warning.about for warning in all_warnings(groups, []) if warning.kind == "repeats"}
    assert found == {"ring, 2 workers, 1 node", "ring, 2 workers, 2 nodes"}
    alone = check_read(write_run(tmp_path / "alone", steady(0.1), threads=4, cores=1))
    [crowded] = [warning for warning in check_run(alone) if warning.kind == "oversubscribed"]
    assert crowded.text.startswith("1 worker with 4 threads has 1 core:")

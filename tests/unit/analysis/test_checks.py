"""Every doubt is found in a made-up run that has its fault, and none in runs without."""

from __future__ import annotations

from pathlib import Path

from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.checks import all_doubts
from paceline.analysis.runs import Run
from paceline.analysis.scaling import curves, group


def kinds(runs: list[Run]) -> set[str]:
    groups = group(runs)
    found = [*curves(groups, "strong"), *curves(groups, "weak")]
    return {doubt.kind for doubt in all_doubts(groups, found)}


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
    assert "two-humped" in kinds([check_read(write_run(tmp_path / "a", seconds))])


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


def test_replicas_that_differ_are_seen(tmp_path: Path) -> None:
    runs = [check_read(write_run(tmp_path / "a", steady(0.1), train_loss=[0.5]))]
    runs.append(check_read(write_run(tmp_path / "b", steady(0.06), workers=2, batch=16, train_loss=[0.9])))
    assert "differ" in kinds(runs)

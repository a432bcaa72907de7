"""What runs learned, and when, on runs with known answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import write_run
from test_runs import check_read

from paceline.analysis.learning import ACCURACY, LOSS, losses, measure_of, moments, perplexity, seen, target, time_to
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group, group
from paceline.analysis.study import read_study
from paceline.report.charts_learning import result
from paceline.report.draw import draw


def learned(folder: Path, accuracies: list[float], *, seconds: float = 0.1, validated: bool = True,
            **options: Any) -> Run:  # fmt: skip
    """Ten steps an epoch, each of the same time."""
    values: dict[str, Any] = {"train_accuracy": accuracies, "train_loss": [1 - a for a in accuracies],
              "validation_accuracy": [a - 0.01 for a in accuracies] if validated else [],
              "validation_loss": [1.1 - a for a in accuracies] if validated else []}  # fmt: skip
    return check_read(write_run(folder, [seconds] * 10 * len(accuracies), per_epoch=10, **values, **options))


def groups_of(*runs: Run) -> list[Group]:
    return group(runs)


def test_moments_are_ends_of_epochs(tmp_path: Path) -> None:
    found = moments(learned(tmp_path / "a", [0.5, 0.8], workers=2))
    assert [m.epoch for m in found] == [0, 1]
    assert [m.seconds for m in found] == pytest.approx([1.0, 2.0])
    assert [m.samples for m in found] == [640, 1280]
    assert (found[1].train_accuracy, found[1].validation_accuracy) == pytest.approx((0.8, 0.79))
    assert moments(learned(tmp_path / "b", [0.5], validated=False))[0].validation_accuracy is None


def test_validations_within_epochs_are_moments_too(tmp_path: Path) -> None:
    """Two epochs of ten steps, the second one slower; validated every six steps and at the end."""
    found: dict[str, Any] = {
        "train_loss": [2.0, 1.0],
        "train_accuracy": [0.5, 0.7],
        "validation_steps": [6, 12, 18, 20],
        "validation_loss": [2.5, 1.5, 1.2, 1.4],
        "validation_accuracy": [0.4, 0.6, 0.8, 0.7],
        "best_step": 18,
        "best_epoch": 1,
    }
    folder = write_run(tmp_path / "a", [0.1] * 10 + [0.2] * 10, per_epoch=10, spec={"evaluate_every": 6}, **found)
    run = check_read(folder)
    made = moments(run)
    assert [m.samples // 32 for m in made] == [6, 10, 12, 18, 20]
    assert [m.seconds for m in made] == pytest.approx([0.6, 1.0, 1.4, 2.6, 3.0])
    assert [m.epoch for m in made] == [0, 0, 1, 1, 1]
    assert [m.train_loss for m in made] == [None, 2.0, None, None, 1.0]
    assert [m.validation_accuracy for m in made] == [0.4, None, 0.6, 0.8, 0.7]
    assert run.summary.best_validation == 2
    assert [result(run, of, "loss") for of in ("validation", "training")] == [1.2, 1.0]
    (reached,) = time_to(groups_of(run), 0.6)
    assert reached.seconds
    assert reached.seconds.value == pytest.approx(1.4)
    (curves,) = [chart for chart in draw(read_study([tmp_path])) if chart.name == "learning-samples"]
    assert curves.caption.startswith("Accuracy (validation) at each validation")
    points = [list(trace["x"]) for trace in curves.figure["data"] if "hovertext" in trace]
    assert points == [[32 * step for step in (6, 12, 18, 20)]]


def test_what_was_not_trained_has_no_moments(tmp_path: Path) -> None:
    run = check_read(write_run(tmp_path / "a", [0.1] * 10))
    run.summary.compute = "emulated:k80"
    assert moments(run) == []
    assert [len(part) for part in losses(run)] == [0, 0, 0]
    assert target(groups_of(run)) is None
    assert time_to(groups_of(run), 0.9) == []


def test_losses_of_every_step_of_a_short_run(tmp_path: Path) -> None:
    run = check_read(write_run(tmp_path / "a", [0.1] * 5, losses=[5.0, 4.0, 3.0, 2.0, 1.0], workers=2))
    seconds, samples, loss = losses(run)
    assert seconds == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.5])
    assert list(samples) == [64, 128, 192, 256, 320]
    assert list(loss) == [5, 4, 3, 2, 1]


def test_losses_of_a_long_run_are_means_that_end_where_it_ends(tmp_path: Path) -> None:
    values = list(np.linspace(3, 1, 1000))
    seconds, samples, loss = losses(check_read(write_run(tmp_path / "a", [0.1] * 1000, losses=values)))
    assert len(seconds) == len(samples) == len(loss) == 400
    assert seconds[-1] == pytest.approx(100.0)
    assert samples[-1] == 32_000
    assert loss.mean() == pytest.approx(2.0, abs=0.01)
    assert (np.diff(loss) < 0).all()


def test_the_leading_server_knows_the_loss_of_whole_updates(tmp_path: Path) -> None:
    run = check_read(write_run(tmp_path / "a", [0.1] * 4, workers=3, servers=2, losses=[4.0, 3.0, 2.0, 1.0]))
    assert list(losses(run)[1]) == [96, 192, 288, 384]


def test_the_target_is_round_and_reached_by_a_quarter_of_the_runs_or_two(tmp_path: Path) -> None:
    best = [0.992, 0.975, 0.961, 0.5]
    runs = [learned(tmp_path / str(i), [0.3, value], batch=2**i) for i, value in enumerate(best)]
    assert target(groups_of(*runs)) == 0.95  # of validation: 0.982 and 0.965, of four
    assert target(groups_of(*runs[:1])) == 0.98
    assert target(groups_of(learned(tmp_path / "none", [0.05], batch=99))) is None


def test_time_to_accuracy_is_the_first_epoch_s_end(tmp_path: Path) -> None:
    fast = [learned(tmp_path / f"f{i}", [0.5, 0.92, 0.9], seconds=0.1 + i / 100, seed=i) for i in range(3)]
    slow = [learned(tmp_path / f"s{i}", [0.5, 0.6, 0.95], seed=i, batch=64) for i in range(3)]
    found = time_to(groups_of(*fast, *slow), 0.9)
    assert [each.of for each in found] == ["validation", "validation"]
    assert [each.seconds and each.seconds.value for each in found] == pytest.approx([2.2, 3.0])
    assert found[0].seconds is not None
    assert (found[0].seconds.low, found[0].seconds.high) == pytest.approx((2.0, 2.4))


def test_what_most_repeats_never_reach_has_no_time(tmp_path: Path) -> None:
    last = (0.95, 0.5, 0.5)
    runs = [learned(tmp_path / str(i), [0.3, value], seed=i) for i, value in enumerate(last)]
    [found] = time_to(groups_of(*runs), 0.9)
    assert (found.seconds, found.reached, found.runs) == (None, 1, 3)
    [most] = time_to(groups_of(*runs[:1], learned(tmp_path / "b", [0.95], seed=8), runs[1]), 0.9)
    assert most.seconds is not None
    assert most.seconds.value == pytest.approx(2.0)
    assert (most.reached, most.runs) == (2, 3)


def test_settings_without_validation_are_compared_by_training(tmp_path: Path) -> None:
    runs = [learned(tmp_path / "a", [0.9]), learned(tmp_path / "b", [0.9], validated=False, batch=64)]
    assert {each.of for each in time_to(groups_of(*runs), 0.9)} == {"training"}
    assert all(each.seconds for each in time_to(groups_of(*runs), 0.9))


def test_a_run_that_was_cut_short_in_its_first_epoch_has_no_epochs_end(tmp_path: Path) -> None:
    values: dict[str, Any] = {"train_accuracy": [0.2], "train_loss": [2.0]}
    run = check_read(write_run(tmp_path / "a", [0.1] * 8, spec={"steps": 8}, **values))
    assert moments(run) == []
    assert len(moments(check_read(write_run(tmp_path / "b", [0.1] * 8, **values)))) == 1


def test_samples_that_a_run_saw_are_those_of_all_workers(tmp_path: Path) -> None:
    assert seen(learned(tmp_path / "a", [0.5, 0.8], workers=2)) == 20 * 64
    served = check_read(write_run(tmp_path / "b", [0.1] * 10, workers=3, servers=1, strategy="ps-async"))
    assert seen(served) == 10 * 32  # each update is of one worker's batch


def spoken(folder: Path, losses: list[float], *, validated: bool = True, **options: Any) -> Run:
    """A language model: ten steps an epoch, no accuracy."""
    values: dict[str, Any] = {"task": "language-model", "train_loss": losses,
                              "validation_loss": [loss + 0.01 for loss in losses] if validated else []}  # fmt: skip
    return check_read(write_run(folder, [0.1] * 10 * len(losses), per_epoch=10, **values, **options))


def test_classifiers_are_compared_by_accuracy_and_everything_else_by_loss(tmp_path: Path) -> None:
    [one] = groups_of(learned(tmp_path / "a", [0.9]))
    [two] = groups_of(spoken(tmp_path / "b", [2.0]))
    assert (measure_of(one), measure_of(two)) == (ACCURACY, LOSS)
    assert perplexity(two.first, 2.0) == pytest.approx(np.exp(2))
    assert perplexity(one.first, 2.0) is None
    assert [m.train_accuracy for m in moments(two.first)] == [None]
    unknown = check_read(write_run(tmp_path / "c", [0.1] * 10))  # a classifier whose accuracy was not recorded
    assert moments(unknown) == []


def test_a_target_loss_is_round_and_reached_by_a_quarter_of_the_runs_or_two(tmp_path: Path) -> None:
    best = [1.41, 1.72, 2.9, 3.0]
    runs = [spoken(tmp_path / str(i), [4.0, value], batch=2**i) for i, value in enumerate(best)]
    assert target(groups_of(*runs)) == 1.8  # of validation: 1.42 and 1.73, of four
    assert target(groups_of(*runs[:1])) == 1.5
    assert target(groups_of(spoken(tmp_path / "small", [0.0123], validated=False, batch=99))) == 0.013
    assert target(groups_of(spoken(tmp_path / "even", [2.0], validated=False, batch=99))) == 2.0
    assert target(groups_of(spoken(tmp_path / "none", [-1.0], validated=False, batch=98))) is None


def test_time_to_a_loss_is_the_end_of_the_first_epoch_with_it_or_less(tmp_path: Path) -> None:
    runs = [spoken(tmp_path / "a", [3.0, 1.99, 1.5], batch=32), spoken(tmp_path / "b", [3.0, 2.5, 2.1], batch=64)]
    first, second = time_to(groups_of(*runs), 2.0)
    assert first.seconds is not None
    assert first.of == "validation"
    assert first.seconds.value == pytest.approx(2.0)
    assert (second.seconds, second.reached) == (None, 0)

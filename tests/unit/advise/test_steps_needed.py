"""Steps to a loss with other batches: made-up points, and SGD on a quadratic problem whose answer theory gives."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from paceline.advise.noise_scale import NoiseScale, Unknown
from paceline.advise.steps_needed import (
    Reached,
    StepsLaw,
    branch_points,
    fit_steps,
    learning_rate,
    smoothed,
    steps_to,
)
from paceline.analysis.runs import Run
from paceline.predict.ranges import Range
from paceline.predict.steps import Array
from paceline.run.records import Step

BATCHES = (8, 32, 128)


def a_run(batch: int, losses: Array) -> Run:
    """The fields that are read."""
    steps = [Step(number, 0, 1.0, 0.1, batch, {}, loss=float(loss)) for number, loss in enumerate(losses)]
    return cast(Run, SimpleNamespace(steps={0: steps}))


def descent(batch: int, noise_scale: float, seed: int) -> Run:
    """SGD on ½|x|², whose gradient |x| has noise of |x|²·noise_scale/batch: the best rate is 1/(1 + noise_scale/batch),
    and with a tenth of it the law is exact, up to half a step for each time that the loss falls to 1/e. The losses that
    are seen are means over the batch.
    """
    dice, x, losses = np.random.default_rng(seed), np.ones(400), []
    rate = 0.1 / (1 + noise_scale / batch)
    while x @ x > 400 * 0.05:
        losses.append(x @ x / 2 * (1 + 0.5 * dice.standard_normal() / np.sqrt(batch)))
        x = x - rate * (x + np.sqrt((x @ x) * noise_scale / batch / len(x)) * dice.standard_normal(len(x)))
    return a_run(batch, np.array(losses))


def lawful(critical: float, batches: tuple[int, ...] = BATCHES, noise: float = 0.0, seed: int = 0) -> list[Reached]:
    """What runs would need if each deviated from the law by so much."""
    errors = np.exp(noise * np.random.default_rng(seed).standard_normal(len(batches)))
    return [Reached(batch, loss, least * (1 + critical / batch) * error)
            for batch, error in zip(batches, errors, strict=True)
            for loss, least in [(1.0, 40.0), (0.5, 90.0)]]  # fmt: skip


def a_scale(value: float) -> NoiseScale:
    return NoiseScale(Range(value, value / 1.2, value * 1.2), 1.0, 1.0, 100, 100)


def fitted(points: list[Reached] | Unknown, prior: NoiseScale | None = None) -> StepsLaw:
    law = fit_steps(points, prior)
    assert isinstance(law, StepsLaw)
    return law


@pytest.mark.parametrize("noise_scale", [10.0, 60.0, 300.0])
def test_descent_on_a_quadratic_problem_has_the_critical_batch_of_theory(noise_scale: float) -> None:
    covered, values = [], []
    for seed in range(10):
        points = branch_points([descent(batch, noise_scale, seed) for batch in BATCHES])
        found = fitted(points).critical_batch
        values.append(found.value)
        covered.append(found.low <= noise_scale <= found.high)
    assert np.mean(covered) >= 0.8
    assert np.median(values) == pytest.approx(noise_scale, rel=0.25)


def test_steps_with_an_unseen_batch_are_predicted() -> None:
    runs = {batch: descent(batch, 60.0, 1) for batch in (*BATCHES, 512)}
    law = fitted(branch_points([runs[batch] for batch in BATCHES]))
    predicted = Range.of(law.ratio(512, 8) * len(runs[8].steps[0]))
    assert predicted.value == pytest.approx(len(runs[512].steps[0]), rel=0.1)
    assert predicted.low < len(runs[512].steps[0]) < predicted.high


@pytest.mark.parametrize("critical", [5.0, 50.0, 500.0])
def test_made_up_points_are_found_again(critical: float) -> None:
    assert fitted(lawful(critical)).critical_batch.value == pytest.approx(critical, rel=0.3)
    found = [fitted(lawful(critical, noise=0.05, seed=seed)).critical_batch for seed in range(100)]
    assert np.mean([each.low <= critical <= each.high for each in found]) >= 0.84


def test_the_first_draw_is_the_most_likely_value_and_the_same_batch_needs_the_same_steps() -> None:
    law = fitted(lawful(50.0))
    critical = law.critical_batch.value
    drawn = law.ratio(128, 8)
    assert drawn.shape == (1000,)
    assert drawn[0] == pytest.approx((1 + critical / 128) / (1 + critical / 8))
    assert (law.ratio(8, 8) == 1).all()


def test_many_losses_of_the_same_runs_are_not_more_certain_than_few() -> None:
    few, many = lawful(50.0), [Reached(p.batch, p.loss / k, p.steps * k) for p in lawful(50.0) for k in (1, 3, 9)]
    narrow, wide = (fitted(points).critical_batch for points in (many, few))
    assert narrow.high / narrow.low == pytest.approx(wide.high / wide.low, rel=0.05)


def test_more_runs_are_more_certain() -> None:
    one, three = (fitted(lawful(50.0) * count).critical_batch for count in (1, 3))
    assert three.high / three.low < 0.8 * one.high / one.low


def test_norms_alone_give_a_wide_range_around_them() -> None:
    found = fitted([], a_scale(40.0)).critical_batch
    assert found.value == pytest.approx(40.0, rel=0.02)
    assert found.high / found.low > 5


def test_runs_count_more_than_norms_that_contradict_them() -> None:
    alone, both = (fitted(lawful(50.0), prior).critical_batch for prior in (None, a_scale(200.0)))
    assert alone.value < both.value < 100
    assert both.low < 50 < both.high


def test_a_training_that_is_longer_than_its_branches_has_a_larger_critical_batch_that_is_less_certain() -> None:
    short, long = (fit_steps(lawful(50.0), steps=steps) for steps in (None, 4 * 90 * (1 + 50 / 8)))
    assert isinstance(short, StepsLaw)
    assert isinstance(long, StepsLaw)
    near, far = short.critical_batch, long.critical_batch
    assert far.value == pytest.approx(2 * near.value, rel=0.15)
    assert far.high / far.low > 1.1 * near.high / near.low


def test_norms_of_the_first_part_of_a_training_are_extrapolated() -> None:
    law = fit_steps([], a_scale(40.0), steps=400)  # the norms are of 100 steps
    assert isinstance(law, StepsLaw)
    assert law.critical_batch.value == pytest.approx(80.0, rel=0.05)


def test_one_batch_and_no_norms_tell_nothing() -> None:
    one = [Reached(8, 1.0, 40.0)]
    assert fit_steps(one) == Unknown("only one global batch was trained, and no gradient norms were recorded")
    assert fit_steps(one, Unknown("norms are few")) == Unknown("only one global batch was trained, and norms are few")


def test_losses_that_do_not_fall_tell_nothing() -> None:
    dice = np.random.default_rng(0)
    points = branch_points([a_run(batch, 2.3 + 0.01 * dice.standard_normal(200)) for batch in BATCHES])
    assert isinstance(points, Unknown)
    law = fit_steps(points)
    assert isinstance(law, Unknown)
    assert law.why.startswith("losses have not fallen enough")


def test_runs_without_losses_tell_nothing() -> None:
    assert isinstance(branch_points([]), Unknown)
    assert isinstance(branch_points([a_run(8, np.empty(0))]), Unknown)


def test_points_are_of_losses_that_all_runs_reached() -> None:
    time = np.arange(1, 401)
    points = branch_points([a_run(8, 2 / time**0.3), a_run(32, 2 / (3 * time[:100]) ** 0.3)])
    assert not isinstance(points, Unknown)
    assert min(point.loss for point in points) == pytest.approx(2 / 300**0.3, rel=0.01)
    assert {point.batch for point in points} == {8, 32}
    by_loss = {point.loss: point.steps for point in points if point.batch == 8}
    ratios = [by_loss[point.loss] / point.steps for point in points if point.batch == 32]
    assert ratios == pytest.approx([3.0] * len(ratios), rel=0.02)


def test_smoothing_neither_delays_a_falling_loss_nor_bends_its_end() -> None:
    straight = 3 - 0.4 * np.log(np.arange(300) + 0.5)
    assert smoothed(straight) == pytest.approx(straight, abs=1e-6)


def test_noise_does_not_make_a_loss_seem_to_be_reached_earlier() -> None:
    clean = 2 / np.arange(1, 2001) ** 0.3
    found = [float(steps_to(smoothed(clean + 0.3 * np.random.default_rng(seed).standard_normal(2000)), clean[1200]))
             for seed in range(300)]  # fmt: skip
    assert float(steps_to(smoothed(clean), clean[1200])) == pytest.approx(1200, rel=0.01)
    assert np.exp(np.mean(np.log(found))) == pytest.approx(1200, rel=0.04)


def test_rates_grow_as_steps_become_fewer_and_with_adam_by_the_square_root() -> None:
    law = StepsLaw(np.full(1000, 56.0), np.zeros(1000))
    assert learning_rate("sgd", 0.1, 8, 56, law) == pytest.approx(0.1 * 8 / 2)
    assert learning_rate("adamw", 0.1, 8, 56, law) == pytest.approx(0.1 * 2)
    assert learning_rate("sgd", 0.1, 8, 1e9, law) == pytest.approx(0.8)


def test_rates_are_scaled_with_the_batch_if_the_law_is_unknown() -> None:
    assert learning_rate("sgd", 0.1, 8, 32, Unknown("")) == pytest.approx(0.4)
    assert learning_rate("adam", 0.1, 8, 32, Unknown("")) == pytest.approx(0.2)

"""Statistics on series with known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.analysis.statistics import (
    amdahl,
    bimodal,
    drift,
    gustafson,
    median,
    ratio,
    warm_up,
)


def noisy(mean: float, count: int, seed: int = 0, spread: float = 0.05) -> np.ndarray:
    return mean * np.random.default_rng(seed).lognormal(0, spread, count)


def test_the_slow_first_steps_are_warm_up_and_a_late_slow_one_is_not() -> None:
    steps = np.concatenate([noisy(0.5, 12), noisy(0.1, 200)])
    assert 11 <= warm_up(list(steps)) <= 14
    steps[150] = 2.0
    assert 11 <= warm_up(list(steps)) <= 14


def test_a_steady_series_has_next_to_no_warm_up() -> None:
    assert np.mean([warm_up(list(noisy(0.1, 200, seed))) for seed in range(20)]) < 20
    assert warm_up([0.1] * 50) == 0
    assert warm_up([5.0, 0.1]) == 0


def test_warm_up_is_never_more_than_half() -> None:
    assert warm_up(list(np.linspace(2, 1, 100))) <= 50


@given(st.lists(st.floats(1e-300, 1e300), min_size=1, max_size=12), st.lists(st.floats(1e-3, 10), min_size=1))
def test_intervals_are_finite_and_around_their_value_whatever_the_steps(one: list[float], two: list[float]) -> None:
    x, y = np.array(one), np.array(two)
    for found in (median([x]), median([y]), median([x, y]), ratio([y], [y]), ratio([x, x], [y])):
        assert 0 < found.low <= found.value <= found.high < np.inf


def test_more_runs_that_differ_widen_the_interval() -> None:
    alike = median([noisy(0.1, 100, seed) for seed in range(4)])
    apart = median([noisy(mean, 100, seed) for seed, mean in enumerate((0.08, 0.1, 0.12, 0.14))])
    assert apart.high - apart.low > 3 * (alike.high - alike.low)


def runs_of(count: int, rng: np.random.Generator) -> list[np.ndarray]:
    """Of one setting: 5 % from run to run, 3 % within each."""
    return [0.1 * np.exp(rng.normal(0, 0.05)) * rng.lognormal(0, 0.03, 60) for _ in range(count)]


@pytest.mark.parametrize("counts", [(2, 2), (3, 3), (5, 5), (2, 5), (1, 3)])
def test_equal_settings_are_seldom_told_apart(counts: tuple[int, int]) -> None:
    rng = np.random.default_rng(sum(counts))
    wrong = [ratio(*(runs_of(count, rng) for count in counts)).excludes(1.0) for _ in range(150)]
    assert np.mean(wrong) <= 0.08


def test_runs_that_are_alike_by_luck_are_as_uncertain_as_their_steps() -> None:
    x = noisy(0.1, 40, spread=0.3)
    assert median([x, x, x]).half_width > 0.05
    assert ratio([x, x], [x]).half_width > 0.05


def test_a_ratio_upside_down_is_the_same() -> None:
    a, b = [noisy(0.1, 50, seed) for seed in range(3)], [noisy(0.3, 50, seed) for seed in range(5, 9)]
    one, other = ratio(a, b), ratio(b, a)
    assert (one.value, one.low, one.high) == pytest.approx((1 / other.value, 1 / other.high, 1 / other.low))


def test_a_ratio_is_real_only_if_its_interval_says_so() -> None:
    a, b = [noisy(0.1, 200, 1)], [noisy(0.2, 200, 2)]
    half = ratio(a, b)
    assert half.value == pytest.approx(0.5, rel=0.03)
    assert half.excludes(1.0)
    assert not ratio(a, [noisy(0.1, 200, 3)]).excludes(1.0)


def test_a_drift_is_how_much_slower_the_last_third_is() -> None:
    rising = noisy(0.1, 300) * np.linspace(1, 1.5, 300)
    assert drift(rising) == pytest.approx(0.31, abs=0.05)
    assert drift(noisy(0.1, 10)) == 0


def test_two_humps_are_found_and_one_is_not() -> None:
    mixed = np.random.default_rng(0).permutation(np.concatenate([noisy(0.1, 140), noisy(0.2, 60, 1)]))
    humps = bimodal(mixed)
    assert humps is not None
    assert (humps.fast, humps.slow, humps.part_slow) == pytest.approx((0.1, 0.2, 0.3), rel=0.05)
    for seed in range(20):
        assert bimodal(noisy(0.1, 200, seed, 0.3)) is None
        assert bimodal(np.random.default_rng(seed).uniform(0.1, 0.2, 200)) is None
    few_late = np.concatenate([noisy(0.1, 195), noisy(0.5, 5)])
    assert bimodal(few_late) is None


@given(st.floats(0, 1))
def test_amdahl_finds_the_serial_part(serial: float) -> None:
    workers = [1, 2, 4, 8]
    times = [3.0 * (serial + (1 - serial) / n) for n in workers]
    assert amdahl(workers, times) == pytest.approx(serial, abs=1e-9)


@given(st.floats(0, 1))
def test_gustafson_finds_the_serial_part(serial: float) -> None:
    workers = [1, 2, 3, 6]
    assert gustafson(workers, [n - serial * (n - 1) for n in workers]) == pytest.approx(serial, abs=1e-9)


def test_no_law_is_fitted_to_fewer_than_three_points_with_the_baseline() -> None:
    assert amdahl([2, 4, 8], [1.0, 0.5, 0.3]) is None
    assert amdahl([1, 2], [1.0, 0.6]) is None
    assert gustafson([1, 2], [1.0, 1.8]) is None

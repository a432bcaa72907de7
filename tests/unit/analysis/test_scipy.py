"""Our statistics beside SciPy's."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from scipy import linalg, optimize, stats

from paceline.analysis.statistics import (
    LAWS,
    Interval,
    Series,
    amdahl,
    effective_samples,
    gustafson,
    median,
    middle,
    ratio,
    t_quantile,
    warm_up,
    welch,
)


def runs(count: int, mean: float, seed: int, spread: float = 0.1) -> list[Series]:
    """Repeats that differ more than the steps within each of them."""
    rng = np.random.default_rng(seed)
    return [mean * np.exp(rng.normal(0, spread)) * rng.lognormal(0, 0.02, 80) for _ in range(count)]


def logs(series: Sequence[Series]) -> Series:
    return np.log([np.median(x) for x in series])


def check_same(found: Interval, low: float, high: float) -> None:
    assert (found.low, found.high) == pytest.approx((np.exp(low), np.exp(high)), rel=1e-9)


@pytest.mark.parametrize("count", [3, 4, 7])
def test_the_median_of_repeats_has_student_s_interval(count: int) -> None:
    series = runs(count, 0.1, count)
    check_same(median(series), *stats.ttest_1samp(logs(series), 0).confidence_interval(0.95))
    assert middle(series) == pytest.approx(np.exp(np.median(logs(series))))


@pytest.mark.parametrize("counts", [(3, 3), (3, 5), (6, 4)])
def test_the_ratio_of_repeats_has_welch_s_interval(counts: tuple[int, int]) -> None:
    top, bottom = runs(counts[0], 0.1, 1), runs(counts[1], 0.3, 2, 0.2)
    welch = stats.ttest_ind(logs(top), logs(bottom), equal_var=False).confidence_interval(0.95)
    check_same(ratio(top, bottom), *welch)


def test_quantiles_and_degrees_of_freedom_are_those_of_student_and_welch() -> None:
    freedom = np.array([1, 2.5, 7, 40, 1000])
    assert t_quantile(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-9)
    one, two = np.random.default_rng(0).normal(0, 1, 5), np.random.default_rng(1).normal(0, 3, 9)
    expected = stats.ttest_ind(one, two, equal_var=False).df
    assert welch(stats.sem(one) ** 2, 4, stats.sem(two) ** 2, 8) == pytest.approx(expected, rel=1e-12)
    assert welch(0.0, 4, 0.0, 8) == 12, "without any errors"


@pytest.mark.parametrize("count", [2, 3, 6])
def test_the_ratio_of_one_run_to_several_has_student_s_interval(count: int) -> None:
    """The single run is taken to differ from others as much as the several do: the t-test with a pooled variance."""
    one, many = runs(1, 0.1, 1), runs(count, 0.3, count)
    check_same(ratio(one, many), *stats.ttest_ind(logs(one), logs(many)).confidence_interval(0.95))
    check_same(ratio(many, one), *stats.ttest_ind(logs(many), logs(one)).confidence_interval(0.95))


def test_the_interval_of_one_run_is_that_of_its_sorted_steps_and_of_a_bootstrap() -> None:
    """Where steps are independent. SciPy's are exact (binomial) and resampled; ours has to estimate more."""
    rng, ours, exact, resampled = np.random.default_rng(0), list[float](), list[float](), list[float]()
    for _ in range(25):
        x = rng.lognormal(0, 0.2, 400)
        found = median([x])
        low, high = stats.quantile_test(x, p=0.5).confidence_interval(0.95)
        again = stats.bootstrap((x,), np.median, n_resamples=400, method="percentile", rng=rng).confidence_interval
        assert found.value == np.median(x)
        ours.append(found.high - found.low)
        exact.append(high - low)
        resampled.append(again.high - again.low)
    assert np.mean(ours) == pytest.approx(np.mean(exact), rel=0.1)
    assert np.mean(ours) == pytest.approx(np.mean(resampled), rel=0.1)


@pytest.mark.parametrize("rho", [0.0, 0.6, 0.9])
def test_effective_samples_are_those_of_the_best_autoregressive_model(rho: float) -> None:
    """Every order is solved by SciPy's Toeplitz solver, the spectrum at zero taken from the one with the least AICc."""
    rng, x = np.random.default_rng(0), np.zeros(500)
    for i in range(1, len(x)):
        x[i] = rho * x[i - 1] + rng.standard_normal()
    n, y = len(x), stats.mstats.winsorize(x, (0.1, 0.1)).data
    y = y - y.mean()
    correlations = np.array([y[: n - k] @ y[k:] for k in range(27)]) / (y @ y)
    models = [(0.0, 1.0)]
    for order in range(1, 27):
        weights = linalg.solve_toeplitz(correlations[:order], correlations[1 : order + 1])
        rest = 1 - weights @ correlations[1 : order + 1]
        models.append((n * np.log(rest) + 2 * order * n / (n - order - 2), rest / (1 - weights.sum()) ** 2))
    assert effective_samples(x) == pytest.approx(min(n, n / min(models)[1]), rel=0.02)


def test_warm_up_is_the_cut_with_the_smallest_standard_error() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        x = rng.lognormal(0, 0.05, 100) * (1 + np.exp(-np.arange(100) / rng.uniform(1, 20)))
        errors = [stats.sem(x[cut:], ddof=0) for cut in range(51)]
        assert warm_up(list(x)) == np.argmin(errors)


def fitted(law: Callable[[float, Series], Series], n: Series, speedups: Series) -> float:
    [serial], _ = optimize.curve_fit(lambda n, s: law(s, n), n, speedups, p0=[0.1], bounds=(0, 1), xtol=1e-12)
    return float(serial)


def test_laws_are_fitted_by_least_squares() -> None:
    """Amdahl's to times, Gustafson's to speedups."""
    rng, n = np.random.default_rng(0), np.array([1, 2, 4, 8, 16])
    for serial in (0.02, 0.2, 0.6):
        times = (serial + (1 - serial) / n) * np.r_[1.0, rng.normal(1, 0.05, 4)]
        found = amdahl(list(n), list(times))
        assert found == pytest.approx(fitted(lambda s, n: 1 / LAWS["strong"](s, n), n[1:], times[1:]), abs=1e-5)
        speedups = LAWS["weak"](serial, n) * np.r_[1.0, rng.normal(1, 0.05, 4)]
        assert gustafson(list(n), list(speedups)) == pytest.approx(fitted(LAWS["weak"], n[1:], speedups[1:]), abs=1e-5)

"""How often 95 % intervals contain the truth, by simulation: 4,000 series for each process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import signal

from paceline.analysis.statistics import (
    ENOUGH_SAMPLES,
    Medians,
    Repeats,
    Series,
    drift,
    effective_samples,
    median,
    ratio,
    warm_up,
)

SERIES = 4000
AT_ONCE = 2_000_000  # steps in memory
AUTOCORRELATIONS = (0.0, 0.5, 0.8, 0.9, 0.95)


def steps_for(effective: float, rho: float) -> int:
    """How many steps of an AR(1) process are worth so many independent ones."""
    return round(effective * (1 + rho) / (1 - rho))


def autoregressive(series: int, count: int, rho: float, rng: np.random.Generator) -> Series:
    """One stationary AR(1) process per row, of mean 0 and variance 1."""
    noise = rng.standard_normal((series, count))
    noise[:, 1:] *= np.sqrt(1 - rho**2)
    found: Series = signal.lfilter([1.0], [1.0, -rho], noise, axis=-1)
    return found


def without_warm_up(x: Series) -> Iterator[tuple[NDArray[np.intp], Series]]:
    """The numbers of those rows of which equally many steps are warm-up, and their other steps, as reports use them."""
    cuts = np.array([warm_up(row) for row in x])
    for cut in np.unique(cuts):
        yield np.flatnonzero(cuts == cut), x[cuts == cut, cut:]


def rolled(found: Any) -> Any:
    """Each row's neighbour in its place."""
    return replace(found, **{key: np.roll(value, 1, axis=0) for key, value in vars(found).items() if key != "runs"})


def holds(ends: tuple[Series, Series]) -> NDArray[np.bool_]:
    """Which intervals hold the true median, or ratio of medians, which is 1."""
    low, high = ends
    return (low <= 1) & (high >= 1)


def coverage(effective: float, rho: float, noise: str = "normal") -> tuple[float, float]:
    """Of the interval of one run and of the ratio of two, by the same path as in reports: without the steps that are
    taken for warm-up, and of those series only that are not too short by their own estimate.
    """
    rng, of_one, of_two = np.random.default_rng(0), list[bool](), list[bool]()
    steps = steps_for(effective, rho)
    at_once = min(SERIES, AT_ONCE // steps)
    for _ in range(-(-SERIES // at_once)):
        for _, x in without_warm_up(np.exp(NOISE[noise](autoregressive(at_once, steps, rho, rng), rng))):
            chosen = x[effective_samples(np.log(x)) >= ENOUGH_SAMPLES]
            if len(chosen) > 1:  # so that there are ratios, too
                found = Medians.of(chosen)
                of_one += list(holds(found.bounds()))
                of_two += list(holds(found.bounds_over(rolled(found))))
    assert len(of_one) > SERIES / 2
    return float(np.mean(of_one)), float(np.mean(of_two))


# Logarithms of step times with a median of 0, made from an AR(1) process and a source of independent noise.
NOISE = {
    "normal": lambda x, rng: 0.1 * x,
    "heavy tails": lambda x, rng: 0.1 * np.sinh(x),
    "skewed": lambda x, rng: 0.1 * (np.exp(x) - 1),
    "two states": lambda x, rng: 0.5 * np.sign(x) * (np.abs(x) > 0.2) + 0.02 * x,
    "late steps": lambda x, rng: 0.1 * x + np.sign(rng.uniform(-1, 1, x.shape)) * (rng.random(x.shape) < 0.1),
    "noisy clock": lambda x, rng: 0.05 * x + 0.05 * rng.standard_normal(x.shape),
}


@pytest.mark.parametrize(("effective", "rho"), [*product([100], AUTOCORRELATIONS), (300, 0.0), (300, 0.8)])
def test_intervals_of_runs_and_of_ratios_hold_the_truth_as_often_as_they_say(effective: int, rho: float) -> None:
    assert all(0.93 <= held <= 0.97 for held in coverage(effective, rho))


@pytest.mark.parametrize(("effective", "rho"), [*product([ENOUGH_SAMPLES, 50], AUTOCORRELATIONS)])
def test_intervals_of_shorter_runs_are_wide_enough(effective: int, rho: float) -> None:
    assert min(coverage(effective, rho)) >= 0.93


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("runs", [2, 3, 5])
def test_repeats_may_be_short_if_they_are_several(runs: int, rho: float) -> None:
    """Their interval comes from how much runs differ: 8 to 10 steps each are enough for it to hold the truth."""
    rng, shape = np.random.default_rng(runs), (SERIES, runs)
    logs, within, effective = np.empty(shape), np.empty(shape), np.empty(shape)
    for run in range(runs):
        x = 0.05 * autoregressive(SERIES, int(rng.integers(8, 11)), rho, rng)
        for rows, steps in without_warm_up(np.exp(x + 0.03 * rng.standard_normal((len(x), 1)))):
            logs[rows, run], within[rows, run] = np.log(np.median(steps, axis=-1)), Medians.of(steps).variances
            effective[rows, run] = effective_samples(np.log(steps))
    enough = effective.sum(-1) >= ENOUGH_SAMPLES  # two such runs are always too short
    for chosen in (np.full(SERIES, True), *([enough] if enough.any() else [])):
        found = Repeats.of(logs[chosen], within[chosen])
        of_one, of_two = holds(found.bounds()), holds(found.bounds_over(rolled(found)))
        assert len(of_one) > SERIES / 3
        assert min(of_one.mean(), of_two.mean()) >= 0.93


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.8])
def test_a_drift_is_found_and_a_steady_series_has_none(rho: float) -> None:
    """Of 20 effective samples in each third: false alarms, and steps that become 30 % slower."""
    x = autoregressive(400, steps_for(3 * ENOUGH_SAMPLES, rho), rho, np.random.default_rng(0))
    assert np.mean([drift(row) != 0 for row in np.exp(0.1 * x)]) <= 0.05
    assert np.mean([drift(row) > 0.1 for row in np.exp(0.05 * x) * np.linspace(1, 1.3, x.shape[-1])]) >= 0.95


@pytest.mark.parametrize("noise", [noise for noise in NOISE if noise != "normal"])
def test_no_distribution_of_steps_is_assumed(noise: str) -> None:
    assert all(0.93 <= held <= 0.97 for held in coverage(100, 0.5, noise))


def test_a_series_has_the_interval_that_it_has_among_others() -> None:
    x = np.exp(0.1 * autoregressive(3, 200, 0.5, np.random.default_rng(0)))
    rows, others = Medians.of(x), Medians.of(x[[1, 2, 0]])
    for i, series in enumerate(x):
        one, two = median([series]), ratio([series], [x[(i + 1) % 3]])
        assert (one.low, one.high) == pytest.approx([end[i] for end in rows.bounds()])
        assert (two.low, two.high) == pytest.approx([end[i] for end in rows.bounds_over(others)])
    logs = np.log(np.median(x, axis=-1))
    both = Repeats.of(np.stack([logs, logs[[1, 2, 0]]], -1), np.stack([rows.variances, others.variances], -1))
    for i in range(3):
        settings = [[x[(i + k) % 3], x[(i + k + 1) % 3]] for k in (0, 2)]
        one, two = median(settings[0]), ratio(*settings)
        assert (one.low, one.high) == pytest.approx([end[i] for end in both.bounds()])
        assert (two.low, two.high) == pytest.approx([end[i] for end in both.bounds_over(rolled(both))])


@pytest.mark.parametrize("rho", AUTOCORRELATIONS)
def test_the_effective_samples_of_an_autoregressive_process_are_known(rho: float) -> None:
    found = effective_samples(autoregressive(200, steps_for(100, rho), rho, np.random.default_rng(1)))
    assert np.median(found) == pytest.approx(100, rel=0.15)
    assert np.mean((found > 60) & (found < 200)) > 0.95


def test_outliers_and_two_states_do_not_hide_autocorrelation() -> None:
    rng = np.random.default_rng(0)
    x = np.exp(0.1 * autoregressive(1, 3900, 0.95, rng)[0])
    x[rng.random(len(x)) < 0.05] *= 20
    assert effective_samples(np.log(x)) < 250
    assert effective_samples(np.repeat([0.082, 0.142], 100)) < 20
    assert effective_samples(np.full(50, 0.1)) == 50
    assert effective_samples(np.array([0.1])) == 1

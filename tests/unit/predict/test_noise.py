"""Variation of compute times: measured, drawn, and what the slowest of many takes, beside SciPy's distributions."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

from paceline.predict.noise import Draws, Machines, block_bootstrap, measure

dice = np.random.default_rng(5)


def alike(workers: int, noise: float | None = None) -> Machines:
    return Machines((1.0,) * workers, (noise,) * workers)


@pytest.mark.parametrize("workers", [1, 4, 64, 10_240])
def test_the_slowest_of_many_with_known_noise_is_the_quantile_of_a_maximum(workers: int) -> None:
    """The median of the largest of n is the quantile 0.5^(1/n), by SciPy's normal distribution."""
    slowest = Draws(measure([np.zeros((20, 1))]), 2.0, alike(workers, 0.1), 1000, seed=1).slowest()
    sigma = np.sqrt(np.log1p(0.1**2))
    expected = 2 * np.exp(sigma * norm.ppf(0.5 ** (1 / workers)) - sigma**2 / 2)
    assert np.median(slowest) == pytest.approx(expected, rel=5e-3)


def test_variation_from_step_to_step_and_from_node_to_node_are_told_apart() -> None:
    nodes = np.array([-0.06, 0.0, 0.02, 0.05])
    noise = measure([dice.standard_normal((400, 4)) * 0.05 + nodes])
    assert noise.step == pytest.approx(0.05, rel=0.1)
    assert noise.node == pytest.approx(np.std(nodes, ddof=1), rel=0.15)
    assert noise.freedom == 3


def test_few_nodes_leave_open_how_slow_the_slowest_of_a_thousand_is() -> None:
    """With four nodes, the interval is many times wider than with forty, where the truth is the same."""

    def width(nodes: int) -> float:
        lasting = 0.04 * norm.ppf((np.arange(nodes) + 0.5) / nodes)
        noise = measure([np.full((50, nodes), lasting) + dice.standard_normal((50, nodes)) * 1e-3])
        low, high = np.quantile(Draws(noise, 1.0, alike(1000), 500, seed=0).slowest(), [0.05, 0.95])
        return float(high - low)

    assert width(4) > 3 * width(40)


@pytest.mark.parametrize("heavy", [False, True])
def test_the_tail_of_steps_predicts_the_slowest_of_a_thousand(heavy: bool) -> None:
    """400 steps do not show what happens once in a thousand: the fitted tail does, with an interval that has it."""
    degrees = 4 if heavy else 1000
    noise = measure([0.02 * dice.standard_t(degrees, (400, 1))])
    assert noise.tail is not None
    slowest = Draws(noise, 1.0, alike(1000), 1000, seed=2).slowest()
    low, high = np.quantile(slowest, [0.02, 0.98])
    truth = np.median(np.exp(0.02 * dice.standard_t(degrees, (2000, 1000)).max(axis=1)))
    assert low < truth < high


def test_means_of_steps_vary_less() -> None:
    one, many = (
        Draws(measure([np.zeros((20, 1))]), 1.0, alike(8, 0.2), 500, 0).slowest(mean_of=each) for each in (1, 100)
    )
    assert np.median(one) - 1 > 5 * (np.median(many) - 1) > 0


def test_unequal_speeds() -> None:
    machines = Machines((1.0, 0.5, 1.0), (None, None, None))
    draws = Draws(measure([np.zeros((20, 1))]), 3.0, machines, 10, 0)
    assert draws.slowest() == pytest.approx(np.full(10, 6.0))
    assert draws(2, workers=1).shape == (10, 2, 1)


def test_blocks_keep_the_correlation_of_neighbouring_steps() -> None:
    """The spread of medians of correlated series (AR(1), 0.8) is about twice that of independent ones."""
    true, boot = [], []
    for _ in range(60):
        noise = dice.standard_normal(400)
        series = np.zeros(400)
        for step in range(1, 400):
            series[step] = 0.8 * series[step - 1] + noise[step]
        true.append(np.median(series))
        boot.append(np.std(block_bootstrap(series + 100)))
    alone = np.std(block_bootstrap(100 + dice.standard_normal(400) / 0.6))
    assert 0.6 * np.std(true) < np.mean(boot) < 1.3 * np.std(true)
    assert np.mean(boot) > 1.5 * alone

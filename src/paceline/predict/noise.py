"""How compute times vary, from step to step and from node to node: measured in probes, and drawn for predictions.

A synchronous step waits for the slowest of its workers, so with many workers the tail of the distribution decides. The
highest tenth is a generalised Pareto distribution; how little a few nodes and steps tell about it is kept as draws.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from scipy.stats import genpareto

from paceline.predict.cluster import Cluster

Array = NDArray[np.float64]
Singles = NDArray[np.float32]

BODY = 0.9  # the part of steps below the tail
FEWEST_EXCESSES = 8  # that a tail is fitted to
# What is assumed of a tail's shape before it is measured (mean, standard deviation); the tail of a normal distribution
# looks like -0.1, and an exponential one is 0.
SHAPE = (-0.05, 0.15)
MOST_NUMBERS = 12_000_000  # that are drawn for the slowest workers
MOST_STEPS = 32
TABLE = 8192  # entries of the table of quantiles


@dataclass(frozen=True)
class Tail:
    """Pairs of shape and scale that agree with what was measured, as likely as they are."""

    threshold: float
    shapes: tuple[float, ...]
    scales: tuple[float, ...]


@dataclass(frozen=True)
class Noise:
    """Standard deviations of the logarithm of a compute time: from step to step, and from node to node.

    `body` are quantiles of the variation from step to step, in units of `step`. `node` was estimated with `freedom`
    degrees of freedom, and has `error`² too much variance because steps vary.
    """

    step: float = 0.0
    node: float = 0.0
    freedom: int = 0
    error: float = 0.0
    body: tuple[float, ...] = ()
    tail: Tail | None = None


def measure(logs: Sequence[Array]) -> Noise:
    """The noise of runs: for each, logarithms of compute times by step and worker, at speed 1."""
    within = [np.subtract(*np.quantile(each, [0.84, 0.16], axis=0)) / 2 for each in logs]  # late steps count little
    step = float(np.median(np.concatenate(within)))
    several = [(each, float(np.median(sd))) for each, sd in zip(logs, within, strict=True) if each.shape[1] > 1]
    between = [float(np.var(np.median(each, axis=0), ddof=1)) for each, _ in several]
    error = float(np.sqrt(np.mean([sd**2 * np.pi / 2 / len(each) for each, sd in several]))) if several else 0.0
    node = float(np.sqrt(np.mean(between))) if between else 0.0
    freedom = max((each.shape[1] - 1 for each, _ in several), default=0)  # repeats have the same nodes
    if step <= 0:
        return Noise(0.0, node, freedom, error)
    pooled = np.concatenate([(each - np.median(each, axis=0)).ravel() for each in logs]) / step
    body = np.quantile(pooled, np.linspace(0, 1, 101))
    return Noise(step, node, freedom, error, tuple(body.tolist()), _tail(pooled))


def _tail(pooled: Array, draws: int = 400) -> Tail | None:
    """Draws from the posterior of a generalised Pareto distribution of what exceeds the body, on a grid."""
    threshold = float(np.quantile(pooled, BODY))
    excesses = pooled[pooled > threshold] - threshold
    if len(excesses) < FEWEST_EXCESSES:
        return None
    shapes, scales = np.linspace(-0.5, 0.6, 56), np.geomspace(0.2, 4, 40) * excesses.mean()
    shape, scale = (each.ravel() for each in np.meshgrid(shapes, scales, indexing="ij"))
    likely = genpareto.logpdf(excesses[:, None], shape, 0, scale).sum(axis=0) - ((shape - SHAPE[0]) / SHAPE[1]) ** 2 / 2
    weights = np.exp(likely - likely.max())
    chosen = np.random.default_rng(0).choice(len(weights), draws, p=weights / weights.sum())
    return Tail(threshold, tuple(shape[chosen].tolist()), tuple(scale[chosen].tolist()))


def block_bootstrap(values: Array, draws: int = 200, seed: int = 0, centre: Callable[..., Array] = np.median) -> Array:
    """Medians (or means) of series that are put together from blocks of this one, so that neighbouring steps stay
    together.
    """
    dice, count = np.random.default_rng(seed), len(values)
    block = max(1, min(count, round(1.5 * count ** (1 / 3))))
    starts = dice.integers(0, count - block + 1, (draws, -(-count // block)))
    whole = (starts[:, :, None] + np.arange(block)).reshape(draws, -1)[:, :count]
    return centre(values[whole], axis=1)


@dataclass(frozen=True)
class Machines:
    """Workers whose compute times are drawn: the speed of each one's device, and its noise, if that is known."""

    speeds: tuple[float, ...]
    noises: tuple[float | None, ...]

    @classmethod
    def of(cls, cluster: Cluster, places: Sequence[int]) -> Machines:
        nodes = [cluster.nodes[place] for place in places]
        return cls(tuple(node.speed for node in nodes), tuple(node.noise for node in nodes))


@dataclass(frozen=True)
class Draws:
    """Draws of what workers take for `seconds` of compute at speed 1. A node is equally fast in all steps of a draw."""

    noise: Noise
    seconds: float
    machines: Machines
    draws: int
    seed: int

    def __call__(self, steps: int, workers: int | None = None, mean_of: int = 1) -> Array:
        """Of all workers or only of the first ones: draws × steps × workers. A step may stand for the mean of some."""
        factors = _factors(self.noise, self._first(workers), self.draws, steps, mean_of, self.seed)
        return self.seconds * factors.astype(float)

    def slowest(self, mean_of: int = 1) -> Array:
        """For each draw, the time of the slowest worker in a typical step (or mean of steps)."""
        times: Array = self.seconds * _slowest(self.noise, self.machines, self.draws, mean_of, self.seed)
        return times

    def _first(self, workers: int | None) -> Machines:
        return Machines(self.machines.speeds[:workers], self.machines.noises[:workers])


@lru_cache(maxsize=64)
def _slowest(noise: Noise, machines: Machines, draws: int, mean_of: int, seed: int) -> Array:
    workers = len(machines.speeds)
    steps = max(1, min(MOST_STEPS, MOST_NUMBERS // (draws * workers)))
    # In blocks of draws, so that no more than a few numbers are in memory at once.
    block = max(1, min(draws, MOST_NUMBERS // 8 // (steps * workers)))
    found = []
    for first in range(0, draws, block):
        times = _factors(noise, machines, min(block, draws - first), steps, mean_of, seed + first)
        found.append(np.median(times.max(axis=2), axis=1).astype(float))
    return np.concatenate(found)


def _factors(noise: Noise, machines: Machines, draws: int, steps: int, mean_of: int, seed: int) -> Singles:
    """Times of workers that take one second at speed 1, without noise."""
    dice, workers = np.random.default_rng(seed), len(machines.speeds)
    known = np.array([np.nan if each is None else each for each in machines.noises])
    sigma = np.where(np.isnan(known), 0.0, np.sqrt(np.log1p(np.nan_to_num(known) ** 2)))
    logs = np.zeros((draws, steps, workers), dtype=np.float32)
    if (unknown := np.isnan(known)).any():
        count = int(unknown.sum())
        lasting = dice.standard_normal((draws, 1, count), dtype=np.float32) * _node_sigma(noise, draws, dice)
        logs[:, :, unknown] = lasting + _varying(noise, (draws, steps, count), mean_of, dice)
    if (sigma > 0).any():
        one = dice.standard_normal(logs.shape, dtype=np.float32)
        logs += one * (sigma / np.sqrt(mean_of)).astype(np.float32) - (sigma**2 / 2 / mean_of).astype(np.float32)
    np.exp(logs, out=logs)
    logs /= np.array(machines.speeds, dtype=np.float32)
    return logs


def _node_sigma(noise: Noise, draws: int, dice: np.random.Generator) -> Singles:
    """What the standard deviation from node to node may be: few nodes leave much open."""
    if not noise.freedom:
        return np.full((draws, 1, 1), noise.node, dtype=np.float32)
    scale = noise.freedom / dice.chisquare(noise.freedom, (draws, 1, 1))
    sigma: Singles = np.sqrt(np.maximum(0.0, noise.node**2 * scale - noise.error**2)).astype(np.float32)
    return sigma


def _varying(noise: Noise, shape: tuple[int, int, int], mean_of: int, dice: np.random.Generator) -> Singles:
    """Logarithms of the variation of steps, or of means of some: the measured quantiles, and a tail for each draw."""
    if not noise.body:
        return np.zeros(shape, dtype=np.float32)
    where = dice.random(shape, dtype=np.float32)
    table = np.interp(np.linspace(0, 1, TABLE), np.linspace(0, 1, len(noise.body)), noise.body).astype(np.float32)
    found = table[(where * np.float32(TABLE - 1)).astype(np.int32)]
    if tail := noise.tail:
        high = np.nonzero(where > BODY)
        chosen = dice.integers(len(tail.shapes), size=shape[0])[high[0]]
        shapes, scales = (np.array(each, dtype=np.float32)[chosen] for each in (tail.shapes, tail.scales))
        shapes = np.where(np.abs(shapes) < 1e-3, np.float32(1e-3), shapes)
        rest = np.maximum((1 - where[high]) / np.float32(1 - BODY), np.float32(1e-7))
        found[high] = tail.threshold + scales / shapes * (rest**-shapes - 1)  # a quantile of the Pareto distribution
    mean = np.log(np.mean(np.exp(np.minimum(noise.step * np.array(noise.body), np.log(3)))))
    found *= np.float32(noise.step / np.sqrt(mean_of))
    found -= np.float32(mean / mean_of)
    return found

"""How long the steps of each family of strategies take, from the compute times of the ranks and what they send.

A strategy names its function here (`Strategy.simulation`). It takes a case and returns one step time for each draw of
the compute times.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.predict.anatomy import Anatomy, bucket_bytes
from paceline.predict.cluster import Cluster
from paceline.predict.collective import Group, finished, seconds
from paceline.predict.network import Costs
from paceline.strategies.synchronous import RIDERS

Array = NDArray[np.float64]
Shares = tuple[float, ...]  # how long each worker computes, as a part of the slowest
POINTS = (0.1, 0.5, 0.9)  # of the draws: those that steps are computed for
STEPS = 2  # that are simulated one after the other; further ones take as long as the second
ROUNDS = 3  # until computing and communication agree on how long they disturb each other


class Compute(Protocol):
    """Draws of the compute times of workers: see `paceline.predict.noise.Draws`."""

    def __call__(self, steps: int, workers: int | None = None, mean_of: int = 1) -> Array:
        """Of all workers, or only of the first ones: draws × steps × workers."""

    def slowest(self, mean_of: int = 1) -> Array:
        """For each draw, the time of the slowest worker in a typical step, or mean of some steps."""


@dataclass(frozen=True)
class Case:
    """A setting, and what is known of its machines.

    `options` are all options of the run. `compute` draws compute times of workers. `overhead` are the seconds of a step
    beside compute and communication. `costs` are those of its collective, or of the servers.
    """

    options: dict[str, Any]
    anatomy: Anatomy
    cluster: Cluster
    places: tuple[int, ...]  # the node of each rank; servers are the first ranks
    compute: Compute
    costs: Costs
    overhead: float = 0.0
    slowdown: float = 0.0  # seconds that computing takes longer, for a second of communication at the same time

    @property
    def group(self) -> Group:
        return Group(self.cluster, self.places, self.costs)


def alone(case: Case) -> Array:
    """One process."""
    return case.compute.slowest() + case.overhead


def averaged(case: Case) -> Array:
    """Gradients are summed bucket by bucket, each when its gradients are ready on the slowest rank and the one before
    it is summed: end_j = max(ready_j, end_{j-1}) + c_j.
    """
    options, averaging = case.options, case.options["averaging"]
    lengths, times = case.anatomy.buckets(bucket_bytes(options))
    parts, group = options["accumulate"], case.group
    times = tuple((parts - 1 + ready) / parts for ready in times)  # only the last backward of a step sends
    if options["overlap"] == "off":
        times = (1.0,) * len(times)

    def end(compute: float, shares: Shares) -> float:
        ready = tuple(part * compute for part in times)
        return max(compute, finished(averaging, group, lengths, ready, case.anatomy.itemsize, shares, STEPS))

    def step(compute: float, shares: Shares) -> float:
        if not case.slowdown or options["overlap"] == "off":
            return end(compute, shares)
        nothing = (0.0,) * len(times)
        alone = finished(averaging, group, lengths, nothing, case.anatomy.itemsize, steps=STEPS)
        longer = compute
        for _ in range(ROUNDS):  # the longer computing takes, the more communication it hides
            hidden = max(0.0, alone - (end(longer, shares) - longer))
            longer = compute + case.slowdown * min(hidden, longer)
        return end(longer, shares)

    alike = group.computed(AVERAGINGS[averaging].growth)
    return on_draws(case, step, alike=alike) + case.overhead


def on_draws(case: Case, step: Callable[[float, Shares], float], *, alike: bool = False) -> Array:
    """step(time of the slowest worker, shares of all) for all draws: computed for some of them, from whose least to
    greatest a straight line is drawn. If only the slowest counts (`alike`), there are no shares.
    """
    slowest = case.compute.slowest()
    low, high = float(slowest.min()), float(slowest.max())
    drawn = np.ones((1, 1)) if alike else case.compute(1)[:, 0]
    shares = drawn / np.maximum(drawn.max(axis=1, keepdims=True), 1e-9)
    if high <= low * (1 + 1e-6):
        return np.full(len(slowest), step(low, _as_shares(shares[0])))
    chosen = np.argsort(drawn.max(axis=1), kind="stable")[(np.array(POINTS) * (len(drawn) - 1)).astype(int)]
    points = np.quantile(slowest, POINTS)
    found = [step(float(point), _as_shares(shares[draw])) for point, draw in zip(points, chosen, strict=True)]
    slope, start = np.polyfit(points, found, 1)
    line: Array = start + slope * slowest
    return line


def _as_shares(values: Array) -> Shares:
    """None if all are equally fast."""
    return tuple(values.tolist()) if values.min() < 1 - 1e-6 else ()


def local(case: Case) -> Array:
    """Ranks are on their own for some steps; then all weights are averaged at once. The mean over a round of steps."""
    every, averaging = case.options["sync_every"], case.options["averaging"]
    slowest = case.compute.slowest(mean_of=every) * every
    length = sum(case.anatomy.sizes) + RIDERS
    average = seconds(averaging, case.group, length, case.anatomy.itemsize)
    mean: Array = (slowest + average) / every + case.overhead
    return mean

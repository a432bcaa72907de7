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

from paceline.predict.anatomy import Anatomy
from paceline.predict.cluster import Cluster
from paceline.predict.collective import Group, finished, seconds
from paceline.predict.network import Costs
from paceline.strategies.synchronous import RIDERS

Array = NDArray[np.float64]
POINTS = 5


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
    slowest = case.compute.slowest()
    options, averaging = case.options, case.options["averaging"]
    lengths, times = case.anatomy.buckets(int(options["bucket_mb"] / options["shrink"] * 2**20))
    parts, group = options["accumulate"], case.group
    times = tuple((parts - 1 + ready) / parts for ready in times)  # only the last backward of a step sends
    if options["overlap"] == "off":
        times = (1.0,) * len(times)

    def step(compute: float) -> float:
        ready = tuple(part * compute for part in times)
        return max(compute, finished(averaging, group, lengths, ready, case.anatomy.itemsize))

    return _between(step, slowest) + case.overhead


def _between(step: Callable[[float], float], values: Array) -> Array:
    """step(value) for many values: computed at some of them, and between these on straight lines."""
    low, high = float(values.min()), float(values.max())
    count = 1 if high <= low * (1 + 1e-6) else 2 if high <= low * 1.05 else POINTS
    points = np.quantile(values, np.linspace(0, 1, count)).tolist()
    return np.interp(values, points, [step(point) for point in points])


def local(case: Case) -> Array:
    """Ranks are on their own for some steps; then all weights are averaged at once. The mean over a round of steps."""
    every, averaging = case.options["sync_every"], case.options["averaging"]
    slowest = case.compute.slowest(mean_of=every) * every
    length = sum(case.anatomy.sizes) + RIDERS
    average = seconds(averaging, case.group, length, case.anatomy.itemsize)
    mean: Array = (slowest + average) / every + case.overhead
    return mean

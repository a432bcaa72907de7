"""The gradient noise scale of a training, from the norms that data-parallel runs record.

The squared norm of a mean gradient over n samples is |G|² + tr(Σ)/n on average: G is the gradient of the whole training
set, Σ the covariance of the gradients of single samples. A step with norms for the parts of its ranks and for its whole
batch tells both terms apart (McCandlish et al. 2018, appendix A.1). B_noise = tr(Σ)/|G|² is the batch at which noise
and gradient are equally large, and a first estimate of the batch beyond which larger ones save few steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import t as student

from paceline.analysis.runs import Run
from paceline.predict.ranges import LEVEL, Range

FEWEST_STEPS = 16  # with norms
BLOCKS = 8  # of neighbouring steps, whose means are taken to be independent
# The first part of a run, which is left out: there the gradient is many times larger than later, so that a few steps
# would decide about the mean. The noise scale grows all the time; that of the rest is close to B_crit of the whole run.
LEFT_OUT = 0.25


@dataclass(frozen=True)
class Unknown:
    """There is no answer, and why."""

    why: str


@dataclass(frozen=True)
class Norms:
    """Mean gradients of one step: samples and squared norm, of the whole batch and of the part of each rank."""

    samples: int
    squared: float
    parts: tuple[tuple[int, float], ...]
    step: int = 0

    @property
    def variance(self) -> float:
        """An unbiased estimate of tr(Σ), for parts of any sizes: n·E|g|² is n·|G|² + tr(Σ) for each of them."""
        between = sum(count * squared for count, squared in self.parts) - self.samples * self.squared
        return between / (len(self.parts) - 1)

    @property
    def gradient(self) -> float:
        """An unbiased estimate of |G|², which may be negative."""
        return self.squared - self.variance / self.samples


@dataclass(frozen=True)
class NoiseScale:
    """B_noise in samples, the means of tr(Σ) and |G|², from how many steps, and how far these go."""

    batch: Range
    variance: float
    gradient: float
    steps: int
    last: int  # the number of steps of training until then


def noise_scale(steps: Sequence[Norms]) -> NoiseScale | Unknown:
    """The ratio of means over steps, with Fieller's interval; from means of blocks, as steps are autocorrelated."""
    if len(steps) < FEWEST_STEPS:
        return Unknown(f"gradient norms of {len(steps)} steps are recorded, and {FEWEST_STEPS} are needed")
    series = np.array([(step.variance, step.gradient) for step in steps]).T
    variance, gradient = series.mean(axis=1).tolist()
    noise = Unknown("the gradient cannot be told from its noise in the steps with norms; more of them are needed")
    if not (gradient > 0 and variance > 0):
        return noise
    # Ratios r for which variance - r·gradient may be 0 are between two roots, unless |G|² itself may be 0.
    means = [block.mean(axis=1) for block in np.array_split(series, BLOCKS, axis=1)]
    limit = np.cov(means, rowvar=False) / BLOCKS * student.ppf((1 + LEVEL) / 2, BLOCKS - 1) ** 2
    (c, b), (_, a) = (np.outer([variance, gradient], [variance, gradient]) - limit).tolist()
    if a <= 0:
        return noise
    half = float(np.sqrt(max(0.0, b**2 - a * c)))
    batch = Range(variance / gradient, max(0.0, (b - half) / a), (b + half) / a)
    return NoiseScale(batch, variance, gradient, len(steps), 1 + max(step.step for step in steps))


def norms_of(run: Run) -> list[Norms]:
    """The steps of a run for which all ranks with samples have recorded norms, without the first part of the run."""
    ranks = [{step.step: step for step in steps} for steps in run.steps.values()]
    found = []
    for number, step in ranks[0].items():
        there = [rank[number] for rank in ranks if number in rank]
        parts = tuple((each.own, each.own_norm**2) for each in there if each.own and each.own_norm is not None)
        complete = sum(count for count, _ in parts) == step.samples
        if complete and len(parts) > 1 and step.norm is not None and number >= LEFT_OUT * len(run.steps[0]):
            found.append(Norms(step.samples, step.norm**2, parts, number))
    return found


def of_run(run: Run) -> NoiseScale | Unknown:
    return of_runs([run])


def of_runs(runs: Iterable[Run]) -> NoiseScale | Unknown:
    """Of all runs together: they are of the same training, to about the same loss."""
    return noise_scale([step for run in runs for step in norms_of(run)])

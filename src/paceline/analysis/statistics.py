"""Numbers from noisy series: warm-up, medians with intervals, drift, humps, and the two laws of scaling."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

RESAMPLES = 1000
LEVEL = 0.95
MOST_STEPS = 500  # of a run, in a bootstrap sample: more would make the interval of a long run no truer
# Of the steps, at most this part can be warm-up: what never settles is not a long warm-up, it is a drift.
MOST_WARM_UP = 0.5


@dataclass(frozen=True)
class Interval:
    """A value, and where it lies with 95 % confidence."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Relative to the value."""
        return (self.high - self.low) / 2 / self.value if self.value else 0.0

    def excludes(self, value: float) -> bool:
        return not self.low <= value <= self.high


def warm_up(seconds: Sequence[float]) -> int:
    """How many of the first steps to leave out: as many as make the mean of the rest most certain (MSER).

    Single late steps, such as a garbage collection, do not move the answer: what is far above most counts as less far.
    """
    x = np.asarray(seconds, dtype=float)
    if len(x) < 8:
        return 0
    x = np.minimum(x, 3 * np.median(x))
    most = int(len(x) * MOST_WARM_UP)
    errors = np.array([float(x[start:].var()) / (len(x) - start) for start in range(most + 1)])
    return int(np.argmax(errors <= errors.min() + 1e-12 * x.mean() ** 2))  # the first of equals


def block_length(count: int) -> int:
    """Steps that follow each other are alike; resampling takes them in blocks of this many."""
    length: int = round(count ** (1 / 3))
    return max(1, length)


def resample(series: Sequence[Series], count: int, rng: np.random.Generator) -> Series:
    """So many bootstrap samples, a row each: of the runs some are drawn, and of each of these blocks of steps."""
    steps = min([MOST_STEPS, *(len(x) for x in series)])
    length = block_length(steps)
    chosen = rng.integers(len(series), size=(count, len(series)))
    drawn = np.empty((count, len(series), steps))
    for i, x in enumerate(series):
        rows, slots = np.nonzero(chosen == i)
        starts = rng.integers(len(x) - length + 1, size=(len(rows), -(-steps // length)))
        drawn[rows, slots] = x[(starts[:, :, None] + np.arange(length)).reshape(len(rows), -1)[:, :steps]]
    return drawn.reshape(count, -1)


def medians(series: Sequence[Series], resamples: int = RESAMPLES, seed: int = 0) -> Series:
    """The median's bootstrap distribution over one or several runs."""
    found: Series = np.median(resample(series, resamples, np.random.default_rng(seed)), axis=1)
    return found


def interval(value: float, distribution: Series, level: float = LEVEL) -> Interval:
    low, high = np.quantile(distribution, [(1 - level) / 2, (1 + level) / 2])
    return Interval(value, float(min(low, value)), float(max(high, value)))


def median(series: Sequence[Series]) -> Interval:
    """The median step over runs, with its interval."""
    return interval(float(np.median(np.concatenate(list(series)))), medians(series))


def ratio(top: Sequence[Series], bottom: Sequence[Series]) -> Interval:
    """The ratio of two medians, with its interval: both are uncertain."""
    value = float(np.median(np.concatenate(list(top))) / np.median(np.concatenate(list(bottom))))
    return interval(value, medians(top, seed=1) / medians(bottom, seed=2))


def drift(x: Series) -> float:
    """How much slower the last third is than the first, as a part; 0 where the difference could be chance."""
    if len(x) < 30:
        return 0.0
    third = len(x) // 3
    change = ratio([x[-third:]], [x[:third]])
    return change.value - 1 if change.excludes(1.0) else 0.0


@dataclass(frozen=True)
class Humps:
    """Two clusters of step times: the median of each, and which part of the steps is in the slower one."""

    fast: float
    slow: float
    part_slow: float


def two_humps(x: Series) -> Humps | None:
    """The two clusters that a series falls into, if it clearly does.

    Otsu's cut explains 64 % of a normal distribution's variance, 75 % of a uniform one's, and more of two humps.
    """
    if len(x) < 20:
        return None
    ordered = np.sort(np.log(x))
    count, total = len(ordered), ordered.sum()
    left = np.cumsum(ordered)[:-1]
    sizes = np.arange(1, count)
    between = (left / sizes - (total - left) / (count - sizes)) ** 2 * sizes * (count - sizes) / count**2
    cut = int(np.argmax(between)) + 1
    fast, slow = (float(np.exp(np.median(part))) for part in (ordered[:cut], ordered[cut:]))
    part_slow = 1 - cut / count
    explained = between[cut - 1] / max(ordered.var(), 1e-30)
    if explained < 0.85 or not 0.1 <= part_slow <= 0.9 or slow / fast < 1.15:
        return None
    return Humps(fast, slow, part_slow)


def amdahl(workers: Sequence[int], seconds: Sequence[float]) -> float | None:
    """The serial part s of t(n) = t(1)·(s + (1−s)/n) that fits best; None without a baseline and another point."""
    times = dict(zip(workers, seconds, strict=True))
    others = [n for n in times if n > 1]
    if 1 not in times or not others:
        return None
    n = np.array(others, dtype=float)
    y = np.array([times[k] / times[1] for k in others]) - 1 / n
    x = 1 - 1 / n
    return min(1.0, max(0.0, float(x @ y) / float(x @ x)))


def gustafson(workers: Sequence[int], scaled_speedups: Sequence[float]) -> float | None:
    """The serial part s of S(n) = n − s·(n−1) that fits best: of work that grows with the workers."""
    n = np.array([k for k in workers if k > 1], dtype=float)
    if not len(n):
        return None
    speedups = np.array([s for k, s in zip(workers, scaled_speedups, strict=True) if k > 1])
    x, y = n - 1, n - speedups
    return min(1.0, max(0.0, float(x @ y) / float(x @ x)))

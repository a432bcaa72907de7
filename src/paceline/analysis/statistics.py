"""Numbers from noisy series: warm-up, medians with intervals, drift, humps, and the two laws of scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

RESAMPLES = 1000
FEW_RESAMPLES = 200  # enough for a variance
LEVEL = 0.95
# Of Student's t at that level, for 1, 2, ... degrees of freedom.
# fmt: off
T_QUANTILES = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
               2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042)
# fmt: on
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
    starts = np.arange(int(len(x) * MOST_WARM_UP) + 1)
    left = len(x) - starts
    centred = x - x.mean()  # so that sums of squares lose no digits
    sums, squares = (np.cumsum(each[::-1])[::-1][starts] for each in (centred, centred**2))
    errors = (squares / left - (sums / left) ** 2) / left
    return int(np.argmax(errors <= errors.min() + 1e-12 * x.mean() ** 2))  # the first of equals


def block_length(count: int) -> int:
    """Steps that follow each other are alike; resampling takes them in blocks of this many."""
    length: int = round(count ** (1 / 3))
    return max(1, length)


def medians(x: Series, resamples: int = RESAMPLES, seed: int = 0) -> Series:
    """The bootstrap distribution of one run's median: blocks of its steps are drawn again and again."""
    rng, steps = np.random.default_rng(seed), min(MOST_STEPS, len(x))
    length = block_length(steps)
    starts = rng.integers(len(x) - length + 1, size=(resamples, -(-steps // length)))
    drawn = x[(starts[:, :, None] + np.arange(length)).reshape(resamples, -1)[:, :steps]]
    found: Series = np.median(drawn, axis=1)
    return found


def interval(value: float, distribution: Series) -> Interval:
    """Where most of a bootstrap distribution is."""
    low, high = np.quantile(distribution, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value, float(min(low, value)), float(max(high, value)))


def t_quantile(freedom: float) -> float:
    """Of Student's distribution, both ends of 95 %; between whole degrees by proportion of their inverses."""
    if freedom >= len(T_QUANTILES):
        return T_QUANTILES[-1]
    below = max(1, int(freedom))
    low, high = T_QUANTILES[below - 1], T_QUANTILES[below]
    part = (1 / below - 1 / max(1.0, freedom)) / (1 / below - 1 / (below + 1))
    return low + part * (high - low)


@dataclass(frozen=True)
class _Runs:
    """Logarithms of the medians of runs: their mean, and how far one run is from another.

    `variance` is of one run's; it is None of a single run, which does not tell how much runs differ.
    """

    runs: int
    mean: float
    within: float
    variance: float | None

    @staticmethod
    def of(series: Sequence[Series]) -> _Runs:
        logs = np.log([np.median(x) for x in series])
        within = float(np.mean([np.log(medians(x, FEW_RESAMPLES)).var() for x in series]))
        # Runs are never more alike than the steps in each of them permit: if they seem so, that is luck.
        variance = max(float(logs.var(ddof=1)), within) if len(logs) > 1 else None
        return _Runs(len(logs), float(logs.mean()), within, variance)

    def error(self, other: float | None = None) -> float:
        """The variance of the mean; a single run differs from others as much as those of the other setting do."""
        variance = self.variance if self.variance is not None else max(self.within, other or 0.0)
        return variance / self.runs


def _around(value: float, mean: float, error: float, freedom: float) -> Interval:
    reach = t_quantile(freedom) * float(np.sqrt(error))
    low, high = float(np.exp(mean - reach)), float(np.exp(mean + reach))
    return Interval(value, min(low, value), max(high, value))


def middle(series: Sequence[Series]) -> float:
    """The median step of the middle run; between two of them in the middle, as far from one as from the other."""
    if len(series) == 1:
        return float(np.median(series[0]))
    return float(np.exp(np.median(np.log([np.median(x) for x in series]))))


def median(series: Sequence[Series]) -> Interval:
    """The median step of the middle run, with its interval: of several runs by how much these differ (Student's t, on
    logarithms), of one by blocks of its steps, which says nothing of how another run would be.
    """
    if len(series) == 1:
        return interval(middle(series), medians(series[0]))
    found = _Runs.of(series)
    return _around(middle(series), found.mean, found.error(), found.runs - 1)


def ratio(top: Sequence[Series], bottom: Sequence[Series]) -> Interval:
    """The ratio of two medians, with its interval: both are uncertain (Welch's t, on logarithms)."""
    value = middle(top) / middle(bottom)
    if len(top) == len(bottom) == 1:
        return interval(value, medians(top[0], seed=1) / medians(bottom[0], seed=2))
    one, two = _Runs.of(top), _Runs.of(bottom)
    first, second = one.error(two.variance), two.error(one.variance)
    mean = one.mean - two.mean
    if min(one.runs, two.runs) == 1:
        return _around(value, mean, first + second, max(one.runs, two.runs) - 1)
    parts = first**2 / (one.runs - 1) + second**2 / (two.runs - 1)
    return _around(value, mean, first + second, (first + second) ** 2 / parts if parts else 1.0)


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


# The speedup of n workers, of whose work a part s is not divided, by the kind of scaling: Amdahl's law and Gustafson's.
LAWS: dict[str, Callable[[float, Any], Any]] = {
    "strong": lambda s, n: 1 / (s + (1 - s) / n),
    "weak": lambda s, n: n - s * (n - 1),
}

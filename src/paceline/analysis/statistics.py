"""Statistics of step times: warm-up, medians with intervals, drift, bimodality, and the two laws of scaling."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]

LEVEL = 0.95
# Runs with fewer effective samples than this are too short to be ranked.
ENOUGH_SAMPLES = 20
# How many low frequencies the variance of a median is estimated from: per effective sample, and at least and at most.
# More of them bias it where steps are autocorrelated; fewer make intervals wider than they need to be.
FREQUENCIES, FEWEST_FREQUENCIES, MOST_FREQUENCIES = 0.15, 4, 40
# How much larger than estimated the variance of a median is taken to be, at ENOUGH_SAMPLES effective samples; the
# allowance falls with their square. Cutting off the warm-up, and refusing runs that seem too short, both favour series
# that look less variable than they are.
ALLOWANCE = 0.5
# At most this share of the steps can be warm-up: a series that never stabilises drifts.
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
    """The number of warm-up steps by the MSER rule: removing them makes the mean of the rest most certain.

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


def effective_samples(x: Series) -> Series:
    """How many independent steps each series (along the last axis) is worth: steps ÷ integrated autocorrelation time.

    That time comes from the autoregressive model that fits best (Yule-Walker, order chosen by AICc), after clipping
    the lowest and the highest tenth, so that outliers do not hide the correlation of the other steps.
    """
    count = x.shape[-1]
    if count < 4:
        return np.full(x.shape[:-1], float(count))
    low, high = np.quantile(x, [0.1, 0.9], axis=-1, keepdims=True)
    centred = np.clip(x, low, high) - low
    centred -= centred.mean(-1, keepdims=True)
    orders = range(1, max(1, min(count // 4, int(10 * np.log10(count)))) + 1)
    power = np.einsum("...i,...i->...", centred, centred)
    lags = [np.einsum("...i,...i->...", centred[..., :-k], centred[..., k:]) / np.maximum(power, 1e-300)
            for k in orders]  # fmt: skip
    correlations = np.stack([np.ones_like(power), *lags], axis=-1)
    weights, residual = np.zeros_like(correlations), np.ones_like(power)  # the model, and its residual variance
    best, times = np.zeros_like(power), np.ones_like(power)
    for k in orders:  # Levinson-Durbin recursion
        behind = weights[..., k - 1 : 0 : -1]
        partial = (correlations[..., k] - (behind * correlations[..., 1:k]).sum(-1)) / residual
        weights[..., 1:k] -= partial[..., None] * behind
        weights[..., k] = partial
        residual = np.maximum(residual * (1 - partial**2), 1e-12)
        criterion = count * np.log(residual) + 2 * k * count / (count - k - 2)
        times = np.where(criterion < best, residual / np.maximum(1 - weights.sum(-1), 1e-6) ** 2, times)
        best = np.minimum(criterion, best)
    found: Series = np.clip(count / times, 1.0, count)
    return found


@dataclass(frozen=True)
class Medians:
    """Medians of series of equal length, one per row, on a logarithmic scale, with their uncertainty.

    `error` is the standard error of the fraction of steps below the true median. It is estimated from the lowest
    frequencies (cosine transform) of the series of signs, above or below the median, so it allows for autocorrelation;
    their number is the degrees of `freedom` for Student's t. An interval is then read from the sorted steps, which
    assumes nothing about their distribution.
    """

    ordered: Series
    error: Series
    freedom: Series

    @staticmethod
    def of(series: Series) -> Medians:
        from scipy.fft import dct

        logs = np.log(series)
        count = logs.shape[-1]
        signs = np.sign(logs - np.median(logs, axis=-1, keepdims=True)) / 2
        effective = effective_samples(logs)
        freedom = np.clip(effective * FREQUENCIES, FEWEST_FREQUENCIES, MOST_FREQUENCIES).astype(int)
        freedom = np.minimum(freedom, max(1, count - 1))
        powers = dct(signs, norm="ortho", axis=-1)[..., 1 : int(freedom.max()) + 1] ** 2
        if count == 1:
            powers = np.zeros((*signs.shape[:-1], 1))
        means = np.take_along_axis(np.cumsum(powers, axis=-1), freedom[..., None] - 1, axis=-1)[..., 0] / freedom
        # Negative autocorrelation narrows an interval to half of what independent steps would give, and no further.
        variance = np.maximum(means, (signs**2).mean(-1) / 4)
        variance *= 1 + ALLOWANCE * (ENOUGH_SAMPLES / np.maximum(effective, ENOUGH_SAMPLES)) ** 2
        return Medians(np.sort(logs, axis=-1), np.sqrt(variance / count), freedom)

    @property
    def values(self) -> Series:
        return self._quantile(np.full_like(self.error, 0.5))

    def reach(self, t: Series) -> tuple[Series, Series]:
        """Distances from the median to the steps that are t standard errors below and above it in rank.

        Ranks outside the series are extrapolated in proportion.
        """
        part = np.maximum(t * self.error, 1e-9)
        inside = np.minimum(part, 0.45)
        middle, more = self.values, part / inside
        return more * (middle - self._quantile(0.5 - inside)), more * (self._quantile(0.5 + inside) - middle)

    @property
    def variances(self) -> Series:
        """Squared standard errors of the logarithms of the medians."""
        t = t_quantile(self.freedom)
        found: Series = (np.add(*self.reach(t)) / 2 / t) ** 2
        return found

    def bounds(self) -> tuple[Series, Series]:
        """The 95 % interval of each median."""
        below, above = self.reach(t_quantile(self.freedom))
        return _exp(self.values - below), _exp(self.values + above)

    def bounds_over(self, other: Medians) -> tuple[Series, Series]:
        """The 95 % interval of each ratio to another median: the distances of both medians to their limits, added in
        quadrature, with Welch's degrees of freedom.
        """
        t = t_quantile(welch(self.variances, self.freedom, other.variances, other.freedom))
        (below, above), (other_below, other_above) = self.reach(t), other.reach(t)
        ratio = self.values - other.values
        return _exp(ratio - np.hypot(below, other_above)), _exp(ratio + np.hypot(above, other_below))

    def _quantile(self, part: Series) -> Series:
        """A quantile of each row, interpolated."""
        count = self.ordered.shape[-1]
        place = np.clip(part * count - 0.5, 0, count - 1)
        left = np.minimum(place.astype(int), max(0, count - 2))
        low, high = (np.take_along_axis(self.ordered, each[..., None], axis=-1)[..., 0]
                     for each in (left, np.minimum(left + 1, count - 1)))  # fmt: skip
        found: Series = low + (place - left) * (high - low)
        return found


def _exp(logarithm: Any) -> Any:
    """Always finite and not 0, however uncertain a number is."""
    return np.exp(np.clip(logarithm, -700, 700))


def t_quantile(freedom: Any) -> Any:
    """Student's t for a two-sided 95 % interval."""
    from scipy.special import stdtrit

    return stdtrit(freedom, (1 + LEVEL) / 2)


def welch(first: Any, freedom_first: Any, second: Any, freedom_second: Any) -> Any:
    """Degrees of freedom of a difference of two means, from their squared standard errors (Welch-Satterthwaite).

    SciPy computes them from samples only (`stats.ttest_ind`); ours come from estimates of errors.
    """
    parts = first**2 / freedom_first + second**2 / freedom_second
    return np.where(parts > 0, (first + second) ** 2 / np.maximum(parts, 1e-300), freedom_first + freedom_second)


@dataclass(frozen=True)
class Repeats:
    """Logarithms of the medians of repeated runs, one setting per row: their mean, and how much runs differ.

    `variance` is that of one run; it is None for single runs, which do not tell how much runs differ.
    """

    runs: int
    mean: Series
    within: Series
    variance: Series | None

    @staticmethod
    def of(logs: Series, within: Series) -> Repeats:
        """From the logarithm of each run's median (runs are the last axis), and its variance within the run."""
        runs, within = logs.shape[-1], within.mean(-1)
        # The variance between runs is at least what their steps imply: a smaller one is chance.
        variance = np.maximum(logs.var(-1, ddof=1), within) if runs > 1 else None
        return Repeats(runs, logs.mean(-1), within, variance)

    def error(self, other: Series | None = None) -> Series:
        """The variance of the mean; a single run differs from others as much as those of the other setting do."""
        variance = self.variance
        if variance is None:
            variance = self.within if other is None else np.maximum(self.within, other)
        return variance / self.runs

    def bounds(self) -> tuple[Series, Series]:
        """The 95 % interval of each median (Student's t)."""
        return _around(self.mean, self.error(), self.runs - 1)

    def bounds_over(self, other: Repeats) -> tuple[Series, Series]:
        """The 95 % interval of each ratio to another median: Welch's t; Student's, where one has a single run."""
        first, second = self.error(other.variance), other.error(self.variance)
        freedom: Any = max(self.runs, other.runs) - 1
        if min(self.runs, other.runs) > 1:
            freedom = welch(first, self.runs - 1, second, other.runs - 1)
        return _around(self.mean - other.mean, first + second, freedom)


def _around(mean: Series, error: Series, freedom: Any) -> tuple[Series, Series]:
    reach = t_quantile(freedom) * np.sqrt(error)
    return _exp(mean - reach), _exp(mean + reach)


def _repeats(series: Sequence[Series]) -> Repeats:
    return Repeats.of(np.log([np.median(x) for x in series]), np.array([Medians.of(x).variances for x in series]))


def _between(value: float, ends: tuple[Series, Series]) -> Interval:
    low, high = map(float, ends)
    return Interval(value, min(low, value), max(high, value))


def middle(series: Sequence[Series]) -> float:
    """The median step of the middle run; between two of them in the middle, as far from one as from the other."""
    if len(series) == 1:
        return float(np.median(series[0]))
    return float(np.exp(np.median(np.log([np.median(x) for x in series]))))


def median(series: Sequence[Series]) -> Interval:
    """The median step of the middle run, with its interval. With several runs the interval comes from how much they
    differ (Student's t, on logarithms); with one it comes from its steps, and cannot tell how another run would differ.
    """
    found = Medians.of(series[0]) if len(series) == 1 else _repeats(series)
    return _between(middle(series), found.bounds())


def ratio(top: Sequence[Series], bottom: Sequence[Series]) -> Interval:
    """The ratio of two medians, with its interval: both are uncertain (Welch's t, on logarithms)."""
    value = middle(top) / middle(bottom)
    if len(top) == len(bottom) == 1:
        return _between(value, Medians.of(top[0]).bounds_over(Medians.of(bottom[0])))
    return _between(value, _repeats(top).bounds_over(_repeats(bottom)))


def drift(x: Series) -> float:
    """How much slower the last third is than the first, as a fraction; 0 if that is not significant."""
    if len(x) < 30:
        return 0.0
    third = len(x) // 3
    change = ratio([x[-third:]], [x[:third]])
    return change.value - 1 if change.excludes(1.0) else 0.0


@dataclass(frozen=True)
class Humps:
    """Two clusters of step times: the median of each, and the share of steps in the slower one."""

    fast: float
    slow: float
    part_slow: float


def bimodal(x: Series) -> Humps | None:
    """The two clusters that a series falls into, if it clearly does.

    Otsu's cut explains 64 % of a normal distribution's variance, 75 % of a uniform one's, and more of a bimodal one.
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


# A law with one parameter goes through any single point beside the baseline: only more of them can test it.
FEWEST_FITTED = 2


def amdahl(workers: Sequence[int], seconds: Sequence[float]) -> float | None:
    """The serial fraction s of t(n) = t(1)·(s + (1−s)/n) that fits best; None without t(1) and two other points."""
    times = dict(zip(workers, seconds, strict=True))
    others = [n for n in times if n > 1]
    if 1 not in times or len(others) < FEWEST_FITTED:
        return None
    n = np.array(others, dtype=float)
    y = np.array([times[k] / times[1] for k in others]) - 1 / n
    x = 1 - 1 / n
    return min(1.0, max(0.0, float(x @ y) / float(x @ x)))


def gustafson(workers: Sequence[int], scaled_speedups: Sequence[float]) -> float | None:
    """The serial fraction s of S(n) = n − s·(n−1) that fits best, if the work grows with the workers; None without two
    points besides one worker.
    """
    n = np.array([k for k in workers if k > 1], dtype=float)
    if len(n) < FEWEST_FITTED:
        return None
    speedups = np.array([s for k, s in zip(workers, scaled_speedups, strict=True) if k > 1])
    x, y = n - 1, n - speedups
    return min(1.0, max(0.0, float(x @ y) / float(x @ x)))


# The speedup of n workers with serial fraction s, by the kind of scaling: Amdahl's law and Gustafson's.
LAWS: dict[str, Callable[[float, Any], Any]] = {
    "strong": lambda s, n: 1 / (s + (1 - s) / n),
    "weak": lambda s, n: n - s * (n - 1),
}

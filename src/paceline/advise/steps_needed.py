"""How many steps a training needs with another global batch: steps(B) = S_min·(1 + B_crit/B).

This law (McCandlish et al. 2018) holds for one loss that is to be reached, if each batch has the learning rate that
suits it. Below B_crit, twice the batch needs about half as many steps; beyond it, hardly fewer. B_crit is fitted to
runs with different batches, and to the gradient noise scale, which predicts it roughly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low

import numpy as np
from scipy.stats import norm

from paceline.advise.noise_scale import NoiseScale, Unknown
from paceline.analysis.runs import Run
from paceline.predict.forecast import DRAWS
from paceline.predict.ranges import Range
from paceline.predict.steps import Array

LEVELS = 5
FEWEST_STEPS = 8  # of the shortest run to the lowest common loss
LEAST_FALL = 0.05  # part of the first loss by which the loss must have fallen
# Half the window in which losses are smoothed, on a logarithmic scale of steps. The law says that curves of different
# batches are the same but for the unit of steps, so that such a window has the same effect on all of them.
WINDOW = 0.35
# How B_crit differs from the noise scale (standard deviation of the logarithm): in trials with three tasks it was 0.9
# to 2 times as large. And how it differs from the batches that were trained, which is all there is without norms.
SPREAD, WIDEST = 0.5, 2.3
# B_crit grows as training goes on, about with the square root of the steps: the exponent, and its standard deviation.
GROWTH = (0.5, 0.2)
# How the steps of a run differ from the law, as a standard deviation of the logarithm; and how many runs' worth of
# evidence this is.
ERROR, FREEDOM = 0.07, 4


@dataclass(frozen=True)
class Reached:
    """With this global batch, a run needed so many steps to this loss."""

    batch: int
    loss: float
    steps: float


@dataclass(frozen=True, eq=False)
class StepsLaw:
    """Draws of B_crit and of the logarithm of a run's deviation from the law; the first are the most likely values."""

    critical: Array
    error: Array

    @property
    def critical_batch(self) -> Range:
        return Range.of(self.critical)

    def ratio(self, batch: float, base: float) -> Array:
        """Draws of steps(batch) ÷ steps(base), each of one run; the first is the most likely value."""
        lawful: Array = (1 + self.critical / batch) / (1 + self.critical / base)
        return lawful if batch == base else lawful * np.exp(self.error)


def smoothed(losses: Array) -> Array:
    """A line is fitted around each step, so that a falling loss is not seen too late, nor too early at the end."""
    place = np.log(np.arange(len(losses)) + 0.5)
    first, last = np.searchsorted(place, place - WINDOW), np.searchsorted(place, place + WINDOW, side="right")
    terms = np.cumsum([np.ones_like(place), place, losses, place**2, place * losses], axis=1)
    count, x, y, xx, xy = np.pad(terms, ((0, 0), (1, 0)))[:, last] - np.pad(terms, ((0, 0), (1, 0)))[:, first]
    slope = (xy - x * y / count) / np.maximum(xx - x**2 / count, 1e-9)
    fitted: Array = y / count + slope * (place - x / count)
    return fitted


def steps_to(curve: Array, loss: float | Array) -> Array:
    """The number of steps in which a smoothed loss was above this one. Unlike the first step below it, this is not
    earlier the more noise is left.
    """
    return np.asarray(np.interp(loss, np.sort(curve), np.arange(len(curve), 0.0, -1.0)))


def branch_points(runs: Sequence[Run]) -> list[Reached] | Unknown:
    """Steps to several losses that all these runs of one training have reached, with different global batches."""
    trained = [[step for step in run.steps[0] if step.loss is not None] for run in runs]
    if not trained or not all(trained):
        return Unknown("there are no losses to compare batches by")
    curves = [(median_low(step.samples for step in steps), smoothed(np.array([step.loss for step in steps])))
              for steps in trained]  # fmt: skip
    slowest = min(curves, key=lambda each: each[0])[1]
    lowest = max(curve[-1] for _, curve in curves)
    if lowest > (1 - LEAST_FALL) * min(curve[0] for _, curve in curves):
        return Unknown("losses have not fallen enough to compare batches by the steps that they need")
    if min(steps_to(curve, lowest) for _, curve in curves) < FEWEST_STEPS:
        return Unknown(f"some runs reach the lowest loss that all have reached in less than {FEWEST_STEPS} steps")
    count = steps_to(slowest, lowest)
    losses = np.interp(count * np.linspace(0.5, 1, LEVELS), np.arange(1.0, len(slowest) + 1), -np.sort(-slowest))
    return [Reached(batch, float(loss), float(steps)) for batch, curve in curves
            for loss, steps in zip(losses, steps_to(curve, losses), strict=True)]  # fmt: skip


def fit_steps(
    points: Sequence[Reached] | Unknown, prior: NoiseScale | Unknown | None = None, steps: float | None = None
) -> StepsLaw | Unknown:
    """The posterior of B_crit of a training of so many steps with the smallest batch; as long as the points unless
    given. S_min of each loss, the growth of B_crit and the size of errors are integrated out.

    The losses of one run share its deviation from the law, so that all of them count as one measurement.
    """
    reached = [] if isinstance(points, Unknown) else list(points)
    batches = np.array([point.batch for point in reached], dtype=float)
    if len(set(batches)) < 2 and not isinstance(prior, NoiseScale):
        few = points.why if isinstance(points, Unknown) else "only one global batch was trained"
        return Unknown(f"{few}, and {prior.why if prior else 'no gradient norms were recorded'}")
    centre, spread = _prior(batches, prior)
    grid = np.linspace(centre - 5 * spread, centre + 5 * spread, 1001)
    growth = norm.ppf((np.arange(15)[:, None] + 0.5) / 15, *GROWTH)  # equally likely exponents
    further = growth * np.log((steps or prior.last) / prior.last) if isinstance(prior, NoiseScale) else 0 * growth
    likely = -(((grid - centre - further) / spread) ** 2) / 2
    squares, freedom = np.zeros_like(likely), float(FREEDOM)
    if len(set(batches)) > 1:
        seen = max(point.steps for point in reached if point.batch == batches.min())
        critical = np.exp(grid - growth * np.log((steps or seen) / seen))
        losses, place = np.unique([point.loss for point in reached], return_inverse=True)
        left = np.log([point.steps for point in reached]) - np.log1p(critical[..., None] / batches)
        least = np.stack([left[..., place == each].mean(axis=-1) for each in range(len(losses))], axis=-1)  # log S_min
        squares = ((left - least[..., place]) ** 2).sum(axis=-1) / len(losses)
        freedom += len(reached) / len(losses) - 1
        likely -= freedom / 2 * np.log(FREEDOM * ERROR**2 + squares)
    dice, weights = np.random.default_rng(0), np.exp(likely - likely.max())
    drawn = dice.choice(likely.size, DRAWS, p=weights.ravel() / weights.sum())
    sigma = np.sqrt((FREEDOM * ERROR**2 + squares.ravel()[drawn]) / dice.chisquare(freedom, DRAWS))
    error = np.sqrt(2) * sigma * dice.standard_normal(DRAWS)  # of two runs
    place = drawn % len(grid)
    place[0], error[0] = weights.sum(axis=0).argmax(), 0.0
    return StepsLaw(np.exp(grid[place]), error)


def _prior(batches: Array, prior: NoiseScale | Unknown | None) -> tuple[float, float]:
    """Mean and standard deviation of log B_crit before runs with several batches are considered."""
    if not isinstance(prior, NoiseScale):
        return float(np.log(batches).mean()), WIDEST
    least = max(prior.batch.low, prior.batch.value / 100)  # the interval may begin at 0
    return float(np.log(prior.batch.value)), float(np.hypot(SPREAD, np.log(prior.batch.high / least) / 3.29))


def learning_rate(optimizer: str, lr: float, base: float, batch: float, law: StepsLaw | Unknown) -> float:
    """The learning rate for another batch, from one that suits `base`: SGD's grows as much as the steps become fewer
    (McCandlish et al. 2018), that of Adam with the square root (Malladi et al. 2022). As long as B_crit is not known,
    steps are taken to become fewer as the batch grows.
    """
    fewer = batch / base if isinstance(law, Unknown) else 1 / float(law.ratio(batch, base)[0])
    return lr * (fewer if optimizer == "sgd" else float(np.sqrt(fewer)))

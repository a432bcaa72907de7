"""What runs learned, by epoch and by step; what settings are compared by; and the time to reach that."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, exp, floor, log10
from statistics import median

import numpy as np

from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group
from paceline.analysis.statistics import Interval, Series
from paceline.analysis.wording import accuracy, loss
from paceline.run.records import CLASSIFICATION, LANGUAGE_MODEL

MOST_POINTS = 400
# A target is one of these round numbers, so that it does not depend on the noise of the best run: of accuracies, and of
# losses, with any power of ten.
ROUND = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
ROUND_LOSS = (1, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.8, 2, 2.2, 2.5, 2.8, 3, 3.5, 4, 4.5, 5, 6, 7, 8, 9, 10)


@dataclass(frozen=True)
class Measure:
    """What settings are compared by, and in which words: the accuracy of classifiers, the loss of everything else."""

    name: str
    plural: str
    better: str
    worse: str
    up_to: str  # the last words before the worst value
    sign: int  # of values of which the highest is the best
    alike: float  # with few runs, a smaller difference is not significant

    def text(self, value: float) -> str:
        return accuracy(value) if self is ACCURACY else loss(value)

    def best(self, values: Iterable[float]) -> float | None:
        return max(values, key=lambda value: self.sign * value, default=None)

    def reaches(self, value: float, wanted: float) -> bool:
        return self.sign * value >= self.sign * wanted

    def margin(self, value: float) -> float:
        """The least significant difference from a value: of an accuracy in points, of a loss in relation to it."""
        return self.alike if self is ACCURACY else self.alike * abs(value)

    def round_target(self, values: Sequence[float]) -> float | None:
        """The best round number that all of these reach; None if there is none."""
        if self is ACCURACY:
            return max((each for each in ROUND if each <= min(values)), default=None)
        most = max(values)
        if not most > 0:
            return None
        power = 10.0 ** floor(log10(most))
        return float(f"{power * next(each for each in ROUND_LOSS if power * each >= most * (1 - 1e-9)):.3g}")


ACCURACY = Measure("accuracy", "accuracies", "higher", "lower", "down to", 1, 0.01)
LOSS = Measure("loss", "losses", "lower", "higher", "up to", -1, 0.02)


def measure_of(one: Group) -> Measure:
    return ACCURACY if one.first.summary.task == CLASSIFICATION else LOSS


def perplexity(run: Run, loss: float) -> float | None:
    """The perplexity that belongs to a loss of this run; None if it is not a language model."""
    return exp(min(loss, 700)) if run.summary.task == LANGUAGE_MODEL else None


@dataclass(frozen=True)
class Moment:
    """The end of an epoch (the first is 0), or a validation within it: training time and samples of all workers so far,
    accuracy and loss.
    """

    epoch: int
    seconds: float
    samples: int
    train_loss: float | None
    train_accuracy: float | None
    validation_loss: float | None
    validation_accuracy: float | None

    def value(self, of: str, what: str) -> float | None:
        """The accuracy or loss in validation or training."""
        found: float | None = getattr(self, f"{'validation' if of == 'validation' else 'train'}_{what}")
        return found


@dataclass(frozen=True)
class Reached:
    """Time to an accuracy or a loss of a setting: the median repeat, and the range of the repeats that reached it.

    None if at least half of the repeats did not.
    """

    group: Group
    of: str  # validation or training
    seconds: Interval | None
    reached: int
    runs: int


def moments(run: Run) -> list[Moment]:
    """The end of every epoch, and every validation; empty if nothing was trained.

    Time is training time, as in epoch_seconds.
    """
    s, steps = run.summary, run.steps[0]
    often = validated_by_steps(run)
    cut_short = run.spec.get("steps") is not None and len(s.epoch_seconds) == 1  # it did not complete an epoch
    if run.emulated or (cut_short and not often):
        return []
    epochs = len(s.train_accuracy) if s.task == CLASSIFICATION else len(s.train_loss)
    last = {step.epoch: step.step for step in steps if step.epoch < epochs and not cut_short}
    validated = {step - 1: index for index, step in enumerate(s.validation_steps)} if often else {
        step: epoch for epoch, step in last.items()}  # fmt: skip
    found, seconds, samples = list[Moment](), 0.0, 0
    for step in steps:
        seconds, samples, index = seconds + step.seconds, samples + step.samples, validated.get(step.step, -1)
        ended = last.get(step.epoch) == step.step
        if ended:
            seconds = sum(s.epoch_seconds[: step.epoch + 1])
        if ended or index >= 0:
            row = step.epoch if ended else -1
            found.append(Moment(step.epoch, seconds, samples, _at(s.train_loss, row), _at(s.train_accuracy, row),
                                _at(s.validation_loss, index), _at(s.validation_accuracy, index)))  # fmt: skip
    return found


def validated_by_steps(run: Run) -> bool:
    """Whether it was validated after a number of steps again and again, and not at the end of each epoch."""
    made = run.summary.validation_steps
    return bool(made and (run.spec.get("evaluate_every") or len(made) != len(run.summary.epoch_seconds)))


def seen(run: Run) -> int:
    """The number of samples in all its updates."""
    return sum(step.samples for step in run.steps[0])


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if 0 <= index < len(values) else None


def losses(run: Run) -> tuple[Series, Series, Series]:
    """Training time, samples of all workers and loss, each averaged to at most 400 points.

    Rank 0 knows the loss of whole updates, as a worker or as the first server.
    """
    steps = [step for step in run.steps[0] if step.loss is not None]
    if not steps:
        return np.empty(0), np.empty(0), np.empty(0)
    ends = {step.step: end for step, end in zip(run.steps[0], accumulate(s.seconds for s in run.steps[0]), strict=True)}
    seen = {step.step: end for step, end in zip(run.steps[0], accumulate(s.samples for s in run.steps[0]), strict=True)}
    table = np.array([(ends[step.step], seen[step.step], step.loss) for step in steps], dtype=float)
    edges = np.linspace(0, len(table), min(MOST_POINTS, len(table)) + 1).astype(int)
    stretches = np.split(table, edges[1:-1])
    thinned = np.array([(*stretch[-1, :2], stretch[:, 2].mean()) for stretch in stretches])
    return thinned[:, 0], thinned[:, 1], thinned[:, 2]


def measured_on(groups: Sequence[Group]) -> str:
    """Which accuracy or loss all of these have: that in validation, or else in training."""
    found = [[moment.value("validation", measure_of(one).name) is not None for moment in made]
             for one in groups for run in one.runs if (made := moments(run))]  # fmt: skip
    return "validation" if found and all(map(any, found)) else "training"


def _results(one: Group, of: str) -> list[list[tuple[float, float]]]:
    """Training time and accuracy or loss whenever they were measured, of the runs that have any."""
    what = measure_of(one).name
    found = [[(moment.seconds, value) for moment in moments(run) if (value := moment.value(of, what)) is not None]
             for run in one.runs]  # fmt: skip
    return [each for each in found if each]


def target(groups: Sequence[Group]) -> float | None:
    """The best round number that at least two runs and a quarter of them reach: an accuracy, 50 % or more, or a loss.

    The settings are of one task.
    """
    of = measured_on(groups)
    found = [measure_of(one).best(value for _, value in run) for one in groups for run in _results(one, of)]
    best = [value for value in found if value is not None]
    if not best:
        return None
    measure, enough = measure_of(groups[0]), ceil(max(min(2, len(best)), len(best) / 4))
    best.sort(key=lambda value: -measure.sign * value)
    return measure.round_target(best[:enough])


def time_to(groups: Sequence[Group], wanted: float) -> list[Reached]:
    """For every trained setting, the end of the first epoch, or the first validation, with this accuracy or loss."""
    of, found = measured_on(groups), []
    for one in groups:
        learned, measure = _results(one, of), measure_of(one)
        if not learned:
            continue
        first = [next((s for s, value in run if measure.reaches(value, wanted)), float("inf")) for run in learned]
        reached = [seconds for seconds in first if seconds < float("inf")]
        most = len(reached) * 2 > len(learned)
        seconds = Interval(median(first), min(reached), max(reached)) if most else None
        found.append(Reached(one, of, seconds, len(reached), len(learned)))
    return found

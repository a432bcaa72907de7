"""Accuracy and loss by epoch and by step, and time to accuracy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import median

import numpy as np

from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group
from paceline.analysis.statistics import Interval, Series

MOST_POINTS = 400
# A target accuracy is one of these round numbers, so that it does not depend on the noise of the best run.
ROUND = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)


@dataclass(frozen=True)
class Moment:
    """The end of an epoch (the first is 0): training time and samples of all workers so far, accuracy and loss."""

    epoch: int
    seconds: float
    samples: int
    train_loss: float
    train_accuracy: float
    validation_loss: float | None
    validation_accuracy: float | None


@dataclass(frozen=True)
class Reached:
    """Time to accuracy of a setting: the median repeat, and the range of the repeats that reached it.

    None if at least half of the repeats did not.
    """

    group: Group
    accuracy: float
    of: str  # validation or training
    seconds: Interval | None
    reached: int
    runs: int


def moments(run: Run) -> list[Moment]:
    """The end of every epoch; empty if nothing was trained. Time is training time, as in epoch_seconds."""
    s = run.summary
    cut_short = run.spec.get("steps") is not None and len(s.epoch_seconds) == 1  # it did not complete an epoch
    if run.emulated or cut_short:
        return []
    seen = np.bincount([step.epoch for step in run.steps[0]], [step.samples for step in run.steps[0]])
    ends = zip(accumulate(s.epoch_seconds), np.cumsum(seen), s.train_loss, s.train_accuracy, strict=False)
    return [
        Moment(epoch, seconds, int(samples), loss, accuracy,
               _at(s.validation_loss, epoch), _at(s.validation_accuracy, epoch))
        for epoch, (seconds, samples, loss, accuracy) in enumerate(ends)
    ]  # fmt: skip


def seen(run: Run) -> int:
    """The number of samples in all its updates."""
    return sum(step.samples for step in run.steps[0])


def _at(values: Sequence[float], index: int) -> float | None:
    return values[index] if index < len(values) else None


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
    """The kind of accuracy that all of these have: validation, or else training."""
    found = [moment for one in groups for run in one.runs for moment in moments(run)]
    return "validation" if found and all(m.validation_accuracy is not None for m in found) else "training"


def _accuracies(run: Run, of: str) -> list[tuple[float, float]]:
    """Training time and accuracy at the end of each epoch."""
    found = []
    for moment in moments(run):
        accuracy = moment.validation_accuracy if of == "validation" else moment.train_accuracy
        found.append((moment.seconds, float("nan") if accuracy is None else accuracy))
    return found


def target(groups: Sequence[Group]) -> float | None:
    """The highest round accuracy, 50 % or more, that at least two runs and a quarter of them reach."""
    of = measured_on(groups)
    learned = [found for one in groups for run in one.runs if (found := _accuracies(run, of))]
    if not learned:
        return None
    best = [max(accuracy for _, accuracy in found) for found in learned]
    enough = max(min(2, len(best)), len(best) / 4)
    fitting = [each for each in ROUND if sum(value >= each for value in best) >= enough]
    return max(fitting, default=None)


def time_to_accuracy(groups: Sequence[Group], accuracy: float) -> list[Reached]:
    """For every trained setting, the end of the first epoch with this accuracy."""
    of, found = measured_on(groups), []
    for one in groups:
        learned = [_accuracies(run, of) for run in one.runs if moments(run)]
        if not learned:
            continue
        first = [next((s for s, value in run if value >= accuracy), float("inf")) for run in learned]
        reached = [seconds for seconds in first if seconds < float("inf")]
        most = len(reached) * 2 > len(learned)
        seconds = Interval(median(first), min(reached), max(reached)) if most else None
        found.append(Reached(one, accuracy, of, seconds, len(reached), len(learned)))
    return found

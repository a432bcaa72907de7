"""When validations are due, which one is the best, and when training stops."""

from __future__ import annotations

import math

import pytest

from paceline.data.course import Course, Position
from paceline.errors import UsageError
from paceline.tasks.base import Sums, Task
from paceline.tasks.table import CLASSIFICATION, LANGUAGE_MODEL, REGRESSION, describe
from paceline.tasks.validations import Validations

COURSE = Course(samples=50, batch=8)  # 7 updates an epoch


def dues(made: Validations, start: int = 0) -> list[int]:
    """After which updates a training that starts here is validated."""
    found = []
    for done in range(start, made.total + 1):
        if made.is_due(done):
            found.append(done)
            made.add(done, Sums(1.0, 1.0, 0.0))
        assert done == made.total or made.due(done) > done
    return found


def test_validations_are_due_at_ends_of_epochs_or_every_so_many_updates_and_at_the_end() -> None:
    assert dues(Validations(COURSE, 17, CLASSIFICATION)) == [7, 14, 17]
    assert dues(Validations(COURSE, 14, CLASSIFICATION)) == [7, 14]
    assert dues(Validations(COURSE, 17, CLASSIFICATION, every=4)) == [4, 8, 12, 16, 17]
    assert dues(Validations(COURSE, 3, CLASSIFICATION, every=4)) == [3]
    assert Validations(COURSE, 17, CLASSIFICATION, enabled=False).due(7) == math.inf


def test_a_training_that_is_continued_is_first_validated_where_it_was_saved() -> None:
    for position, expected in [
        (Position(7, 0, 50), [7, 14, 17]),  # the epoch is over, and was not validated before it was saved
        (Position(5, 0, 40), [7, 14, 17]),
        (Position(9, 1, 16), [14, 17]),
    ]:
        course = Course(50, 8, position)
        assert dues(Validations(course, 17, CLASSIFICATION), position.step) == expected
        every = [step for step in (4, 8, 12, 16, 17) if step >= position.step]
        assert dues(Validations(course, 17, CLASSIFICATION, every=4), position.step) == every
    assert dues(Validations(Course(50, 8, Position(8, 1, 8)), 17, CLASSIFICATION, every=4), 8) == [8, 12, 16, 17]
    # Fewer updates than were made already: it is validated at once.
    assert Validations(Course(50, 8, Position(9, 1, 16)), 5, CLASSIFICATION).is_due(9)


@pytest.mark.parametrize(
    ("task", "by", "best"),
    [
        (CLASSIFICATION, "loss", 2),
        (CLASSIFICATION, "accuracy", 3),
        (LANGUAGE_MODEL, "perplexity", 2),
        (REGRESSION, "mean absolute error", 1),
        (describe("mine.py:loss"), "metric", 3),
    ],
)
def test_the_best_is_the_first_with_the_lowest_or_highest_figure(task: Task, by: str, best: int) -> None:
    made = Validations(COURSE, 17, task, by)
    rows = [(3.0, 0.1), (2.0, 0.4), (4.0, 0.7), (2.0, 0.7)]
    better = [made.add(number, Sums(loss, 1.0, metric)) for number, (loss, metric) in enumerate(rows, 1)]
    assert made.best == best
    assert max(number for number, each in enumerate(better, 1) if each) == best


def test_a_metric_that_the_task_has_not_returned_chooses_nothing() -> None:
    with pytest.raises(UsageError, match=r"--best-by metric: task mine.py:loss has not returned one; use loss"):
        Validations(COURSE, 17, describe("mine.py:loss"), "metric").add(7, Sums(1.0, 1.0, math.nan))


def test_patience_counts_validations_since_the_best_one() -> None:
    made = Validations(COURSE, 100, CLASSIFICATION, patience=2)
    stopped = []
    for number, loss in enumerate([3.0, 4.0, 2.0, 2.0, 2.5], 1):
        made.add(number, Sums(loss, 1.0, 0.0))
        stopped.append(made.exhausted)
    assert stopped == [False, False, False, False, True]
    made.forget(5)  # training goes back to where it was saved before the fifth
    assert not made.exhausted
    assert made.best == 3
    made.patience = 0
    made.add(5, Sums(2.5, 1.0, 0.0))
    assert not made.exhausted

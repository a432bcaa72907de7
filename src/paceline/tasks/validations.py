"""When a training is validated, which validation is the best, and when there are no better ones any more; no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from paceline.data.course import Course
from paceline.errors import UsageError
from paceline.tasks.base import Sums, Task


@dataclass
class Validations:
    """The validations of a training of `total` updates. `values` are those of the figure `by`, by number of updates."""

    course: Course
    total: int
    task: Task
    by: str = "loss"
    every: int = 0  # updates; 0: at the end of every epoch
    patience: int = 0  # how many in a row may be no better than the best one; 0: any number
    enabled: bool = True  # whether there is a validation set
    values: dict[int, float] = field(default_factory=dict)

    def due(self, done: int) -> float:
        """After how many updates, at least `done`, the next validation is due."""
        if not self.enabled:
            return math.inf
        done = max(1, done + (done in self.values))
        end = -(-done // self.every) * self.every if self.every else self.course.end(self.course.after(done).epoch)
        return min(end, max(self.total, self.course.start.step))

    def is_due(self, done: int) -> bool:
        return done not in self.values and self.due(done) == done

    def add(self, done: int, sums: Sums) -> bool:
        """Count a validation after this many updates; true if it is the best one so far."""
        figures = self.task.figures(sums)
        if self.by not in figures:
            raise UsageError(
                f"--best-by {self.by}: task {self.task.name} has not returned one; use {', '.join(figures)}"
            )
        self.values[done] = figures[self.by]
        return self.best == done

    def forget(self, done: int) -> None:
        """Training goes back to this number of updates, where it is validated again."""
        self.values = {number: value for number, value in self.values.items() if number < done}

    @property
    def best(self) -> int | None:
        """After how many updates the best validation was; of equal ones, the first."""
        return max(sorted(self.values), key=self._rank, default=None)

    @property
    def exhausted(self) -> bool:
        """Whether so many validations in a row were no better than the best that training stops."""
        best = self.best
        return best is not None and 0 < self.patience <= sum(number > best for number in self.values)

    def _rank(self, done: int) -> float:
        value = self.task.sign(self.by) * self.values[done]
        return -math.inf if math.isnan(value) else value

"""Which samples of which epoch each update has, also if a training continues in the middle of an epoch; no torch."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.strict_json import Count


@dataclass(frozen=True)
class Position:
    """A point of a training: how many updates were made, and how many samples of the current epoch they used.

    If all samples of the epoch are used, the epoch has not been evaluated yet.
    """

    step: Count = 0
    epoch: Count = 0
    used: Count = 0


START = Position()


@dataclass(frozen=True)
class Course:
    """The updates of a training from `start` on.

    Each takes the next `batch` positions of its epoch's shuffle; the last one of an epoch may have fewer. The batch may
    differ from that of the updates before `start`, so an epoch can have updates of two sizes.
    """

    samples: int
    batch: int
    start: Position = START

    @property
    def per_epoch(self) -> int:
        """Updates of a whole epoch."""
        return -(-self.samples // self.batch)

    @property
    def _first(self) -> int:
        """Updates that the epoch of `start` still has."""
        return -(-(self.samples - self.start.used) // self.batch)

    def epoch(self, step: int) -> int:
        done = step - self.start.step - self._first
        return self.start.epoch if done < 0 else self.start.epoch + 1 + done // self.per_epoch

    def number(self, step: int) -> int:
        """How many updates of this size its epoch has before it."""
        done = step - self.start.step
        if done < self._first:
            return self.start.used // self.batch + done
        return (done - self._first) % self.per_epoch

    def span(self, step: int) -> range:
        """The positions of an update's samples in its epoch's shuffle."""
        done = step - self.start.step
        first = (
            self.start.used + done * self.batch
            if done < self._first
            else (done - self._first) % self.per_epoch * self.batch
        )
        return range(first, min(first + self.batch, self.samples))

    def end(self, epoch: int) -> int:
        """The number of updates after this epoch."""
        return self.start.step + self._first + (epoch - self.start.epoch) * self.per_epoch

    def after(self, steps: int) -> Position:
        """The position after this many updates."""
        if steps == self.start.step:
            return self.start
        return Position(steps, self.epoch(steps - 1), self.span(steps - 1).stop)

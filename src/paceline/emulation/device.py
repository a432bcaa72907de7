"""Sleeps for the time of a step instead of computing it."""

from __future__ import annotations

import time

from paceline.emulation.timing import Timing


class EmulatedDevice:
    """A rank's emulated device. A step begins with its samples, and then reaches points at fractions of its time.

    All points are on one clock, so a sleep that ends late does not delay the next one.
    """

    def __init__(self, seconds_per_sample: float, timing: Timing) -> None:
        self.seconds_per_sample, self.timing = seconds_per_sample, timing
        self._start = self._seconds = 0.0

    def begin(self, samples: int) -> None:
        self._start, self._seconds = time.monotonic(), samples * self.seconds_per_sample

    def forward(self) -> None:
        self.reach(self.timing.forward)

    def reach(self, part: float) -> None:
        """Return when this fraction of the step's time has passed."""
        left = self._start + part * self._seconds - time.monotonic()
        if left > 0:
            time.sleep(left)

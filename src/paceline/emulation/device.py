"""Sleeps for the time of a step instead of computing it."""

from __future__ import annotations

import math
import random
import time

from paceline.emulation.timing import Timing


class EmulatedDevice:
    """A rank's emulated device. A step begins with its samples, and then reaches points at fractions of its time.

    All points are on one clock, so a sleep that ends late does not delay the next one.

    With `noise`, the time of each step is multiplied by a log-normal random factor with mean 1 and this coefficient of
    variation; the factors follow from the seed.
    """

    def __init__(self, seconds_per_sample: float, timing: Timing, noise: float = 0.0, seed: str = "") -> None:
        self.seconds_per_sample, self.timing = seconds_per_sample, timing
        self._variance, self._random = math.log1p(noise**2), random.Random(seed)  # variance of the logarithm
        self._start = self._seconds = 0.0

    def begin(self, samples: int) -> None:
        factor = self._random.lognormvariate(-self._variance / 2, math.sqrt(self._variance))
        self._start, self._seconds = time.monotonic(), samples * self.seconds_per_sample * factor

    def forward(self) -> None:
        self.reach(self.timing.forward)

    def reach(self, part: float) -> None:
        """Return when this fraction of the step's time has passed."""
        left = self._start + part * self._seconds - time.monotonic()
        if left > 0:
            time.sleep(left)

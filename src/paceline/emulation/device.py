"""Sleeps for the time of a step instead of computing it."""

from __future__ import annotations

import math
import random
import time

from paceline.emulation.timing import Timing


class StepNoise:
    """Draws a factor for the time of each step: log-normal, with mean 1 and this coefficient of variation. The factors
    follow from the seed.
    """

    def __init__(self, noise: float = 0.0, seed: str = "") -> None:
        self._variance, self._random = math.log1p(noise**2), random.Random(seed)  # variance of the logarithm

    def draw(self) -> float:
        return self._random.lognormvariate(-self._variance / 2, math.sqrt(self._variance))


class EmulatedDevice:
    """A rank's emulated device. A step begins with its samples, and then reaches points at fractions of its time.

    All points are on one clock, so a sleep that ends late does not delay the next one.
    """

    def __init__(self, seconds_per_sample: float, timing: Timing, noise: float = 0.0, seed: str = "") -> None:
        self.seconds_per_sample, self.timing = seconds_per_sample, timing
        self._noise = StepNoise(noise, seed)
        self._start = self._seconds = 0.0

    def begin(self, samples: int) -> None:
        self._start, self._seconds = time.monotonic(), samples * self.seconds_per_sample * self._noise.draw()

    def forward(self) -> None:
        self.reach(self.timing.forward)

    def reach(self, part: float) -> None:
        """Return when this fraction of the step's time has passed."""
        left = self._start + part * self._seconds - time.monotonic()
        if left > 0:
            time.sleep(left)


class DeviceInTurns:
    """The emulated device of a rank that computes and waits for messages in turns, because it has a part of the model.

    What a sleep ends too late is taken from the next one, so that errors do not add up.
    """

    def __init__(self, seconds_per_sample: float, noise: float = 0.0, seed: str = "") -> None:
        self.seconds_per_sample, self._noise = seconds_per_sample, StepNoise(noise, seed)
        self._factor, self._late = 1.0, 0.0

    def begin(self) -> None:
        """Begin a step."""
        self._factor, self._late = self._noise.draw(), 0.0

    def compute(self, part: float, samples: int) -> None:
        """Compute this fraction of what the whole model computes for these samples, forward and backward."""
        until = self.now() + part * samples * self.seconds_per_sample * self._factor - self._late
        if (left := until - self.now()) > 0:
            self.sleep(left)
        self._late = max(0.0, self.now() - until)

    def now(self) -> float:
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)

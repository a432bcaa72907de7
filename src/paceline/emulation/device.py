"""Takes the time of a step that it does not compute."""

from __future__ import annotations

import time

from paceline.emulation.timing import Timing


class EmulatedDevice:
    """A rank's device. A step begins with its samples, and then reaches points of it, in parts of its time.

    The points are on one clock: a sleep that ends late does not make the next one end late.
    """

    def __init__(self, seconds_per_image: float, timing: Timing) -> None:
        self.seconds_per_image, self.timing = seconds_per_image, timing
        self._start = self._seconds = 0.0

    def begin(self, samples: int) -> None:
        self._start, self._seconds = time.monotonic(), samples * self.seconds_per_image

    def forward(self) -> None:
        self.reach(self.timing.forward)

    def reach(self, part: float) -> None:
        """Return when this part of the step's time has passed."""
        left = self._start + part * self._seconds - time.monotonic()
        if left > 0:
            time.sleep(left)

"""The steps of a run as a curve of a bounded number of points, however long the run is."""

from __future__ import annotations

from dataclasses import dataclass

from paceline.run.records import Step

MOST = 400  # points


@dataclass
class Point:
    """What some steps in a row have in common: sums, and the last one's number and time."""

    step: int
    time: float
    seconds: float = 0.0
    samples: int = 0
    loss: float = 0.0
    losses: int = 0

    def add(self, other: Point) -> None:
        self.step, self.time = other.step, other.time
        for name in ("seconds", "samples", "loss", "losses"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    @property
    def mean_loss(self) -> float | None:
        return self.loss / self.losses if self.losses else None

    @property
    def rate(self) -> float:
        """Samples per second."""
        return self.samples / self.seconds


class Curve:
    """Each point is the mean of `every` steps; when there are too many points, twice as many steps make one."""

    def __init__(self) -> None:
        self.every = 1
        self._points: dict[int, Point] = {}  # by the number of a step // every
        self._since = 0  # the step from which on the run's present processes make them

    @property
    def points(self) -> list[Point]:
        return list(self._points.values())

    def add(self, step: Step) -> None:
        """A step that was made before is made again, after a checkpoint: what came after it does not count."""
        if self._points and step.step <= next(reversed(self._points.values())).step:
            self.go_back(step.step)
        self._merge(Point(step.step, step.time, step.seconds, step.samples, step.loss or 0.0,
                          step.loss is not None))  # fmt: skip
        while len(self._points) > MOST:
            self.every, points = 2 * self.every, self.points
            self._points = {}
            for point in points:
                self._merge(point)

    def _merge(self, point: Point) -> None:
        if known := self._points.get(point.step // self.every):
            known.add(point)
        else:
            self._points[point.step // self.every] = point

    def go_back(self, step: int) -> None:
        """The run continues with this step."""
        self._since = step
        self._points = {key: point for key, point in self._points.items() if point.step < step}

    def seconds_per_step(self) -> float | None:
        """Of the last quarter of the steps, with what happens between them, such as validations."""
        points = [point for point in self._points.values() if point.step >= self._since]
        points = points[max(0, len(points) * 3 // 4 - 1) :]
        if len(points) < 2:
            return None
        return (points[-1].time - points[0].time) / (points[-1].step - points[0].step)

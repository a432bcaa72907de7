"""Which values a line of a run's records has for trackers and traces: one rule, as a run trains and afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from paceline.run.records import Checkpoint, Epoch, FinalTest, Line, NodeSample, Step, Validation

SHORTEST = 0.1  # seconds between samples: rates over less are noise
# Lines that have values for trackers.
TRACKED: tuple[type[Line], ...] = (Step, Epoch, Validation, FinalTest, Checkpoint)


@dataclass(frozen=True)
class Point:
    """Values by name at one step, and when that was, in seconds of the Unix clock."""

    step: int
    time: float
    values: dict[str, float]


class RankValues:
    """The values of a rank's lines, which must come in their order: some have neither a step nor a time."""

    def __init__(self) -> None:
        self._step, self._time = 0, 0.0  # of the last step

    def of(self, line: Line) -> Point | None:
        match line:
            case Step():
                self._step, self._time = line.step, line.time
                values = {"train/loss": line.loss, "train/learning_rate": line.lr,
                          **_under("train", line.metrics), "speed/samples_per_second": line.samples / line.seconds,
                          "speed/tokens_per_second": line.tokens and line.tokens / line.seconds,
                          "seconds/step": line.seconds, **_under("seconds", line.spans),
                          **_under("figures", line.figures)}  # fmt: skip
                return self._point(values, line.step, line.time)
            case Validation():  # also the final test
                return self._point(_under(line.kind, line.figures), self._step + 1 if line.step is None else line.step)
            case Epoch():
                own = {"loss": line.loss, "accuracy": line.accuracy, "seconds": line.seconds, **line.metrics}
                return self._point(_under("epoch", own), self._step)
            case Checkpoint():
                values = {"checkpoint/seconds": line.seconds, "checkpoint/bytes": line.bytes}
                return self._point(values, line.step, line.time)
        return None

    def _point(self, values: Mapping[str, Any], step: int, time: float | None = None) -> Point | None:
        known = _known(values)
        return Point(step, self._time if time is None else time, known) if known else None


class NodeValues:
    """The values of a node's samples, in their order. Its network is loopback if the run has one node only."""

    def __init__(self, *, alone: bool) -> None:
        self._alone = alone
        self._last: NodeSample | None = None
        self._count = 0

    def of(self, sample: NodeSample) -> Point | None:
        values: dict[str, float | None] = {"cores_busy": sample.cpu, "cores_of_run": sample.run_cpu,
                                           "memory_bytes": sample.memory_bytes}  # fmt: skip
        last, elapsed = self._last, sample.time - self._last.time if self._last else 0.0
        if last and elapsed >= SHORTEST and sample.interfaces and last.interfaces:
            for name, column in (("bits_in_per_second", "rx_bytes"), ("bits_out_per_second", "tx_bytes")):
                moved = self._sum(sample, column) - self._sum(last, column)
                values[name] = 8 * moved / elapsed if moved >= 0 else None  # less: a new interface
        self._last, self._count = sample, self._count + 1
        return Point(self._count - 1, sample.time, known) if (known := _known(values)) else None

    def _sum(self, sample: NodeSample, column: str) -> int:
        return sum(getattr(traffic, column) for traffic in sample.counted(alone=self._alone))


def _under(group: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{group}/{name}": value for name, value in values.items()}


def _known(values: Mapping[str, Any]) -> dict[str, float]:
    """Those that are numbers, and finite."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in numbers.items() if isfinite(value)}

"""What a rank records as it trains: a line a step with its parts, a line an epoch. Usable from any training loop."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Protocol
from weakref import WeakSet

from paceline.run.core_clock import CoreClock
from paceline.run.folder import rank_file, read_steps
from paceline.run.lines import LineWriter
from paceline.run.records import Line, Start, Step, Timeline

FLUSH_SECONDS = 1.0
LEAST_QUEUED = 1e-5  # seconds
_OPEN: WeakSet[Recorder] = WeakSet()


class Follower(Protocol):
    """Is given every line that a rank records, such as a tracker's."""

    def write(self, line: Line) -> None: ...

    def close(self) -> None: ...


def flush_all() -> None:
    """Write what all open recorders of this process have: a checkpoint must not be newer than the records."""
    for recorder in list(_OPEN):
        recorder.flush()


class Recorder:
    """Appends to a rank's file, and keeps what the summary needs. The thread that opens it is the one that trains."""

    def __init__(self, folder: Path, rank: int, follower: Follower | None = None) -> None:
        self.folder, self.path, self._follower = folder, rank_file(folder, rank), follower
        self._lines, self._flushed = LineWriter(self.path), time.monotonic()
        self.step_seconds: list[float] = []
        self.step_samples: list[int] = []
        self.input_seconds = 0.0
        self.began = self.ended = 0.0  # the steps, by the Unix clock
        self._cpu, self.clock = time.process_time(), CoreClock()
        self.write(Start(rank, time.time()))
        self._lines.flush()
        _OPEN.add(self)

    def write(self, line: Line) -> None:
        self._lines.write(line)
        if self._follower:
            self._follower.write(line)

    def step(
        self,
        step: int,
        epoch: int,
        seconds: float,
        samples: int,
        parts: Mapping[str, float],
        queued: Mapping[str, float] | None = None,
        *,
        own: int | None = None,
        loss: float | None = None,
        lr: float | None = None,
        figures: Mapping[str, Any] | None = None,
        tokens: int | None = None,
        metrics: Mapping[str, float] | None = None,
        norm: float | None = None,
        own_norm: float | None = None,
    ) -> None:
        """A step that has just ended: `samples` and `tokens` of all ranks, its whole time, and its parts in seconds.

        `queued` is the time, of each part, that was spent ready to run without a core; too little to matter is left
        out. `figures` are the strategy's own, `metrics` a user's; `norm` and `own_norm` are of gradients.
        """
        now = time.time()
        self.began, self.ended = self.began or now - seconds, now
        self.step_seconds.append(seconds)
        self.step_samples.append(samples)
        self.input_seconds += parts.get("input", 0.0)
        spans = {name: round(value, 7) for name, value in parts.items()}
        missed = {name: round(value, 7) for name, value in (queued or {}).items() if value >= LEAST_QUEUED}
        self.write(
            Step(
                step,
                epoch,
                round(now, 6),
                round(seconds, 7),
                samples,
                spans,
                loss,
                lr,
                own,
                missed,
                dict(figures or {}),
                tokens,
                dict(metrics or {}),
                norm,
                own_norm,
            )
        )
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._lines.flush()
            self._flushed = time.monotonic()

    def restore(self) -> None:
        """Count the steps that an earlier process of this run has recorded."""
        steps = read_steps(self.path)
        self.step_seconds = [step.seconds for step in steps]
        self.step_samples = [step.samples for step in steps]
        self.input_seconds = sum(step.spans.get("input", 0.0) for step in steps)

    def timeline(self, step: int, events: Sequence[tuple[str, int, float, float]]) -> None:
        """What was done in a step, one by one: what, of which micro-batch, when (of perf_counter) and how long."""
        began = events[0][2]
        rows = tuple((what, micro, round(at - began, 6), round(seconds, 6)) for what, micro, at, seconds in events)
        self.write(Timeline(step, round(time.time() - time.perf_counter() + began, 6), rows))

    def update_seconds(self, together: int = 1) -> float | None:
        """The median time of a step; where steps are only timed `together`, of the mean of such a round."""
        steps = self.step_seconds
        rounds = [steps[i : i + together] for i in range(0, len(steps) - together + 1, together)] or [steps]
        return median(fmean(each) for each in rounds) if steps else None

    def samples_per_second(self) -> float | None:
        """Samples over time, without the first steps, which fill caches and find out about overlap."""
        skip = min(30, len(self.step_seconds) // 4)
        seconds = sum(self.step_seconds[skip:])
        return sum(self.step_samples[skip:]) / seconds if seconds else None

    def cpu_seconds(self) -> float:
        """Processor time that this rank's process has used since this was opened."""
        return time.process_time() - self._cpu

    def flush(self) -> None:
        self._lines.flush()

    def sync(self) -> None:
        """Wait until what was flushed is on the disk; other threads may call it."""
        self._lines.sync()

    def close(self) -> None:
        _OPEN.discard(self)
        self._lines.close()
        if self._follower:
            self._follower.close()
        self.clock.close()

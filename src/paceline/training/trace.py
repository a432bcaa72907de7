"""What a rank writes down as it trains: a line a step with its spans, a line an epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paceline.disturbance import disturbance
from paceline.records import LineWriter, read_nodes
from paceline.strategies.core_clock import CoreClock

FLUSH_SECONDS = 1.0
LEAST_QUEUED = 1e-5  # seconds


class Trace:
    """Appends to rank_N.jsonl, and keeps what the summary needs. The thread that opens it is the one that trains."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self._lines = path, LineWriter(path)
        self._flushed = time.monotonic()
        self.step_seconds: list[float] = []
        self.step_samples: list[int] = []
        self.input_seconds = 0.0
        self._began = self._ended = 0.0  # the steps, by the Unix clock
        self._cpu, self.clock = time.process_time(), CoreClock()
        self.record("start", schema=1, rank=rank, time=time.time())
        self._lines.flush()

    def record(self, kind: str, **values: Any) -> None:
        self._lines.write(kind, **values)

    def step(
        self,
        step: int,
        epoch: int,
        seconds: float,
        samples: int,
        parts: Mapping[str, float],
        queued: Mapping[str, float] | None = None,
        **values: Any,
    ) -> None:
        """A step that has just ended: `samples` of all ranks, its whole time, and its parts in seconds.

        `queued` is what of the parts was spent ready to run, without a core; too little to matter is left out.
        """
        now = time.time()
        self._began, self._ended = self._began or now - seconds, now
        self.step_seconds.append(seconds)
        self.step_samples.append(samples)
        self.input_seconds += parts.get("input", 0.0)
        spans = {name: round(value, 7) for name, value in parts.items()}
        missed = {name: round(value, 7) for name, value in (queued or {}).items() if value >= LEAST_QUEUED}
        self.record("step", step=step, epoch=epoch, time=round(now, 6), seconds=round(seconds, 7),
                    samples=samples, **values, spans=spans, **({"queued": missed} if missed else {}))  # fmt: skip
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._lines.flush()
            self._flushed = time.monotonic()

    def timeline(self, step: int, events: Sequence[tuple[str, int, float, float]]) -> None:
        """What was done in a step, one by one: what, of which micro-batch, when (of perf_counter) and how long."""
        began = events[0][2]
        rows = [[what, micro, round(start - began, 6), round(seconds, 6)] for what, micro, start, seconds in events]
        self.record("timeline", step=step, time=round(time.time() - time.perf_counter() + began, 6), events=rows)

    def update_seconds(self, together: int = 1) -> float | None:
        """The median of a step; of so many steps that are timed together, their mean."""
        steps = self.step_seconds
        rounds = [steps[i : i + together] for i in range(0, len(steps) - together + 1, together)] or [steps]
        return median(fmean(each) for each in rounds) if steps else None

    def images_per_second(self) -> float | None:
        """Samples over time, the first steps left out: they fill caches and find out about overlap."""
        skip = min(30, len(self.step_seconds) // 4)
        seconds = sum(self.step_seconds[skip:])
        return sum(self.step_samples[skip:]) / seconds if seconds else None

    def cpu_seconds(self) -> float:
        """Processor time that this rank's process has used since the trace was opened."""
        return time.process_time() - self._cpu

    def disturbance(self, *, emulated: bool) -> str | None:
        """Why these times are not to be compared, by the nodes' samples in the same folder."""
        try:
            nodes = read_nodes(self.path.parent).values()
        except ValueError:  # a damaged file of samples; the training itself is sound
            return None
        return disturbance(nodes, self._began, self._ended, emulated=emulated)

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()
        self.clock.close()

"""What a rank writes down as it trains: a line a step with its spans, a line an epoch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from paceline.records import LineWriter

FLUSH_SECONDS = 1.0


class Trace:
    """Appends to rank_N.jsonl, and keeps what the summary needs."""

    def __init__(self, path: Path, rank: int) -> None:
        self.path, self._lines = path, LineWriter(path)
        self._flushed = time.monotonic()
        self.step_seconds: list[float] = []
        self.step_samples: list[int] = []
        self.input_seconds = 0.0
        self.record("start", schema=1, rank=rank, time=time.time())
        self._lines.flush()

    def record(self, kind: str, **values: Any) -> None:
        self._lines.write(kind, **values)

    def step(
        self, step: int, epoch: int, seconds: float, samples: int, parts: Mapping[str, float], **values: Any
    ) -> None:
        """A step that has just ended: `samples` of all ranks, its whole time, and its parts in seconds."""
        self.step_seconds.append(seconds)
        self.step_samples.append(samples)
        self.input_seconds += parts.get("input", 0.0)
        spans = {name: round(value, 7) for name, value in parts.items()}
        self.record("step", step=step, epoch=epoch, time=round(time.time(), 6), seconds=round(seconds, 7),
                    samples=samples, **values, spans=spans)  # fmt: skip
        if time.monotonic() - self._flushed > FLUSH_SECONDS:
            self._lines.flush()
            self._flushed = time.monotonic()

    def timeline(self, step: int, events: Sequence[tuple[str, int, float, float]]) -> None:
        """What was done in a step, one by one: what, of which micro-batch, when (of perf_counter) and how long."""
        began = events[0][2]
        rows = [[what, micro, round(start - began, 6), round(seconds, 6)] for what, micro, start, seconds in events]
        self.record("timeline", step=step, time=round(time.time() - time.perf_counter() + began, 6), events=rows)

    def update_seconds(self) -> float | None:
        return median(self.step_seconds) if self.step_seconds else None

    def images_per_second(self) -> float | None:
        """Samples over time, the first steps left out: they fill caches and find out about overlap."""
        skip = min(30, len(self.step_seconds) // 4)
        seconds = sum(self.step_seconds[skip:])
        return sum(self.step_samples[skip:]) / seconds if seconds else None

    def flush(self) -> None:
        self._lines.flush()

    def close(self) -> None:
        self._lines.close()

"""Rank 0's progress output: lines like those of Wang and Yang's Figure 6, and a bar on a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

from paceline.disturbance import warning
from paceline.errors import visible
from paceline.messages import bar_options, quiet
from paceline.run.records import Summary


class Console:
    """Writes lines to the stream and to the rank's log; ranks other than 0 have no stream."""

    def __init__(self, stream: TextIO | None, log: Path | None = None) -> None:
        self._stream = stream
        self._log = log.open("a", buffering=1) if log else None
        self._bar: Any = None
        self.leads = True  # whether this rank speaks for the run; elastic runs change it
        self._recent: list[tuple[float, int]] = []  # seconds and samples of the steps since the last line

    def line(self, text: str = "", *, always: bool = False) -> None:
        """Under --quiet only into the log, unless it is a warning, which `always` is shown."""
        if not self.leads:
            return
        text = visible(text)
        if self._log:
            self._log.write(text + "\n")
        if self._stream and (always or not quiet()):
            if self._bar is not None:
                self._bar.clear()
            try:
                print(text, file=self._stream, flush=True)
            except BrokenPipeError:  # the reader has exited, as in `| head`; the training continues
                with open(os.devnull, "w") as nowhere:
                    os.dup2(nowhere.fileno(), self._stream.fileno())
                self._stream = None
            if self._bar is not None:
                self._bar.refresh()

    def total(self, summary: Summary) -> None:
        """Print the total time, what the steps waited for, and a warning if the run was disturbed."""
        self.line(f"Total run time: {summary.total_seconds:.2f} s")
        if summary.verdict:
            self.line(summary.verdict)
        if summary.disturbed:
            self.line(warning(summary.disturbed), always=True)

    def start_bar(self, steps: int, title: str, done: int = 0) -> None:
        """Start a progress bar on standard error, if that is a terminal; some steps may be `done`."""
        options = bar_options()
        if self.leads and self._stream and not options.get("disable"):
            from tqdm import tqdm

            self._bar = tqdm(total=steps, desc=title, initial=done, unit="batch", **options)

    def step(self, number: int, seconds: float, samples: int, left: int, every: int, shown: Mapping[str, str]) -> None:
        """Advance the bar after a step, with `left` steps to go; print a line every `every` steps."""
        self.advance(**shown)
        if not every:
            return
        self._recent.append((seconds, samples))
        if number % every == 0:
            total = sum(seconds for seconds, _ in self._recent)
            words = [f"{name}: {value}" for name, value in shown.items()]
            if total > 0:
                words.append(f"{sum(samples for _, samples in self._recent) / total:,.0f} samples/s")
            words.append(f"{timedelta(seconds=round(left * total / len(self._recent)))} left")
            self.line(f"At step {number}, update time for each batch: {seconds:.4f} s, {', '.join(words)}")
            self._recent.clear()

    def advance(self, **shown: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix(shown, refresh=False)
            self._bar.update()

    def end_bar(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def close(self) -> None:
        self.end_bar()
        if self._log:
            self._log.close()

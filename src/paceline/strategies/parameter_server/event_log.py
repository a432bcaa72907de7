"""Reports the leader's events: updates, epochs, and workers that joined or were lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.checkpoint.save import Saver
from paceline.run.lines import read_lines
from paceline.server.ledger import Part, UpdatePlan
from paceline.server.tally import Result
from paceline.strategies.engine import StepResult, StepTimer
from paceline.strategies.parameter_server.figures import Joined, Lost, WentBack
from paceline.strategies.saving import report

if TYPE_CHECKING:
    from paceline.run.recorder import Recorder
    from paceline.training.driver import Job
    from paceline.training.progress import Progress


class EventLog:
    """Passes the leader's events to the driver's progress, the recorder and the console."""

    def __init__(
        self,
        job: Job,
        plan: UpdatePlan,
        progress: Progress,
        ranks_up: Callable[[dict[int, dict[str, Any]]], None],
        saver: Saver | None = None,
    ) -> None:
        self._job, self._plan, self._progress, self._ranks_up = job, plan, progress, ranks_up
        self._ranks: dict[int, dict[str, Any]] = {}
        self.can_save: Callable[[], bool] = lambda: True
        self._last = self._epoch_start = time.perf_counter()
        self._shown, self._saver = -1, saver

    def begun(self, ranks: dict[int, dict[str, Any]]) -> None:
        self._ranks = dict(ranks)
        self._ranks_up(self._ranks)
        if self._saver and not self.can_save():
            self._job.console.line("No checkpoints: not all servers see the run folder of rank 0", always=True)
        read = max(row.get("read_seconds", 0.0) for row in ranks.values())
        self._job.summary.read_seconds = read
        if self._job.spec.reads:
            self._job.console.line(f"Time taken to read the data: {read:.2f} s")
        self._last = self._epoch_start = time.perf_counter()

    def updated(self, update: int, epoch: int, result: Result) -> None:
        if epoch > self._shown:
            self._shown = epoch
            self._progress.start_epoch(epoch, range(update, min(self._plan.course.end(epoch), self._plan.updates)))
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._progress.step(update, epoch, StepResult(result.sums, result.count, 0), seconds, StepTimer())
        self.report()

    def skipped(self, update: int) -> None:
        self._job.summary.steps, self._job.summary.skipped = update + 1, self._job.summary.skipped + 1
        self._job.console.line(f"Skipped update {update + 1}: the loss or a gradient is not finite", always=True)

    def report(self) -> None:
        """Record and say how the last checkpoint ended."""
        if self._saver:
            report(self._job, self._saver)

    def epoch_ended(self, epoch: int, result: Result) -> None:
        now = time.perf_counter()
        seconds, self._epoch_start = now - self._epoch_start, now
        self._progress.end_epoch(epoch, seconds, result.sums, result.count)

    def evaluated(self, name: str, epoch: int, update: int, result: Result) -> None:
        now = time.perf_counter()
        self._epoch_start, self._last = self._epoch_start + now - self._last, now  # it is not the epoch's time
        self._progress.evaluated(name, epoch, update, result.sums, samples=result.count)

    def joined(self, rank: int, about: dict[str, Any], *, back: bool) -> None:
        self._ranks[rank] = about
        self._ranks_up(self._ranks)
        if back:
            self._job.console.line(f"Rank {rank} has rejoined after {self._job.summary.steps} updates")
        self._job.recorder.write(Joined(rank, time.time(), self._job.summary.steps))
        self._job.recorder.flush()

    def lost(self, rank: int, why: str, parts: list[Part]) -> None:
        samples, update = sum(part.stop - part.start for part in parts), self._job.summary.steps
        self._job.recorder.write(Lost(rank, why, time.time(), update, samples))
        self._job.recorder.flush()
        self._job.console.line(
            f"Lost rank {rank} after {update} updates: {why}; other workers get its {samples} samples", always=True
        )

    def went_back(self, number: int, why: str) -> None:
        self._job.console.line(f"Restored the checkpoint after {number} updates: {why}", always=True)
        self._job.recorder.write(WentBack(number, why, time.time()))
        self._shown = min(self._shown, self._plan.epoch(number) - 1)
        self._job.summary.steps = number


def lost_workers(recorder: Recorder) -> list[dict[str, Any]]:
    """The workers that were lost: after how many updates, why, and after how many they rejoined, if they did."""
    found: list[dict[str, Any]] = []
    recorder.flush()
    for line in read_lines(recorder.path, Lost, Joined):
        if isinstance(line, Lost):
            row = {"rank": line.rank, "why": line.why, "update": line.update, "samples": line.samples, "back": None}
            found.append(row)
            continue
        assert isinstance(line, Joined)
        for row in found:
            if row["rank"] == line.rank and row["back"] is None:
                row["back"] = line.update
    return found

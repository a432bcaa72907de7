"""What the server that leads tells of the training as it goes: updates, epochs, who came and who was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from paceline.records import read_lines
from paceline.server.ledger import Part, UpdatePlan
from paceline.server.tally import Result
from paceline.strategies.engine import Evaluation, StepResult, StepTimer

if TYPE_CHECKING:
    from paceline.training.driver import Job
    from paceline.training.progress import Progress
    from paceline.training.trace import Trace


class Chronicle:
    """Is told by the leader, and tells the driver's progress, the trace and the console."""

    def __init__(
        self, job: Job, plan: UpdatePlan, progress: Progress, ranks_up: Callable[[dict[int, dict[str, Any]]], None]
    ) -> None:
        self._job, self._plan, self._progress, self._ranks_up = job, plan, progress, ranks_up
        self._ranks: dict[int, dict[str, Any]] = {}
        self._last = self._epoch_start = time.perf_counter()
        self._shown = -1

    def begun(self, ranks: dict[int, dict[str, Any]]) -> None:
        self._ranks = dict(ranks)
        self._ranks_up(self._ranks)
        read = max(row.get("read_seconds", 0.0) for row in ranks.values())
        self._job.summary.read_seconds = read
        if self._job.spec.reads:
            self._job.console.line(f"Time taken to read the data: {read:.2f} s")
        self._last = self._epoch_start = time.perf_counter()

    def updated(self, update: int, epoch: int, result: Result) -> None:
        if epoch > self._shown:
            self._shown = epoch
            self._progress.start_epoch(epoch, min(self._plan.per_epoch, self._plan.updates - update))
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._progress.step(
            update, epoch, StepResult(result.loss, result.correct, result.count, False), seconds, StepTimer()
        )

    def epoch_ended(self, epoch: int, result: Result) -> None:
        now = time.perf_counter()
        seconds, self._epoch_start = now - self._epoch_start, now
        self._progress.end_epoch(epoch, seconds, result.loss, result.correct, result.count)

    def evaluated(self, name: str, epoch: int, result: Result) -> None:
        self._epoch_start = self._last = time.perf_counter()
        found = Evaluation(result.loss / result.count, result.correct / result.count)
        self._progress.evaluated(name, epoch, found, samples=result.count)

    def joined(self, rank: int, about: dict[str, Any], *, back: bool) -> None:
        self._ranks[rank] = about
        self._ranks_up(self._ranks)
        if back:
            self._job.console.line(f"Rank {rank} is back, after {self._job.summary.steps} updates")
        self._job.trace.record("joined", rank=rank, time=time.time(), update=self._job.summary.steps)
        self._job.trace.flush()

    def lost(self, rank: int, why: str, parts: list[Part]) -> None:
        samples, update = sum(part.stop - part.start for part in parts), self._job.summary.steps
        self._job.trace.record("lost", rank=rank, why=why, time=time.time(), update=update, samples=samples)
        self._job.trace.flush()
        self._job.console.line(
            f"Lost rank {rank} after {update} updates: {why}; others get the {samples} samples it had"
        )

    def went_back(self, number: int, why: str) -> None:
        self._job.console.line(f"Back to the snapshot after {number} updates: {why}")
        self._job.trace.record("went back", number=number, why=why, time=time.time())
        self._shown = min(self._shown, self._plan.epoch(number) - 1)
        self._job.summary.steps = number


def lost_workers(trace: Trace) -> list[dict[str, Any]]:
    """Who was lost after how many updates and why, and after how many it was back, if it was."""
    found: list[dict[str, Any]] = []
    trace.flush()
    for record in read_lines(trace.path):
        if record["kind"] == "lost":
            found.append({name: record[name] for name in ("rank", "why", "update", "samples")} | {"back": None})
        elif record["kind"] == "joined":
            for row in found:
                if row["rank"] == record["rank"] and row["back"] is None:
                    row["back"] = record["update"]
    return found

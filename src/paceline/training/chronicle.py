"""What the server that leads writes down and shows as the training goes: updates, epochs, who came and who was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.records import Summary, read_lines
from paceline.server.lead import Leader
from paceline.server.ledger import Part, Plan
from paceline.server.tally import Result
from paceline.spec import RunSpec
from paceline.training.console import Console
from paceline.training.learned import Learned
from paceline.training.rate import learning_rate
from paceline.training.trace import Trace


class Chronicle:
    """Is told by the leader; fills in the summary."""

    def __init__(
        self,
        spec: RunSpec,
        plan: Plan,
        console: Console,
        trace: Trace,
        summary: Summary,
        ranks_up: Callable[[dict[int, dict[str, Any]]], None],
    ) -> None:
        self._spec, self._plan, self._console, self._trace, self._summary = spec, plan, console, trace, summary
        self._ranks_up = ranks_up
        self._ranks: dict[int, dict[str, Any]] = {}
        self._last = self._epoch_start = time.perf_counter()
        self._shown = -1
        self._running = Learned(spec)

    def begun(self, ranks: dict[int, dict[str, Any]]) -> None:
        self._ranks = dict(ranks)
        self._ranks_up(self._ranks)
        read = max(row.get("read_seconds", 0.0) for row in ranks.values())
        self._summary.read_seconds = read
        if self._spec.reads:
            self._console.line(f"Time taken to read the data: {read:.2f} s")
        self._last = self._epoch_start = time.perf_counter()

    def updated(self, update: int, epoch: int, result: Result) -> None:
        if epoch > self._shown:
            self._shown = epoch
            self._running = Learned(self._spec)
            self._console.end_bar()
            self._console.line(f"\nStart of epoch {epoch}")
            mark = ", emulated" if self._spec.emulated else ""
            self._console.start_bar(min(self._plan.per_epoch, self._plan.updates - update), f"epoch {epoch}{mark}")
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._running.add(result.loss, result.hits, result.count)
        lr = learning_rate(self._spec, update, self._plan.per_epoch, self._plan.updates)
        learned: dict[str, Any] = {} if self._spec.emulated else {"loss": result.loss / result.count, "lr": lr}
        self._trace.step(update, epoch, seconds, result.count, {}, **learned)
        number, left = update % self._plan.per_epoch + 1, self._plan.updates - update - 1
        self._console.step(number, seconds, result.count, left, self._spec.log_every, self._running.bar())
        self._summary.steps = update + 1

    def epoch_ended(self, epoch: int, result: Result) -> None:
        console, now = self._console, time.perf_counter()
        seconds, self._epoch_start = now - self._epoch_start, now
        learned = Learned(self._spec)
        learned.add(result.loss, result.hits, result.count)
        self._trace.record("epoch", epoch=epoch, seconds=seconds, samples=result.count, **learned.means())
        console.end_bar()
        console.line(f"Time taken: {seconds:.2f} s")
        console.line(learned.line())

    def evaluated(self, name: str, epoch: int, result: Result) -> None:
        loss, accuracy = result.loss / result.count, result.hits / result.count
        self._epoch_start = self._last = time.perf_counter()
        self._trace.record(name, epoch=epoch, loss=loss, accuracy=accuracy, samples=result.count)
        if name == "validation":
            self._console.line(f"Validation acc: {accuracy:.4f}, validation loss: {loss:.4f}")
            return
        self._fill()
        best = self._summary.best_epoch
        which = f" (weights of epoch {best})" if best is not None else ""
        self._console.line(f"\nTest loss: {loss:.4f}, test accuracy: {accuracy:.2%}{which}")

    def _fill(self) -> None:
        """The summary's lists, from what is written down: this process may not be the first to lead the run."""
        self._trace.flush()
        summary, records = self._summary, list(read_lines(self._trace.path))

        def latest(kind: str) -> list[dict[str, Any]]:
            found = {record["epoch"]: record for record in records if record["kind"] == kind}
            return [found[epoch] for epoch in sorted(found)]

        epochs, validation, test = latest("epoch"), latest("validation"), latest("test")
        summary.epoch_seconds = [record["seconds"] for record in epochs]
        if not self._spec.emulated:
            summary.train_loss = [record["loss"] for record in epochs]
            summary.train_accuracy = [record["accuracy"] for record in epochs]
        summary.validation_loss = [record["loss"] for record in validation]
        summary.validation_accuracy = [record["accuracy"] for record in validation]
        if validation:
            summary.best_epoch = min(validation, key=lambda record: record["loss"])["epoch"]
        if test:
            summary.test_loss, summary.test_accuracy = test[-1]["loss"], test[-1]["accuracy"]
        summary.lost_workers = _lost_workers(records)

    def joined(self, rank: int, about: dict[str, Any], *, back: bool) -> None:
        self._ranks[rank] = about
        self._ranks_up(self._ranks)
        if back:
            self._console.line(f"Rank {rank} is back, after {self._summary.steps} updates")
        self._trace.record("joined", rank=rank, time=time.time(), update=self._summary.steps)
        self._trace.flush()

    def lost(self, rank: int, why: str, parts: list[Part]) -> None:
        samples = sum(part.stop - part.start for part in parts)
        self._trace.record("lost", rank=rank, why=why, time=time.time(), update=self._summary.steps, samples=samples)
        self._trace.flush()
        self._console.line(
            f"Lost rank {rank} after {self._summary.steps} updates: {why}; others get the {samples} samples it had"
        )

    def went_back(self, number: int, why: str) -> None:
        self._console.line(f"Back to the snapshot after {number} updates: {why}")
        self._trace.record("went back", number=number, why=why, time=time.time())
        self._shown = min(self._shown, self._plan.epoch(number) - 1)
        self._summary.steps = number

    def close(self, leader: Leader) -> None:
        summary = self._summary
        self._console.end_bar()
        self._fill()
        summary.steps = leader.tally.updates
        summary.epochs = len(summary.epoch_seconds)
        if leader.stopping:
            summary.best_epoch = None
            self._console.line(f"\nInterrupted: stopped after step {summary.steps} of {self._plan.updates}.")
        summary.disturbed = self._trace.disturbance(emulated=self._spec.emulated)
        summary.update_seconds = self._trace.update_seconds()
        summary.images_per_second = self._trace.images_per_second()


def _lost_workers(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Who was lost after how many updates and why, and after how many it was back, if it was."""
    found: list[dict[str, Any]] = []
    for record in records:
        if record["kind"] == "lost":
            found.append({name: record[name] for name in ("rank", "why", "update", "samples")} | {"back": None})
        elif record["kind"] == "joined":
            for row in found:
                if row["rank"] == record["rank"] and row["back"] is None:
                    row["back"] = record["update"]
    return found

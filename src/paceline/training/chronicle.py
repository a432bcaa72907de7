"""What the server that leads writes down and shows as the training goes: updates, epochs, who came and who was lost."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from paceline.records import Summary
from paceline.server.lead import Leader
from paceline.server.ledger import Part, Plan
from paceline.server.tally import Result
from paceline.spec import RunSpec
from paceline.training.console import Console
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
        self._running = Result()
        self._lost: dict[int, dict[str, Any]] = {}

    def begun(self, ranks: dict[int, dict[str, Any]]) -> None:
        self._ranks = dict(ranks)
        self._ranks_up(self._ranks)
        self._last = self._epoch_start = time.perf_counter()

    def updated(self, update: int, epoch: int, result: Result) -> None:
        if epoch > self._shown:
            self._shown = epoch
            self._running = Result()
            self._console.end_bar()
            self._console.line(f"\nStart of epoch {epoch}")
            self._console.start_bar(min(self._plan.per_epoch, self._plan.updates - update), f"epoch {epoch}")
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        self._running.add(result.loss, result.hits, result.count)
        lr = learning_rate(self._spec, update, self._plan.per_epoch, self._plan.updates)
        self._trace.step(update, epoch, seconds, result.count, {}, loss=result.loss / result.count, lr=lr)
        running = self._running
        self._console.advance(loss=f"{running.loss / running.count:.4f}", acc=f"{running.hits / running.count:.2%}")
        number = update % self._plan.per_epoch + 1
        if self._spec.log_every and number % self._spec.log_every == 0:
            self._console.line(f"At step {number}, update time for each batch: {seconds:.4f} s")
        self._summary.steps = update + 1

    def epoch_ended(self, epoch: int, result: Result) -> None:
        summary, console, now = self._summary, self._console, time.perf_counter()
        seconds, self._epoch_start = now - self._epoch_start, now
        loss, accuracy = result.loss / result.count, result.hits / result.count
        del summary.epoch_seconds[epoch:], summary.train_loss[epoch:], summary.train_accuracy[epoch:]
        summary.epoch_seconds.append(seconds)
        summary.train_loss.append(loss)
        summary.train_accuracy.append(accuracy)
        self._trace.record("epoch", epoch=epoch, seconds=seconds, loss=loss, accuracy=accuracy, samples=result.count)
        console.end_bar()
        console.line(f"Time taken: {seconds:.2f} s")
        console.line(f"Training acc over epoch: {accuracy:.4f}, training loss: {loss:.4f}")

    def evaluated(self, name: str, epoch: int, result: Result) -> None:
        summary = self._summary
        loss, accuracy = result.loss / result.count, result.hits / result.count
        self._epoch_start = self._last = time.perf_counter()
        if name == "test":
            summary.test_loss, summary.test_accuracy = loss, accuracy
            which = f" (weights of epoch {summary.best_epoch})" if summary.best_epoch is not None else ""
            self._console.line(f"\nTest loss: {loss:.4f}, test accuracy: {accuracy:.2%}{which}")
            return
        del summary.validation_loss[epoch:], summary.validation_accuracy[epoch:]
        summary.validation_loss.append(loss)
        summary.validation_accuracy.append(accuracy)
        if loss == min(summary.validation_loss):
            summary.best_epoch = epoch
        self._console.line(f"Validation acc: {accuracy:.4f}, validation loss: {loss:.4f}")

    def joined(self, rank: int, about: dict[str, Any], *, back: bool) -> None:
        self._ranks[rank] = about
        self._ranks_up(self._ranks)
        if back:
            self._console.line(f"Rank {rank} is back, after {self._summary.steps} updates")
            self._lost[rank]["back"] = self._summary.steps
        self._trace.record("joined", rank=rank, time=time.time(), back=back)

    def lost(self, rank: int, why: str, parts: list[Part]) -> None:
        samples = sum(part.stop - part.start for part in parts)
        self._lost[rank] = {"rank": rank, "why": why, "update": self._summary.steps, "back": None}
        self._summary.lost_workers.append(self._lost[rank])
        self._trace.record("lost", rank=rank, why=why, time=time.time(), update=self._summary.steps, samples=samples)
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
        summary.steps = leader.tally.updates
        summary.epochs = len(summary.epoch_seconds)
        if leader.stopping:
            summary.best_epoch = None
            self._console.line(f"\nInterrupted: stopped after step {summary.steps} of {self._plan.updates}.")
        summary.update_seconds = self._trace.update_seconds()
        summary.images_per_second = self._trace.images_per_second()

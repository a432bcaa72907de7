"""The committed steps of a run: written into the trace and the summary, and shown."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.records import Summary, read_lines
from paceline.spec import RunSpec
from paceline.strategies.engine import Evaluation, StepResult, StepTimer
from paceline.strategies.rate import learning_rate
from paceline.training.console import Console
from paceline.training.learned import Learned
from paceline.training.trace import Trace

KEPT = ("epoch", "validation", "test")


class Progress:
    """Is told of every step when it is committed, of every epoch and every evaluation, by the rank that knows of all.

    What an earlier process of the same run has written into the trace counts as told.
    """

    def __init__(
        self, spec: RunSpec, console: Console, trace: Trace, summary: Summary, per_epoch: int, total: int
    ) -> None:
        self.spec, self.console, self.trace, self.summary = spec, console, trace, summary
        self.per_epoch, self.total = per_epoch, total
        self.learned = Learned(spec)
        self._kept: dict[str, dict[int, Mapping[str, Any]]] = {kind: {} for kind in KEPT}  # by epoch
        for record in read_lines(trace.path):
            if record["kind"] in KEPT:
                self._kept[record["kind"]][record["epoch"]] = record

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.spec, step, self.per_epoch, self.total)

    def start_epoch(self, epoch: int, steps: int) -> None:
        self.learned = Learned(self.spec)
        self.console.end_bar()
        self.console.line(f"\nStart of epoch {epoch}")
        self.console.start_bar(steps, f"epoch {epoch}{', emulated' if self.spec.emulated else ''}")

    def step(self, step: int, epoch: int, result: StepResult, seconds: float, timer: StepTimer, **values: Any) -> None:
        """Step number `step` is committed."""
        self.summary.steps = step + 1
        known = result.count if result.own is None else result.own
        self.learned.add(result.loss_sum, result.correct, known)
        if known and not self.spec.emulated:
            values |= {"loss": result.loss_sum / known, "lr": self.learning_rate(step)}
        self.trace.step(step, epoch, seconds, result.count, timer.parts, timer.queued, **values)
        if timer.events:
            self.trace.timeline(step, timer.events)
        number, left = step % self.per_epoch + 1, self.total - step - 1
        self.console.step(number, seconds, result.count, left, self.spec.log_every, self.learned.bar())

    def end_epoch(self, epoch: int, seconds: float, loss_sum: float, correct: float, samples: int) -> None:
        """Of all its samples; a rank that was restarted has not been told of all its steps."""
        learned = Learned(self.spec)
        learned.add(loss_sum, correct, samples)
        self._keep("epoch", epoch, seconds=seconds, samples=learned.count, **learned.means())
        self.console.end_bar()
        self.console.line(f"Time taken: {seconds:.2f} s")
        self.console.line(learned.line())

    def evaluated(self, name: str, epoch: int, result: Evaluation, **values: Any) -> bool:
        """On the `validation` or `test` set, after this epoch; true if no validation before had a lower loss."""
        self._keep(name, epoch, loss=result.loss, accuracy=result.accuracy, **values)
        if name == "validation":
            self.console.line(f"Validation acc: {result.accuracy:.4f}, validation loss: {result.loss:.4f}")
        else:
            which = f" (weights of epoch {self.best_epoch})" if self.best_epoch is not None else ""
            self.console.line(f"\nTest loss: {result.loss:.4f}, test accuracy: {result.accuracy:.2%}{which}")
        return self.best_epoch == epoch

    @property
    def best_epoch(self) -> int | None:
        """The one with the lowest validation loss; of several the last."""
        found = self._kept["validation"]
        return min(found, key=lambda epoch: (found[epoch]["loss"], -epoch), default=None)

    def _keep(self, kind: str, epoch: int, **values: Any) -> None:
        self._kept[kind][epoch] = values
        self.trace.record(kind, epoch=epoch, **values)

    def finish(self, *, interrupted: bool) -> None:
        """Fill in the summary's lists. The weights of an interrupted run are the last ones, not the best."""
        epochs, validation, test = ([rows[epoch] for epoch in sorted(rows)] for rows in self._kept.values())
        summary = self.summary
        self.console.end_bar()
        if interrupted:
            self.console.line(f"\nInterrupted: stopped after step {summary.steps} of {self.total}.")
        summary.epochs, summary.epoch_seconds = len(epochs), [row["seconds"] for row in epochs]
        summary.train_loss = [row["loss"] for row in epochs if "loss" in row]
        summary.train_accuracy = [row["accuracy"] for row in epochs if "accuracy" in row]
        summary.validation_loss = [row["loss"] for row in validation]
        summary.validation_accuracy = [row["accuracy"] for row in validation]
        summary.best_epoch = None if interrupted else self.best_epoch
        if test:
            summary.test_loss, summary.test_accuracy = test[-1]["loss"], test[-1]["accuracy"]
        summary.update_seconds = self.trace.update_seconds(self.spec.method.round(vars(self.spec)))
        summary.images_per_second = self.trace.images_per_second()

"""Records the committed steps of a run in the rank's file and the summary, and displays them."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from paceline.data.course import Course, Position
from paceline.elastic.membership import Reached
from paceline.run.lines import read_sound_lines
from paceline.run.recorder import Recorder
from paceline.run.records import Epoch, FinalTest, Resumed, Summary, Validation
from paceline.spec import RunSpec
from paceline.strategies.engine import StepResult, StepTimer
from paceline.strategies.rate import learning_rate
from paceline.strict_json import build
from paceline.tasks.base import Sums
from paceline.tasks.validations import Validations
from paceline.training.console import Console
from paceline.training.learned import Learned, in_words, shown

KEPT = (Epoch, Validation, FinalTest)
EVALUATED = {"validation": Validation, "test": FinalTest}


class Progress:
    """Receives every committed step, every epoch and every evaluation, on the rank that knows of all of them.

    What an earlier process of the same run has written to the rank's file counts as well.
    """

    def __init__(
        self, spec: RunSpec, console: Console, recorder: Recorder, summary: Summary, course: Course, total: int
    ) -> None:
        self.spec, self.console, self.recorder, self.summary = spec, console, recorder, summary
        self.course, self.total = course, total
        summary.steps = course.start.step
        self.task, self.learned = spec.objective, Learned(spec)
        self.samples = 0  # of the epoch so far: of all ranks, in steps whose sums are known
        self.ending = False  # all updates are made, and the best weights are loaded
        self._before, self._epoch_start = 0.0, time.perf_counter()
        self._epochs: dict[int, Epoch] = {}
        self.validations = Validations(course, total, self.task, spec.best_by, spec.evaluate_every or 0,
                                       spec.patience or 0, enabled=spec.validation > 0)  # fmt: skip
        self._validated: dict[int, Validation] = {}  # by number of updates
        self._tested: FinalTest | None = None
        for line in read_sound_lines(recorder.path, *KEPT):
            assert isinstance(line, Epoch | Validation)
            self._keep(line)
        self._value_validations()

    def learning_rate(self, step: int) -> float:
        return learning_rate(self.spec, step, self.course.per_epoch, self.total)

    def start_epoch(self, epoch: int, steps: range) -> None:
        """Before these steps of an epoch, which are the rest of it in a run that is continued."""
        again = not steps or self.course.span(steps.start).start > 0
        if not again:
            self.learned, self.samples, self._before = Learned(self.spec), 0, 0.0
        self.console.end_bar()
        self.console.line(f"\n{'Rest' if again else 'Start'} of epoch {epoch}")
        self.go_on(epoch, steps)

    def go_on(self, epoch: int, steps: range) -> None:
        """Before these steps, with which an epoch starts, or goes on after a validation."""
        self._epoch_start = time.perf_counter()
        done = self.course.number(steps.start) if steps else 0
        title = f"epoch {epoch}{', emulated' if self.spec.emulated else ''}"
        self.console.start_bar(done + len(steps), title, done)

    def pause(self) -> None:
        """After steps: the time until `go_on` does not count as the epoch's."""
        self._before, self._epoch_start = self.epoch_seconds(), time.perf_counter()
        self.console.end_bar()

    def step(
        self, step: int, epoch: int, result: StepResult, seconds: float, timer: StepTimer, own: int | None = None
    ) -> None:
        """Record that step number `step` is committed."""
        self.summary.steps = step + 1
        self.summary.skipped += not result.finite
        sums = result.sums
        if result.finite and sums.finite:
            self.learned.add(sums)
            self.samples += result.count if result.own is None else result.own
        trained = sums.weight and sums.finite and not self.spec.emulated
        loss, lr = (sums.loss / sums.weight, self.learning_rate(step)) if trained else (None, None)
        self.recorder.step(step, epoch, seconds, result.count, timer.parts, timer.queued, own=own, loss=loss, lr=lr,
                           tokens=round(sums.weight) if trained and self.task.per_target else None,
                           norm=result.norm, own_norm=result.own_norm)  # fmt: skip
        if timer.events:
            self.recorder.timeline(step, timer.events)
        number, left = self.course.number(step) + 1, self.total - step - 1
        self.console.step(number, seconds, result.count, left, self.spec.log_every, self.learned.bar())

    def end_epoch(self, epoch: int, seconds: float, sums: Sums, samples: int) -> None:
        """Record an epoch, with sums over all its samples: a restarted rank has not seen all its steps."""
        learned = Learned(self.spec)
        learned.add(sums)
        figures = learned.figures()
        self._record(Epoch(epoch, seconds, samples, figures.pop("loss", None), figures.pop("accuracy", None), figures))
        self.console.end_bar()
        self.console.line(f"Time taken: {seconds:.2f} s")
        self.console.line(learned.line())

    def evaluated(self, name: str, epoch: int, step: int, sums: Sums, samples: int | None = None) -> None:
        """Record an evaluation on the `validation` or `test` set after this many updates."""
        figures = self.task.figures(sums)
        others = {key: value for key, value in figures.items() if key not in ("loss", "accuracy")}
        self._record(EVALUATED[name](epoch, figures["loss"], figures.get("accuracy"), samples, others, step))
        when = f" after step {step}" if self.validations.every else ""
        if name == "validation":
            self.console.line(in_words("Validation", figures, when))
            if why := self._stopped_early():
                self.console.line(f"Stopped early after step {step}: {why}")
        else:
            best, which = self._best, ""
            if best:
                which = f" (weights {f'after step {best.step}' if when else f'of epoch {best.epoch}'})"
            words = ", ".join(f"test {key}: {shown(key, value, '%')}" for key, value in figures.items())
            self.console.line(f"\nT{words[1:]}{which}")

    @property
    def _best(self) -> Validation | None:
        best = self.validations.best
        return None if best is None else self._validated[best]

    def _stopped_early(self) -> str | None:
        """Why training ended before its last step; None if it did not."""
        made = self.validations
        if not made.exhausted or max(made.values) >= self.total:
            return None
        last = f"{made.patience} validations" if made.patience > 1 else "validation"
        return f"no better {made.by} in the last {last}"

    def _record(self, line: Epoch | Validation) -> None:
        self._keep(line)
        self.recorder.write(line)

    def _keep(self, line: Epoch | Validation) -> None:
        """Of what was made again, the last line counts."""
        if isinstance(line, Epoch):
            self._epochs[line.epoch] = line
        elif isinstance(line, FinalTest):
            self._tested = line
        else:
            self._validated[self.course.end(line.epoch) if line.step is None else line.step] = line

    def epoch_seconds(self) -> float:
        """The time of the epoch so far, without the time between two processes of the run."""
        return self._before + time.perf_counter() - self._epoch_start

    def facts(self) -> dict[str, Any]:
        """What a checkpoint says about the epoch so far; everything else is in the rank's file."""
        return {"sums": list(self.learned.sums), "samples": self.samples, "seconds": self.epoch_seconds(),
                "skipped": self.summary.skipped}  # fmt: skip

    def restore(self, facts: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._continue(facts)
        self.recorder.restore()

    def _continue(self, facts: dict[str, Any]) -> None:
        self.learned = Learned(self.spec)
        self.learned.add(Sums(*facts["sums"]))
        self.samples = facts["samples"]
        self._before = facts.get("seconds", 0.0)
        self.summary.skipped = facts["skipped"]

    @property
    def reached(self) -> Reached:
        """How far the training has come."""
        return Reached(self.summary.steps, len(self.validations.values), len(self._epochs), int(self.ending))

    def has_epoch(self, epoch: int) -> bool:
        return epoch in self._epochs

    def reopen(self, epoch: int) -> None:
        """The epoch goes on, although it was recorded; a later line about it counts."""
        self._epochs.pop(epoch, None)

    def history(self) -> list[dict[str, Any]]:
        """The lines of all epochs and evaluations."""
        tested = [self._tested] if self._tested else []
        return [{"kind": line.kind, **asdict(line)}
                for line in (*self._epochs.values(), *self._validated.values(), *tested)]  # fmt: skip

    def adopt(self, position: Position, facts: dict[str, Any], history: list[dict[str, Any]]) -> None:
        """Go on from where another rank is, with what it has recorded of epochs and evaluations."""
        resumed = Resumed(position.step, position.epoch, position.used, time.time())
        self.recorder.write(resumed)
        own = [line for line in (*self._epochs.values(), *self._validated.values()) if not line.superseded(resumed)]
        self._epochs, self._validated, self._tested = {}, {}, None
        kinds = {kind.kind: kind for kind in KEPT}
        for values in history:
            line = build(kinds[values.pop("kind")], values)
            assert isinstance(line, Epoch | Validation)
            if line in own:
                self._keep(line)
            else:
                self._record(line)
        self.recorder.flush()
        self.summary.steps = position.step
        self._value_validations()
        self._continue(facts)

    def _value_validations(self) -> None:
        by = self.spec.best_by
        self.validations.values = {step: line.figures[by] for step, line in self._validated.items()
                                   if by in line.figures}  # fmt: skip

    def finish(self, *, interrupted: bool) -> None:
        """Fill in the summary's lists. The weights of an interrupted run are the last ones, not the best."""
        summary, best = self.summary, None if interrupted else self._best
        self.console.end_bar()
        if interrupted:
            self.console.line(f"\nInterrupted: stopped after step {summary.steps} of {self.total}.")
        summary.epochs = len(self._epochs)
        summary.add_epochs(self._epochs.values())
        summary.add_validations([self._validated[step] for step in sorted(self.validations.values)])
        summary.best_epoch, summary.best_step = (best.epoch, best.step) if best else (None, None)
        summary.stopped_early = self._stopped_early()
        if self._tested:
            summary.add_test(self._tested)
        summary.update_seconds = self.recorder.update_seconds(self.spec.method.round(vars(self.spec)))
        summary.samples_per_second = self.recorder.samples_per_second()
        if self.task.per_target and summary.samples_per_second and self.samples:
            summary.tokens_per_second = summary.samples_per_second * self.learned.sums.weight / self.samples

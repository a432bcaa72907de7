"""When a training saves checkpoints, and what it says about them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from torch import Tensor

from paceline import __version__
from paceline.checkpoint.manifest import Manifest, Part
from paceline.checkpoint.save import Saver
from paceline.comm.words import tell
from paceline.data.course import Course
from paceline.run.folder import CHECKPOINTS
from paceline.run.records import Checkpoint
from paceline.spec import RunSpec
from paceline.strategies.engine import SAVE, Engine

if TYPE_CHECKING:
    from paceline.training.driver import Job
    from paceline.training.progress import Progress


def division_of(spec: RunSpec) -> dict[str, Any]:
    """How the work is divided over ranks. Ranks of equal divisions have the same part of it."""
    return {"workers": spec.workers, "servers": spec.servers or 0, "grid": asdict(spec.grid)}


def options_of(spec: RunSpec) -> dict[str, Any]:
    values = {name: getattr(spec, name) for name in spec.names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


class Checkpoints:
    """Saves an engine's state when it is due. Rank 0 decides when that is; all ranks save after the same step."""

    def __init__(self, job: Job, engine: Engine, course: Course) -> None:
        self.job, self.spec, self.engine, self.course = job, job.spec, engine, course
        self.attempt = tell(secrets.token_hex(4), job.comm)
        self.saver = Saver(
            job.folder / CHECKPOINTS,
            job.comm.rank,
            range(job.comm.size),
            self.spec.keep_checkpoints,
            self.attempt,
            self.spec.timeout,
            job.recorder,
        )
        self._last, self._step = time.monotonic(), course.start.step

    def ask(self, step: int) -> int:
        """Whether rank 0 asks all ranks to save after this step; not before the one before is written."""
        if self.job.comm.rank or self.saver.busy:
            return 0
        every, seconds = self.spec.checkpoint_every, self.spec.checkpoint_seconds
        by_step = every and (step + 1) // every > self._step // every
        return SAVE if by_step or (seconds and time.monotonic() - self._last > seconds) else 0

    def copy(self, step: int, best: Mapping[str, Tensor]) -> None:
        """Copy the state after this many updates."""
        self.saver.copy(self.engine.held(best))
        self._last, self._step = time.monotonic(), step

    def write(self, progress: Progress) -> None:
        """Write what was copied, in the background."""
        step, facts = self.job.summary.steps, {"progress": progress.facts(), "validation": progress.validation_losses}
        self.saver.write(step, self.engine.facts(), lambda parts: describe(self.job, self.course, step, facts, parts))

    def report(self) -> None:
        report(self.job, self.saver)

    def finish(self) -> None:
        """Wait for the one that is being written."""
        self.saver.wait(self.spec.timeout)
        self.report()


def describe(job: Job, course: Course, step: int, facts: dict[str, Any], parts: tuple[Part, ...]) -> Manifest:
    """The manifest of a checkpoint after this step."""
    facts = {"batch": job.spec.update_batch, "seconds": job.seconds(), **facts}
    position = course.after(step)
    return Manifest(position, options_of(job.spec), division_of(job.spec), parts, facts, time.time(), __version__)


def report(job: Job, saver: Saver) -> None:
    """Record and say how the last checkpoint ended; rank 0 does for all."""
    saved = saver.outcome()
    if saved is None or saver.rank:
        return
    if saved.error:
        job.console.line(f"No checkpoint after {saved.step} updates: {saved.error}; training continues, and earlier "
                         "checkpoints stay", always=True)  # fmt: skip
    else:
        job.recorder.write(Checkpoint(saved.step, time.time(), saved.bytes, saved.seconds))

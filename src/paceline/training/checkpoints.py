"""When a training saves checkpoints, and what it says about them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from paceline.checkpoint.save import Saver
from paceline.comm.words import all_or_none, tell
from paceline.data.course import Course
from paceline.run.folder import CHECKPOINTS
from paceline.strategies.engine import SAVE, Lockstep
from paceline.strategies.saving import describe, report

if TYPE_CHECKING:
    from paceline.training.driver import Job
    from paceline.training.progress import Progress


# How long a checkpoint may take to be written, in seconds.
PATIENCE = 1800.0


class Checkpoints:
    """Saves an engine's state when it is due. Rank 0 decides when that is; all ranks save after the same step."""

    def __init__(self, job: Job, engine: Lockstep, course: Course) -> None:
        self.job, self.spec, self.engine, self.course = job, job.spec, engine, course
        self._last, self._step = time.monotonic(), course.start.step
        self._again = False  # whether the last one was given up
        self._earlier = list[Saver]()  # of earlier generations, which are still writing
        self._meet()

    def _meet(self) -> None:
        job, self._count = self.job, 0
        self.attempt = tell(secrets.token_hex(4), job.comm)
        everyone, keep = range(job.comm.size), self.spec.keep_checkpoints
        self.saver = Saver(job.folder / CHECKPOINTS, job.comm.rank, everyone, keep, PATIENCE, job.recorder)

    def regroup(self, *, lost: bool) -> None:
        """Save with other ranks from now on. What a `lost` rank has not written is given up, and saved anew."""
        earlier = self.saver
        if lost and earlier.busy:
            earlier.abandon()
            self._again = True
        self._meet()
        self._earlier = [each for each in (*self._earlier, earlier) if each.busy]

    def ask(self, step: int) -> int:
        """Whether rank 0 asks all ranks to save after this step; not before the one before is written."""
        if self.job.comm.rank or self.saver.busy or any(each.busy for each in self._earlier):
            return 0
        every, seconds = self.spec.checkpoint_every, self.spec.checkpoint_seconds
        by_step = every and (step + 1) // every > self._step // every
        return SAVE if by_step or self._again or (seconds and time.monotonic() - self._last > seconds) else 0

    def copy(self, step: int, best: Mapping[str, Tensor]) -> None:
        """Copy the state after this many updates."""
        self.saver.copy(self.engine.held(best))
        self._last, self._step, self._again = time.monotonic(), step, False

    def write(self, progress: Progress) -> None:
        """Write what was copied, in the background."""
        step, facts = self.job.summary.steps, {"progress": progress.facts()}
        self._count += 1
        self.saver.write(step, f"{self.attempt}.{self._count}", self.engine.facts(),
                         lambda parts: describe(self.job, self.course, step, facts, parts))  # fmt: skip

    def report(self) -> None:
        for saver in (*self._earlier, self.saver):
            report(self.job, saver)

    def wait(self) -> None:
        """Wait for the one that is being written; slow disks must not look like lost ranks."""
        all_or_none(lambda: self.saver.wait(PATIENCE), self.job.comm)
        if self.saver.busy:
            self.job.console.line(f"No checkpoint: it was not written within {PATIENCE:g} s", always=True)
        self.report()

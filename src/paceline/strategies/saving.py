"""What a checkpoint says about a run, and what a run says about its checkpoints."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from paceline import __version__
from paceline.checkpoint.manifest import Manifest, Part
from paceline.checkpoint.save import Saver
from paceline.data.course import Course
from paceline.run.records import Checkpoint
from paceline.spec import RunSpec

if TYPE_CHECKING:
    from paceline.training.driver import Job


def division_of(spec: RunSpec) -> dict[str, Any]:
    """How the work is divided over ranks. Ranks of equal divisions have the same part of it."""
    return {"workers": spec.workers, "servers": spec.servers or 0, "grid": asdict(spec.grid)}


def options_of(spec: RunSpec) -> dict[str, Any]:
    values = {name: getattr(spec, name) for name in spec.names}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}


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

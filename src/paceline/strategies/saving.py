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


def describe(job: Job, course: Course, step: int, facts: dict[str, Any], parts: tuple[Part, ...]) -> Manifest:
    """The manifest of a checkpoint after this step."""
    facts = {"batch": job.spec.update_batch, "seconds": job.seconds(), **facts}
    position = course.after(step)
    division = division_of(job.spec) | ({"workers": job.comm.size} if job.elastic else {})
    return Manifest(position, job.spec.values(), division, parts, facts, time.time(), __version__)


def report(job: Job, saver: Saver) -> None:
    """Record and say how the last checkpoints ended; rank 0 does for all."""
    while saved := saver.outcome():
        if saved.error and saver.rank == 0:
            what = f"No checkpoint after {saved.step} updates: {saved.error}"
            job.console.line(f"{what}; training continues, and earlier checkpoints stay", always=True)
        elif saver.rank == 0:
            job.recorder.write(Checkpoint(saved.step, time.time(), saved.bytes, saved.seconds))

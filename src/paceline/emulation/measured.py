"""Reads the compute time of an earlier run from its records; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.data import table as datasets
from paceline.emulation.table import REAL
from paceline.errors import UsageError
from paceline.run.folder import rank_files, read_spec, read_steps
from paceline.run.liveness import current_summary
from paceline.run.records import COMPLETED

WARM_UP = 30  # steps that are left out, or a quarter of all steps if that is less


def seconds_per_sample(
    folder: Path, model: str, shape: tuple[int, ...] | None, hidden: Sequence[int] | None = None
) -> float:
    """Seconds for forward and backward of one sample on one worker, in a run of the same model and shape of samples.

    The shape of a user's own data is not known before it is loaded: None, and not compared.
    """
    try:
        summary = current_summary(folder)
    except (OSError, ValueError):
        summary = None
    if summary is None or summary.status != COMPLETED:
        what = "is not a run folder" if summary is None else f"is of a run that is {summary.status}"
        raise UsageError(f"--compute emulated:{folder}: it {what}; a completed run is expected")
    if summary.compute != REAL:
        raise UsageError(f"--compute emulated:{folder}: that run was itself emulated; use one with real compute")
    if summary.model != model:
        raise UsageError(f"--compute emulated:{folder}: that run had model {summary.model}, but this one has {model}")
    try:
        return _seconds_per_sample(folder, shape, hidden)
    except (OSError, ValueError) as error:
        raise UsageError(f"--compute emulated:{folder}: it is damaged: {error}") from error


def _seconds_per_sample(folder: Path, shape: tuple[int, ...] | None, hidden: Sequence[int] | None) -> float:
    """Raises OSError or ValueError if a file is missing or damaged."""
    spec = read_spec(folder)
    if list(hidden or ()) != spec.get("hidden", []):
        raise UsageError(f"--compute emulated:{folder}: that run had other --hidden layers than this one")
    theirs = _shape(spec)
    if shape and theirs and shape != theirs:
        sizes = ["x".join(map(str, each)) for each in (theirs, shape)]
        raise UsageError(
            f"--compute emulated:{folder}: that run had samples of {sizes[0]}, but this one has {sizes[1]}"
        )
    seconds, samples = 0.0, 0
    for path in rank_files(folder):
        steps = [step for step in read_steps(path) if step.own and {"forward", "backward"} <= step.spans.keys()]
        for step in steps[min(WARM_UP, len(steps) // 4) :]:
            seconds += step.spans["forward"] + step.spans["backward"]
            samples += step.own or 0
    if not samples:
        raise UsageError(f"--compute emulated:{folder}: its rank_*.jsonl have no step with forward and backward")
    return seconds / samples


def _shape(spec: dict[str, Any]) -> tuple[int, ...] | None:
    """The shape of that run's samples; None if it is known only after loading its data."""
    name, size = spec.get("data", ""), spec.get("image_size")
    if not isinstance(name, str) or not isinstance(size, int | None):
        raise ValueError("spec.toml: data must be a string, and image_size an integer")
    data = datasets.describe(name)
    if data is None:
        return None
    return (data.shape[0], size, size) if size else data.shape

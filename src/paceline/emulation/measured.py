"""The time that a finished run took to compute, from what its workers wrote down; no torch."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from paceline.data import table as datasets
from paceline.emulation.table import REAL
from paceline.errors import UsageError
from paceline.liveness import current_summary
from paceline.records import COMPLETED, read_lines

WARM_UP = 30  # steps that are left out, or a quarter of all if that is less


def seconds_per_image(
    folder: Path, model: str, shape: tuple[int, ...] | None, hidden: Sequence[int] | None = None
) -> float:
    """Forward and backward of one image on one worker of a run of the same model with images of the same shape.

    The shape of a user's own data is not known before they are loaded: None, and not compared.
    """
    try:
        summary = current_summary(folder)
    except (OSError, ValueError):
        summary = None
    if summary is None or summary.status != COMPLETED:
        what = "is not a run folder" if summary is None else f"is of a run that is {summary.status}"
        raise UsageError(f"--compute emulated:{folder}: it {what}; a completed run is expected")
    if summary.compute != REAL:
        raise UsageError(f"--compute emulated:{folder}: that run was itself emulated; name one that computed")
    if summary.model != model:
        raise UsageError(f"--compute emulated:{folder}: that run was of model {summary.model}, and this is of {model}")
    spec = _spec(folder)
    if list(hidden or ()) != spec.get("hidden", []):
        raise UsageError(f"--compute emulated:{folder}: that run had other --hidden layers than this")
    theirs = _shape(spec)
    if shape and theirs and shape != theirs:
        sizes = ["x".join(map(str, each)) for each in (theirs, shape)]
        raise UsageError(f"--compute emulated:{folder}: that run had images of {sizes[0]}, and this has {sizes[1]}")
    seconds, images = 0.0, 0
    for path in sorted(folder.glob("rank_*.jsonl")):
        steps = [record for record in read_lines(path) if _computed(record)]
        for record in steps[min(WARM_UP, len(steps) // 4) :]:
            seconds += record["spans"]["forward"] + record["spans"]["backward"]
            images += record["own"]
    if not images:
        raise UsageError(f"--compute emulated:{folder}: its rank_*.jsonl have no step with forward and backward")
    return seconds / images


def _computed(record: dict[str, Any]) -> bool:
    spans = record.get("spans", {})
    return record["kind"] == "step" and bool(record.get("own")) and {"forward", "backward"} <= spans.keys()


def _spec(folder: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((folder / "spec.toml").read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"--compute emulated:{folder}: its spec.toml cannot be read: {error}") from error


def _shape(spec: dict[str, Any]) -> tuple[int, ...] | None:
    """Of that run's images; None where only loading its data would tell."""
    data, size = datasets.describe(spec.get("data", "")), spec.get("image_size")
    if data is None:
        return None
    return (data.shape[0], size, size) if size else data.shape

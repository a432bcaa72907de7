"""Run folders as data: what they ran, every step, every node; and why a folder cannot be used."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.statistics import Series, warm_up
from paceline.records import COMPLETED, Node, Summary, read_lines, read_nodes, read_summary


@dataclass(frozen=True)
class Step:
    """One update as a rank saw it: when it ended, how long it took, how many samples all ranks had, its parts.

    A server's workers make gradients, not updates: their samples are their own. Emulated compute has no loss.
    """

    step: int
    epoch: int
    time: float
    seconds: float
    samples: int
    spans: dict[str, float]
    loss: float | None = None


@dataclass(frozen=True)
class Run:
    """A completed run."""

    folder: Path
    spec: dict[str, Any]
    summary: Summary
    environment: dict[str, Any]
    steps: dict[int, list[Step]] = field(repr=False)  # by rank
    nodes: dict[str, Node] = field(repr=False)

    @property
    def emulated(self) -> bool:
        return self.summary.compute != "real"

    @cached_property
    def warm_up(self) -> int:
        """Steps of rank 0 that are left out of all that follows."""
        return warm_up([step.seconds for step in self.steps[0]])

    @cached_property
    def steady(self) -> list[Step]:
        return self.steps[0][self.warm_up :]

    @cached_property
    def step_seconds(self) -> Series:
        """Of whole batches, warm-up left out: an epoch's smaller last batch is another kind of step."""
        whole = max(step.samples for step in self.steady)
        return np.array([step.seconds for step in self.steady if step.samples == whole])

    @cached_property
    def seconds_per_image(self) -> Series:
        return np.array([step.seconds / step.samples for step in self.steady])

    @property
    def images_per_second(self) -> float:
        return sum(step.samples for step in self.steady) / sum(step.seconds for step in self.steady)


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not used, and why."""

    folder: Path
    why: str


def read_run(folder: Path) -> Run | LeftOut:
    """A run from its folder, or why not. Nothing of a folder that is half written or damaged is used."""
    summary = read_summary(folder)
    if summary is None:
        return LeftOut(folder, "no summary that can be read: not a run folder, or one of another version")
    if summary.status != COMPLETED:
        because = f": {summary.error}" if summary.error else ""
        return LeftOut(folder, f"{summary.status}{because}")
    try:
        spec = tomllib.loads((folder / "spec.toml").read_text("utf-8"))
        environment = json.loads((folder / "env.json").read_text("utf-8"))
        ranks = range(summary.servers + summary.workers)
        steps = {rank: _steps(folder / f"rank_{rank}.jsonl") for rank in ranks}
        nodes = read_nodes(folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return LeftOut(folder, f"damaged: {type(error).__name__}: {error}")
    if len(steps[0]) != summary.steps or not steps[0]:
        return LeftOut(folder, f"damaged: {len(steps[0])} steps are written down, and the summary says {summary.steps}")
    return Run(folder, spec, summary, environment, steps, nodes)


def _steps(path: Path) -> list[Step]:
    """In the order of their numbers; of one that was made again, after a server came back, the last counts."""
    found = {r["step"]: r for r in read_lines(path) if r["kind"] == "step"}
    return [
        Step(number, r["epoch"], float(r["time"]), float(r["seconds"]), int(r["samples"]), dict(r["spans"]), _loss(r))
        for number, r in sorted(found.items())
    ]


def _loss(record: dict[str, Any]) -> float | None:
    return None if record.get("loss") is None else float(record["loss"])


def find_folders(paths: Iterable[Path]) -> list[Path]:
    """The run folders in these folders: themselves, or those below them."""
    found = []
    for path in paths:
        inner = sorted(summary.parent for summary in path.rglob("summary.json"))
        found += [path] if (path / "summary.json").exists() or not inner else inner
    return list(dict.fromkeys(found))

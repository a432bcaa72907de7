"""Run folders as data: what they ran, every step, every node; and why a folder cannot be used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.statistics import Series, effective_samples, warm_up
from paceline.disturbance import disturbance
from paceline.pipeline.plan import StagePlan
from paceline.pipeline.schedule import SCHEDULES
from paceline.run import records
from paceline.run.clocks import aligned
from paceline.run.folder import PLAN, SPEC, check_environment, rank_file, read_nodes, read_spec, read_steps
from paceline.run.lines import read_lines, read_sound_lines
from paceline.run.liveness import current_summary
from paceline.run.records import BY_RANK, COMPLETED, Node, Step, Summary
from paceline.run.timelines import Event, events_of
from paceline.spec import OWN, RunSpec
from paceline.strategies.base import Strategy
from paceline.strategies.table import describe
from paceline.strict_json import Count, Seconds, build, naming, parse, read_text

MOST_MICROBATCHES = 10_000


@dataclass(frozen=True)
class Timeline:
    """One step of a stage, event by event. `time` is when it began, in seconds of the Unix clock."""

    step: Count
    time: Seconds
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Run:
    """A completed run; for a pipeline also the events of the first steps and the plan of its stages."""

    folder: Path
    spec: dict[str, Any]  # as runs are compared: see `_comparable`
    summary: Summary
    environment: dict[str, Any]
    steps: dict[int, list[Step]] = field(repr=False)  # by rank
    nodes: dict[str, Node] = field(repr=False)
    timelines: dict[int, list[Timeline]] = field(default_factory=dict, repr=False)  # by rank
    plan: StagePlan | None = field(default=None, repr=False)
    changes: int = 0  # elastic: how often workers were lost or joined

    @property
    def method(self) -> Strategy:
        """Its strategy, with what that can do."""
        return describe(self.summary.strategy)

    def has(self, option: str) -> bool:
        """Whether its strategy has this option."""
        return option in (self.method.names if self.method.installed else self.spec)

    @property
    def replicas(self) -> int:
        """The number of replicas, each with its own part of the global batch."""
        return self.summary.grid.replicas

    @property
    def schedule(self) -> str | None:
        return self.spec.get("schedule")

    @property
    def microbatches(self) -> int:
        return self.spec.get("microbatches") or 1

    @property
    def emulated(self) -> bool:
        return self.summary.emulated

    @property
    def at_once(self) -> int:
        """Steps that are timed together: see `Strategy.round`."""
        return self.method.round(self.spec | {"workers": self.summary.workers})

    @property
    def cores(self) -> int | None:
        """Cores of all its machines together; the nodes of a lab share one machine."""
        hosts = {row["host"] for row in self.environment.get("ranks", [])}
        each = self.environment.get("cores")
        return each and each * (1 if self.environment.get("lab") else max(1, len(hosts)))

    @property
    def crowded(self) -> bool:
        """Whether workers were oversubscribed: more threads than cores."""
        threads = self.summary.workers * (self.summary.threads or 1)
        return bool(self.cores) and not self.emulated and threads > (self.cores or 0)

    @property
    def began(self) -> float:
        """When the first step began, in seconds of the Unix clock."""
        return min(steps[0].time - steps[0].seconds for steps in self.steps.values() if steps)

    @cached_property
    def disturbed(self) -> str | None:
        """Why its times are not to be compared with others', where other programs used its machines' processors, or
        workers were lost: a sentence such as "other processes used 1.6 of 2 cores".
        """
        if self.changes:
            return f"its workers changed {self.changes} time{'s' * (self.changes > 1)}"
        ended = max(steps[-1].time for steps in self.steps.values() if steps)
        return disturbance(self.nodes.values(), self.began, ended, emulated=self.emulated)

    @cached_property
    def warm_up(self) -> int:
        """The number of first steps of rank 0 that are removed."""
        return self.at_once * warm_up([sum(step.seconds for step in steps) for steps in self.rounds(self.steps[0])])

    @cached_property
    def steady(self) -> list[Step]:
        return self.steps[0][self.warm_up :]

    def rounds(self, steps: Sequence[Step]) -> list[Sequence[Step]]:
        """Whole ones; where there is none, all steps are one."""
        count = self.at_once
        return [steps[i : i + count] for i in range(0, len(steps) - count + 1, count)] or [steps]

    @cached_property
    def step_seconds(self) -> Series:
        """Steps after warm-up, without the smaller last batch of an epoch."""
        rounds = self.rounds(self.steady)
        samples = [sum(step.samples for step in steps) for steps in rounds]
        return np.array([sum(step.seconds for step in steps) / len(steps)
                         for steps, count in zip(rounds, samples, strict=True) if count == max(samples)])  # fmt: skip

    @cached_property
    def seconds_per_sample(self) -> Series:
        return np.array([sum(step.seconds for step in steps) / sum(step.samples for step in steps)
                         for steps in self.rounds(self.steady)])  # fmt: skip

    @cached_property
    def effective_samples(self) -> float:
        """The number of independent steps that its steps are equivalent to, as step times are autocorrelated."""
        return float(effective_samples(np.log(self.seconds_per_sample)))

    @property
    def samples_per_second(self) -> float:
        return sum(step.samples for step in self.steady) / sum(step.seconds for step in self.steady)


@dataclass(frozen=True)
class LeftOut:
    """A folder that is not used, and why."""

    folder: Path
    why: str


def read_run(folder: Path) -> Run | LeftOut:
    """A run from its folder, or why it cannot be used. Incomplete or damaged folders are not used at all."""
    try:
        summary = current_summary(folder)
    except FileNotFoundError:
        begun = (folder / SPEC).exists()
        return LeftOut(folder, f"no summary that can be read: {'it did not begin' if begun else 'not a run folder'}")
    except (OSError, ValueError) as error:
        return LeftOut(folder, f"no summary that can be read: {error}")
    if summary.status != COMPLETED:
        because = f": {summary.error}" if summary.error else ""
        return LeftOut(folder, f"{summary.status}{because}")
    try:
        run = _read(folder, summary)
        wrong = next(_faults(run), None)
    except (OSError, ValueError) as error:
        wrong = str(error)
    return LeftOut(folder, f"damaged: {wrong}") if wrong else run


def _read(folder: Path, summary: Summary) -> Run:
    """Raises OSError or ValueError if a file is missing or invalid."""
    environment = check_environment(folder)
    ranks = range(summary.ranks)
    steps = {rank: read_steps(rank_file(folder, rank)) for rank in ranks}
    staged = ranks if describe(summary.strategy).timelines else ()
    timelines = {rank: _timelines(rank_file(folder, rank)) for rank in staged}
    plan = _plan(folder / PLAN) if staged else None
    build(describe(summary.strategy).figures, summary.own_figures, extra=True)
    spec, changes = _comparable(_spec(folder), summary), 0
    if spec.get("elastic"):
        # What rank 0 has not seen, because it was away or was killed before it had written it, others have.
        steps[0] = list({step.step: step for rank in reversed(ranks) for step in steps[rank]}.values())
        steps[0].sort(key=lambda step: step.step)
        lines = (line for rank in ranks for line in read_sound_lines(rank_file(folder, rank), records.Regrouped))
        changes = max(0, len({line.generation for line in lines if isinstance(line, records.Regrouped)}) - 1)
    return Run(folder, spec, summary, environment, steps, read_nodes(folder), timelines, plan, changes)


def _spec(folder: Path) -> dict[str, Any]:
    values = read_spec(folder)
    with naming(folder / SPEC):
        build(RunSpec, values, extra=True)
    return values


def _comparable(spec: dict[str, Any], summary: Summary) -> dict[str, Any]:
    """The spec, with the same values for the same setting whichever version wrote it.

    Options that only other strategies have are at their defaults, as earlier versions wrote them; those of a strategy
    that is not installed here are kept as they are. A global batch that follows from the batch size is left out.
    """
    method, found = describe(summary.strategy), dict(spec)
    if method.installed:
        others = {name: made.default for name, (made, _) in OWN.items() if name not in method.names or name not in spec}
        found = {name: value for name, value in (spec | others).items() if value is not None}
    shares = 1 if method.updates_by_worker else summary.grid.replicas
    if summary.global_batch == summary.batch_size * shares:
        found.pop("global_batch", None)
    return found


def _faults(run: Run) -> Iterator[str]:
    """What is inconsistent in a run; the order matters, as later checks depend on earlier ones."""
    s, steps = run.summary, run.steps[0]
    for name in ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
        if not all(map(isfinite, getattr(s, name))):
            yield f"{name} has a value that is not finite: the training diverged"
    if len(steps) != s.steps or not steps:
        yield f"{len(steps)} steps are written down, and the summary says {s.steps}"
    yield from (
        f"step {step.step} cannot be of epoch {step.epoch}: the run has {len(steps)} steps"
        for step in steps
        if step.epoch >= len(steps)
    )
    counts = s.confusion or []
    yield from ("confusion does not have as many columns as rows" for row in counts if len(row) != len(counts))
    if s.workers != s.grid.replicas * s.grid.stages * s.grid.shards:
        yield f"{s.workers} workers cannot be {s.grid}"
    named = {row["rank"] for row in run.environment["ranks"]}
    for rank, written in run.steps.items():
        if written and rank not in named:
            yield f"env.json does not say where rank {rank} was"
    for name in BY_RANK:
        if len(getattr(s, name)) not in (0, s.ranks):
            yield f"{name} is not of {s.ranks} ranks"
    if "schedule" in run.method.names and (run.schedule not in SCHEDULES or run.microbatches > MOST_MICROBATCHES):
        yield f"a schedule {run.schedule!r} of {run.microbatches} micro-batches cannot be"
    if run.plan and len(run.plan.stages) != s.grid.stages:
        yield f"plan.json has {len(run.plan.stages)} stages, and the summary says {s.grid.stages}"
    for rank in range(s.servers, s.ranks if _is_together(s) and not run.changes else 0):
        if len(run.steps[rank]) != s.steps:
            yield f"rank {rank} has {len(run.steps[rank])} steps written down, and the run {s.steps}"


def _is_together(summary: Summary) -> bool:
    """Whether every worker takes part in every update; a server drops workers that do not answer."""
    lost = summary.own_figures.get("lost_workers") or summary.own_figures.get("returns")
    return describe(summary.strategy).exact and not lost


def _timelines(path: Path) -> list[Timeline]:
    """In the order of their steps."""
    with naming(path):
        lines = aligned(read_lines(path, records.Start, records.Clock, records.Timeline))
        found = {
            line.step: Timeline(line.step, line.time, events_of(line))
            for line in lines
            if isinstance(line, records.Timeline)
        }
    return [found[number] for number in sorted(found)]


def _plan(path: Path) -> StagePlan | None:
    with naming(path):
        return build(StagePlan, parse(read_text(path))) if path.exists() else None

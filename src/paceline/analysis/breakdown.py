"""Where the time of a step went, rank by rank: input, compute, waiting for others, communication, optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from statistics import fmean

from paceline.analysis.runs import Run
from paceline.run.records import Step, Summary
from paceline.strategies.table import describe

COMPUTE = ("forward", "recompute", "backward")
# Share of compute: less time without a core than this is not shown separately.
SHARED = 0.1


@dataclass(frozen=True)
class Parts:
    """Mean seconds of the parts of a step, which add up to the whole step."""

    input: float = 0.0
    compute: float = 0.0
    slowest: float = 0.0  # waiting for a rank that computes longer
    communication: float = 0.0
    optimizer: float = 0.0
    other: float = 0.0
    bubble: float = 0.0  # waiting for the previous or the next stage
    core: float = 0.0  # ready to compute, but without a core

    @property
    def total(self) -> float:
        return float(sum(astuple(self)))


# What each part is called.
NAMES = {
    "input": "waiting for input",
    "compute": "compute",
    "core": "compute: waiting for a core",
    "slowest": "waiting for the slowest",
    "bubble": "waiting for other stages",
    "communication": "communication",
    "optimizer": "optimizer",
    "other": "other",
}


def by_rank(run: Run) -> dict[int, Parts]:
    """The parts of the steps of every worker, without warm-up; servers have none."""
    return of_steps(run.steps, run.summary, run.warm_up, run.at_once)


def of_steps(steps: Mapping[int, Sequence[Step]], summary: Summary, skip: int, at_once: int = 1) -> dict[int, Parts]:
    """The parts of these steps of every worker, without the first ones.

    If cores were shared, compute is only the time on a core.
    """
    found = _of_steps(steps, summary, skip, at_once)
    waited, ran = (sum(getattr(parts, name) for parts in found.values()) for name in ("core", "compute"))
    # Emulated compute sleeps: waiting for a core does not make it longer, unless it is longer than the sleep.
    if waited > SHARED * (waited + ran) and not summary.emulated:
        return found
    return {rank: replace(parts, compute=parts.compute + parts.core, core=0.0) for rank, parts in found.items()}


def _of_steps(steps: Mapping[int, Sequence[Step]], summary: Summary, skip: int, at_once: int) -> dict[int, Parts]:
    workers = {rank: made for rank, made in steps.items() if rank >= summary.servers and made}
    method = describe(summary.strategy)
    if method.asynchronous:  # workers do not wait for the slowest; each makes its share of the updates
        skip //= at_once
        return {rank: mean([_parts(step, 0.0) for step in made[skip:] or made]) for rank, made in workers.items()}
    if method.timelines:  # a pipeline's stages
        return {rank: mean([_of_stage(step) for step in made[skip:]]) for rank, made in workers.items()}
    by_number: dict[int, dict[int, Step]] = {}
    for rank, made in workers.items():
        for step in made:
            by_number.setdefault(step.step, {})[rank] = step
    found: dict[int, list[Parts]] = {}
    for number in sorted(by_number)[skip:]:
        last = max(map(_ready, by_number[number].values()))
        for rank, step in by_number[number].items():
            found.setdefault(rank, []).append(_parts(step, last - _ready(step)))
    return {rank: mean(parts) for rank, parts in sorted(found.items())}


def _ready(step: Step) -> float:
    """When a rank had its gradient and began to wait."""
    return step.time - step.spans.get("optimizer", 0.0) - step.spans.get("wait", 0.0)


def _parts(step: Step, until_slowest: float) -> Parts:
    spans = step.spans
    compute, core = computed(step)
    waited = spans.get("wait", 0.0)
    slowest = min(waited, max(0.0, until_slowest))
    communication = waited - slowest + spans.get("push", 0.0)
    known = spans.get("input", 0.0) + compute + core + waited + spans.get("push", 0.0) + spans.get("optimizer", 0.0)
    return Parts(spans.get("input", 0.0), compute, slowest, communication, spans.get("optimizer", 0.0),
                 max(0.0, step.seconds - known), core=core)  # fmt: skip


def computed(step: Step) -> tuple[float, float]:
    """Seconds of computing on a core, and of waiting for one. Some of the waiting may be counted in the next part."""
    whole = sum(step.spans.get(name, 0.0) for name in COMPUTE)
    core = min(whole, sum(step.queued.get(name, 0.0) for name in COMPUTE))
    return whole - core, core


def _of_stage(step: Step) -> Parts:
    """A stage waits for messages; sending, and averaging with other replicas, is communication."""
    spans, (compute, core) = step.spans, computed(step)
    known = {"input": spans.get("input", 0.0), "compute": compute, "core": core,
             "bubble": spans.get("wait", 0.0), "communication": spans.get("send", 0.0) + spans.get("average", 0.0),
             "optimizer": spans.get("optimizer", 0.0)}  # fmt: skip
    return Parts(**known, other=max(0.0, step.seconds - sum(known.values())))


def mean(parts: Sequence[Parts]) -> Parts:
    return Parts(**{part.name: fmean(getattr(each, part.name) for each in parts) for part in fields(Parts)})

"""Pipelines: how each stage spent its time, its idle time compared with theory, and its plan.

The *passes* of a step last from the start of its first forward pass to the end of its last backward pass, over all
stages of a replica. The bubble is the share of that time in which stages do not compute. Averaging and updates follow.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline.analysis.runs import Run, Timeline
from paceline.pipeline.schedule import Op, bubble, instructions
from paceline.run.timelines import Event

BUSY = ("forward", "recompute", "backward")
DID = (*BUSY, "send", "wait", "average", "optimizer", "input")
FIRST = 3  # steps that are never typical, because memory is allocated and connections are opened
# What a receive waits for: the direction of its message, and the event that sent it.
FROM = {Op.RECV_ACTIVATION: (-1, Op.SEND_ACTIVATION), Op.RECV_GRADIENT: (1, Op.SEND_GRADIENT)}


@dataclass(frozen=True)
class StageTime:
    """Seconds of a stage in a step, by kind of event: the mean over steps and replicas, with `micros` micro-batches."""

    stage: int
    seconds: dict[str, float]
    micros: int

    def each(self, *what: str) -> float:
        """Seconds of a micro-batch."""
        return sum(self.seconds[name] for name in what) / self.micros

    @property
    def busy(self) -> float:
        return sum(self.seconds[name] for name in BUSY)


@dataclass(frozen=True)
class Pipeline:
    """The stages of a run, from the steps with recorded events."""

    stages: tuple[StageTime, ...]
    steps: tuple[int, ...]  # without warm-up and smaller batches
    typical: int  # the one of median length
    measured: float  # the bubble of the median step
    uneven: float  # the bubble by the schedule, for stages that take as long as these
    theory: float  # the bubble for equal stages


@dataclass(frozen=True)
class Row:
    """Events of a rank in one step, on a common clock: 0 is when the first rank began the step."""

    rank: int
    replica: int
    stage: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Beside:
    """A stage as planned and as measured: seconds of a micro-batch (with its share of the update), bytes.

    A plan without profiling predicts neither time nor memory.
    """

    stage: int
    layers: tuple[str, ...]
    planned_compute: float | None
    planned_transfer: float | None
    compute: float
    sending: float
    cut_bytes: int  # activations of a micro-batch over the cut after it; 0 for the last
    planned_memory: int | None
    memory: int | None  # the peak over its ranks


def pipeline(run: Run) -> Pipeline | None:
    """None if the run is not a pipeline, or has no recorded events."""
    s, used = run.summary, _used(run)
    micros = max((_passes(line) for rank in run.timelines for line in _of(run, rank, used)), default=0)
    if not micros or run.schedule is None:
        return None
    stages = []
    for stage in range(s.grid.stages):
        seconds = {what: fmean(_spent(line, what) for rank in _ranks(run, stage) for line in _of(run, rank, used))
                   for what in DID}  # fmt: skip
        stages.append(StageTime(stage, seconds, micros))
    spans = {step: _span(rows(run, step)) for step in used}
    typical = sorted(used, key=lambda step: spans[step])[(len(used) - 1) // 2]
    uneven = idle(run.schedule, [each.each("forward") for each in stages],
                  [each.each("recompute", "backward") for each in stages], micros)  # fmt: skip
    return Pipeline(tuple(stages), tuple(used), typical, median(_idle(run, step) for step in used), uneven,
                    bubble(run.schedule, s.grid.stages, micros))  # fmt: skip


def _used(run: Run) -> list[int]:
    """Steps with whole batches and events of all ranks: after warm-up if there are any, else after the first ones."""
    if not run.timelines:
        return []
    known = set.intersection(*({line.step for line in lines} for lines in run.timelines.values()))
    most = max(step.samples for step in run.steps[0])
    whole = [step.step for step in run.steps[0] if step.samples == most and step.step in known]
    steady = {step.step for step in run.steady}
    late = {step.step for step in run.steps[0][FIRST:]}
    return next((found for chosen in (steady & late, late) if (found := [n for n in whole if n in chosen])), whole)


def _ranks(run: Run, stage: int) -> list[int]:
    return [replica * run.summary.grid.stages + stage for replica in range(run.replicas)]


def _of(run: Run, rank: int, steps: Sequence[int]) -> list[Timeline]:
    return [line for line in run.timelines[rank] if line.step in steps]


def _passes(line: Timeline) -> int:
    """The number of micro-batches; a batch with fewer samples has fewer."""
    return len([event for event in line.events if event.what == "forward"])


def _spent(line: Timeline, what: str) -> float:
    return sum(event.seconds for event in line.events if event.what == what)


def rows(run: Run, step: int) -> list[Row]:
    """The events of every rank in a step."""
    lines = {rank: _of(run, rank, [step])[0] for rank in run.timelines}
    begin = min(line.time for line in lines.values())
    found = []
    for rank, line in lines.items():
        moved = tuple(Event(e.what, e.micro, e.start + line.time - begin, e.seconds) for e in line.events)
        found.append(Row(rank, *divmod(rank, run.summary.grid.stages), moved))
    return found


def _span(found: Sequence[Row]) -> float:
    """From the first event to the last."""
    events = [event for row in found for event in row.events]
    return max((e.end for e in events), default=0.0) - min((e.start for e in events), default=0.0)


def _idle(run: Run, step: int) -> float:
    """The mean of the replicas."""
    found = []
    for replica in range(run.replicas):
        passes = [e for row in rows(run, step) if row.replica == replica for e in row.events if e.what in BUSY]
        if passes:
            span = max(e.end for e in passes) - min(e.start for e in passes)
            found.append(1 - sum(e.seconds for e in passes) / (run.summary.grid.stages * span) if span else 0.0)
    return fmean(found) if found else 0.0


def idle(schedule: str, forward: Sequence[float], backward: Sequence[float], micros: int) -> float:
    """The bubble by the schedule, for these times of forward and backward passes and messages that take no time."""
    stages = len(forward)
    todo = [deque(instructions(schedule, stages, micros, stage)) for stage in range(stages)]
    takes = [{Op.FORWARD: forward[stage], Op.BACKWARD: backward[stage]} for stage in range(stages)]
    now, done = [0.0] * stages, dict[tuple[int, Op, int], float]()
    while any(todo):
        for stage in range(stages):
            while todo[stage]:
                op, micro = todo[stage][0].op, todo[stage][0].micro
                if op in FROM:
                    way, sent = FROM[op]
                    if (stage + way, sent, micro) not in done:
                        break
                    now[stage] = max(now[stage], done[stage + way, sent, micro])
                now[stage] += takes[stage].get(op, 0.0)
                done[stage, op, micro] = now[stage]
                todo[stage].popleft()
    busy, span = micros * (sum(forward) + sum(backward)), max(now)
    return 1 - busy / (stages * span) if span else 0.0


def beside_plan(run: Run) -> list[Beside]:
    """One row per stage; empty without a plan or without recorded events."""
    found, peaks = pipeline(run), run.summary.peak_rss_bytes
    if found is None or run.plan is None:
        return []
    made = []
    for took, planned in zip(found.stages, run.plan.stages, strict=True):
        had = [peaks[rank] for rank in _ranks(run, took.stage) if rank < len(peaks)]
        timed = run.plan.timed
        made.append(Beside(took.stage, planned.layers, planned.seconds if timed else None,
                           planned.transfer_seconds if timed else None, took.each(*BUSY, "optimizer"),
                           took.each("send"), planned.forward_bytes, planned.memory_bytes if timed else None,
                           max(had, default=None)))  # fmt: skip
    return made

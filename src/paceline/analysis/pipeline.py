"""Pipelines: what each stage did with its time, how idle it was beside theory, and what its plan had said.

The *passes* of a step are from the start of its first forward pass to the end of its last backward pass, over all
stages of a replica; which part of that time stages do not compute is the bubble. Updates and averaging come after it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median

from paceline.analysis.runs import Event, Run, Timeline
from paceline.pipeline.schedule import Op, bubble, instructions

BUSY = ("forward", "recompute", "backward")
DID = (*BUSY, "send", "wait", "average", "optimizer", "input")
FIRST = 3  # steps that are never typical: memory is allocated, connections open
# What a receive waits for: which way its message comes, and what sent it.
FROM = {Op.RECV_ACTIVATION: (-1, Op.SEND_ACTIVATION), Op.RECV_GRADIENT: (1, Op.SEND_GRADIENT)}


@dataclass(frozen=True)
class StageTime:
    """A stage's seconds of a step, by what it did: the mean of steps and replicas; `micros` micro-batches in each."""

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
    """What is known of a run's stages from the steps whose events were written down."""

    stages: tuple[StageTime, ...]
    steps: tuple[int, ...]  # that it is of: warm-up and smaller batches left out
    typical: int  # the one of median length
    measured: float  # which part of the passes stages did not compute, the median step
    uneven: float  # the same by the schedule alone, of stages that take as long as these
    theory: float  # of equal stages


@dataclass(frozen=True)
class Row:
    """A rank's events of one step, on the clock of all ranks: 0 is when the first of them began the step."""

    rank: int
    replica: int
    stage: int
    events: tuple[Event, ...]


@dataclass(frozen=True)
class Beside:
    """A stage as planned and as it was: seconds of a micro-batch (with its part of the update), bytes.

    A plan for which nothing was run only counts what the model says: it predicts no time and no memory.
    """

    stage: int
    layers: tuple[str, ...]
    planned_compute: float | None
    planned_transfer: float | None
    compute: float
    sending: float
    cut_bytes: int  # a micro-batch's, forward over the cut behind it; 0 for the last
    planned_memory: int | None
    memory: int | None  # the most that one of its ranks had


def pipeline(run: Run) -> Pipeline | None:
    """None of a run that is no pipeline, or of whose steps nothing was written down."""
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
    """Steps of whole batches whose events all ranks have, after warm-up if there are any, else after the first."""
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
    """How many micro-batches it had: a batch smaller than they are many has fewer."""
    return len([event for event in line.events if event.what == "forward"])


def _spent(line: Timeline, what: str) -> float:
    return sum(event.seconds for event in line.events if event.what == what)


def rows(run: Run, step: int) -> list[Row]:
    """What every rank did in a step."""
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
    """Which part of the stages' time is idle by the schedule alone: each takes so long for a pass, messages no time."""
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
    """Stage by stage; nothing of a run without a plan or without written events."""
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

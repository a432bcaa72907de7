"""Prints a plan: its stages as a table, their times as bars, and the predicted step time; no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from paceline.pipeline.plan import MEMORY, Stage, StagePlan
from paceline.pipeline.schedule import SCHEDULES, bubble
from paceline.pipeline.sizes import digits, in_bits, in_bytes

WIDTH = 110
BAR = 64  # length for the slowest stage
COMPUTE, TRANSFER = "█", "░"
HOW = {
    "measured": "cut where the slowest stage is fastest",
    "layers": "cut by the number of layers",
    "parameters": "cut by the number of parameters",
    "given": "cut as given",
}
# If one stage works at a time, the times of all stages count.
MEASURED_SUM = "cut where a micro-batch takes least time through all stages"


def lines(plan: StagePlan) -> list[str]:
    """All lines; without times if no layer was run."""
    if not plan.timed:
        return [heading(plan), "", *table(plan), "", *pace(plan)]
    known = [*memory(plan), ""] if plan.sized else []
    return [heading(plan), "", *table(plan), "", *known, *bars(plan), "", *pace(plan)]


def heading(plan: StagePlan) -> str:
    overlap = SCHEDULES[plan.schedule].overlaps
    how = MEASURED_SUM if plan.how == "measured" and not overlap else HOW[plan.how]
    return (
        f"{_count(len(plan.stages), 'stage')}, {_count(plan.micros, 'micro-batch')} of "
        f"{_count(plan.micro_size, 'sample')}, schedule {plan.schedule}; {how}"
    )


def table(plan: StagePlan) -> list[str]:
    """The layers of each stage, and its cost for a micro-batch."""
    last = len(plan.stages) - 1
    columns = {
        "stage": [str(number) for number in range(last + 1)],
        "layers": [""] * (last + 1),
        "parameters": [f"{stage.parameters:,}" for stage in plan.stages],
    }
    if plan.timed:
        columns["compute, ms"] = [digits(stage.seconds * 1000) for stage in plan.stages]
        columns["transfer, ms"] = [digits(stage.transfer_seconds * 1000) for stage in plan.stages]
    columns["sends on"] = [in_bytes(stage.forward_bytes) for stage in plan.stages[:-1]] + ["–"]
    if plan.timed and plan.sized:
        columns["memory"] = [in_bytes(stage.memory_bytes) for stage in plan.stages]
    free = WIDTH - sum(max(map(len, (head, *cells))) + 2 for head, cells in columns.items() if head != "layers")
    columns["layers"] = [layers(stage, free) for stage in plan.stages]
    return _aligned([tuple(columns), *zip(*columns.values(), strict=True)], left=1)


def layers(stage: Stage, width: int) -> str:
    """`conv1 … layer1.2.relu (17)`, in at most `width` columns; of long names the ends are kept."""
    first, last, many = stage.layers[0], stage.layers[-1], f" ({len(stage.layers)})"
    if len(stage.layers) == 1:
        return _short(first, width - len(many)) + many
    room = width - len(many) - len(" … ")
    if len(first) + len(last) > room:
        half = room // 2
        first = _short(first, max(half, room - len(last)))
        last = _short(last, room - len(first))
    return f"{first} … {last}{many}"


def memory(plan: StagePlan) -> list[str]:
    """What each stage uses memory for."""
    parts = [[in_bytes(stage.memory[part]) for part in MEMORY] for stage in plan.stages]
    rows = [(str(number), *part) for number, part in enumerate(parts)]
    return _aligned([("memory of stage", *MEMORY), *rows])


def bars(plan: StagePlan) -> list[str]:
    """A bar for each stage with its time for a micro-batch; between two stages, the bytes over their cut."""
    slowest, last = plan.slowest, len(plan.stages) - 1
    margin = len(f"stage {last}") + 2
    drawn = []
    for number, stage in enumerate(plan.stages):
        whole = max(1, round(BAR * stage.total_seconds / slowest))
        transfer = min(whole, round(BAR * stage.transfer_seconds / slowest))
        bar = COMPUTE * (whole - transfer) + TRANSFER * transfer
        drawn.append(f"{f'stage {number}':<{margin}}{bar} {digits(stage.total_seconds * 1000)} ms")
        if number < last:
            drawn.append(f"{'':<{margin}}│ {in_bytes(stage.forward_bytes)} forward for each micro-batch")
    key = f"{COMPUTE} computing a micro-batch, forward and backward"
    if plan.bandwidth:
        return [*drawn, f"{'':<{margin}}{key}   {TRANSFER} sending and receiving at {in_bits(plan.bandwidth)}"]
    return [*drawn, f"{'':<{margin}}{key} (without the cost of messages: see --bandwidth)"]


def pace(plan: StagePlan) -> list[str]:
    """The predicted step time, and the idle part of it."""
    stages, micros, samples = len(plan.stages), plan.micros, plan.micros * plan.micro_size
    times, overlap = [stage.total_seconds for stage in plan.stages], SCHEDULES[plan.schedule].overlaps
    turns, each = (micros + stages - 1, plan.slowest) if overlap else (micros, sum(times))
    formula = f"({micros} + {stages} - 1)" if overlap and stages > 1 else f"{turns}"
    said = ["The time of a step was not predicted, because no layer was run."]
    if step := turns * each if plan.timed else 0.0:
        speed = f"{digits(samples / step)} samples/s"
        said = [f"A step should take about {formula} x {_ms(each)} = {_ms(step)}, {speed}: {_why(plan, overlap)}."]
    idle = _percent(bubble(plan.schedule, stages, micros))
    if stages > 1 and overlap:
        fewer = _percent(bubble(plan.schedule, stages, 2 * micros))
        said.append(
            f"Idle in theory, while the pipeline fills and drains: ({stages} - 1) / ({micros} + {stages} - 1) = {idle} "
            f"of the stages' time; with {2 * micros} micro-batches it would be {fewer}."
        )
        if plan.timed and (even := sum(times) / stages / plan.slowest) < 0.995:
            said.append(
                f"Faster stages also wait for the slowest: on average stages take {_percent(even)} of its time."
            )
    elif stages > 1:
        said.append(f"Idle in theory, one stage at a time: ({stages} - 1) / {stages} = {idle} of their time.")
    return [line for sentence in said for line in textwrap.wrap(sentence, WIDTH)]


def _why(plan: StagePlan, overlap: bool) -> str:
    if len(plan.stages) == 1:
        return "one stage computes them all"
    if not overlap:
        return "one micro-batch after the other goes through all stages"
    slowest = max(range(len(plan.stages)), key=lambda number: plan.stages[number].total_seconds)
    return f"stage {slowest} sets the pace"


def _percent(part: float) -> str:
    return f"{100 * part:.0f} %"


def _ms(seconds: float) -> str:
    return f"{digits(seconds * 1000)} ms" if seconds < 10 else f"{digits(seconds)} s"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 'es' if what.endswith('ch') else 's'}"


def _short(name: str, width: int) -> str:
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"


def _aligned(rows: Sequence[Sequence[str]], left: int | None = None) -> list[str]:
    """Right-aligned columns, except one for text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if i == left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

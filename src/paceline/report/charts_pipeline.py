"""Charts of pipelines: what each stage did in a typical step, and each stage as planned and as measured."""

from __future__ import annotations

from collections.abc import Sequence

from paceline.analysis.finding_pipeline import of_group
from paceline.analysis.pipeline import Beside, Pipeline, Row, beside_plan, pipeline, rows
from paceline.analysis.scaling import Group
from paceline.analysis.study import Study
from paceline.analysis.wording import number, percent, size
from paceline.report import traces
from paceline.report.figure import COLOURS, Chart, Page, Panel, categories, from_zero, plain
from paceline.report.placement import chart
from paceline.report.series import natural
from paceline.report.traces import Trace, bars, caption, identity, middle, wrapped
from paceline.run.timelines import Event

# What a stage does: its name, colour and pattern.
LOOKS = {
    "forward": ("forward", COLOURS[0], ""),
    "backward": ("backward", COLOURS[1], "/"),
    "recompute": ("recomputation", COLOURS[5], ""),
    "send": ("sending", COLOURS[2], ""),
    "wait": ("waiting", "#e3e3e3", ""),
    "average": ("averaging", COLOURS[3], "x"),
    "optimizer": ("optimizer", COLOURS[4], ""),
    "input": ("input", COLOURS[6], ""),
    "other": ("other", "#999999", ""),
}
NUMBERED = ("forward", "backward", "recompute")
PLANNED, MEASURED, COUNTED = "planned", "measured", "counted"
# Bars of the stages: the indices of their colours and patterns.
BARS = {PLANNED: 5, "planned: transfers": 4, MEASURED: 0, "measured: sending": 1, COUNTED: 2}
MS, MB = 1e3, 1e6
ROW, LEAST = 30, 150  # pixels: for each rank, and at least for all of them


def _staged(study: Study) -> dict[str, Group]:
    """Pipelines with recorded steps, by name."""
    known = [one for one in study.groups if of_group(one)]
    named = {plain(one.label(known)): one for one in known}
    return {name: named[name] for name in sorted(named, key=natural)}


def step(study: Study) -> Chart | None:
    """A row for each rank with a bar for each event; a page for each setting."""
    pages, table, most = [], list[traces.Row](), 0
    for name, one in _staged(study).items():
        run = middle(one)
        found = pipeline(run)
        if found is None:
            continue
        drawn = rows(run, found.typical)
        most = max(most, len(drawn))
        pages.append(Page(name, [_gantt(_idleness(one, found), drawn, run.replicas)]))
        table += [identity(one) | _of_step(found) | {"rank": row.rank, "replica": row.replica, "stage": row.stage}
                  | {"what": e.what, "micro_batch": e.micro, "start_seconds": e.start, "seconds": e.seconds}
                  for row in drawn for e in row.events]  # fmt: skip
    text = caption("A step of median length, of the middle repeat; numbers are micro-batches. Idle is the share of "
                   "time between the first forward pass and the end of the last backward pass in which stages do not "
                   "compute: measured, in all recorded steps after warm-up; by the schedule, for stages as unbalanced "
                   "as these; and in theory, for equal stages.",
                   groups=_staged(study).values())  # fmt: skip
    return chart("pipeline-step", "A step of a pipeline", text, pages, table, plot=max(LEAST, ROW * most),
                 barmode="overlay", bargap=0.18, uniformtext={"mode": "hide", "minsize": 9})  # fmt: skip


def _of_step(found: Pipeline) -> traces.Row:
    return {"idle": found.measured, "idle_by_schedule": found.uneven, "idle_by_theory": found.theory,
            "step": found.typical}  # fmt: skip


def _idleness(one: Group, found: Pipeline) -> str:
    """Measured and theoretical idle time, as the title of the panel."""
    said = one.setting.words(("stages", "schedule", "microbatches"))
    return (f"{said}: {percent(found.measured)} idle, {percent(found.uneven)} by the schedule, "
            f"{percent(found.theory)} in theory")  # fmt: skip


def _gantt(title: str, drawn: Sequence[Row], replicas: int) -> Panel:
    """A Gantt chart with the first stage at the top."""
    names = {row.rank: _called(row, replicas) for row in drawn}
    end = max((event.end for row in drawn for event in row.events), default=0.0)
    x = from_zero("time of the step, ms", range=[0, 1.005 * MS * end])
    panel = Panel(title, x, categories("", list(names.values())[::-1], showgrid=False))
    for what, (said, colour, pattern) in LOOKS.items():
        did = [(row, event) for row in drawn for event in row.events if _kind(event) == what and event.seconds > 0]
        if did:
            panel.traces.append(_bars(did, names, said, colour, pattern, numbered=what in NUMBERED))
    return panel


def _called(row: Row, replicas: int) -> str:
    return f"replica {row.replica}, stage {row.stage}" if replicas > 1 else f"stage {row.stage}"


def _kind(event: Event) -> str:
    return event.what if event.what in LOOKS else "other"


def _bars(did: Sequence[tuple[Row, Event]], names: dict[int, str], said: str, colour: str, pattern: str, *,
          numbered: bool) -> Trace:  # fmt: skip
    hover = []
    for row, event in did:
        of = f" of micro-batch {event.micro}" if event.micro >= 0 else ""
        hover.append(f"{names[row.rank]} (rank {row.rank}): {said}{of}, {number(MS * event.seconds)} ms, from "
                     f"{number(MS * event.start)} ms on")  # fmt: skip
    look = {"shape": pattern, "fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.5, "size": 7, "solidity": 0.2}
    numbers = {"text": [str(event.micro) for _, event in did], "textposition": "inside", "insidetextanchor": "middle",
               "textangle": 0, "insidetextfont": {"color": "#ffffff", "size": 11}}  # fmt: skip
    return {
        "type": "bar", "orientation": "h", "name": said, "y": [names[row.rank] for row, _ in did],
        "base": [round(MS * event.start, 4) for _, event in did], "x": [round(MS * e.seconds, 4) for _, e in did],
        "marker": {"color": colour, "line": {"color": "#ffffff", "width": 0.5}, "pattern": look},
        "hovertext": [wrapped(each) for each in hover], "hoverinfo": "text", **(numbers if numbered else {}),
    }  # fmt: skip


def cut(study: Study) -> Chart | None:
    """For each stage: time of a micro-batch, memory, and bytes over the cut after it, as planned and as measured."""
    pages, table = [], list[traces.Row]()
    for name, one in _staged(study).items():
        found = beside_plan(middle(one))
        if found:
            pages.append(Page(name, [_times(name, found), _memory(name, found), _cuts(name, found)]))
            table += [identity(one) | _beside(each) for each in found]
    text = caption("Each stage as planned and as measured in the middle repeat. The time of a micro-batch includes its "
                   "share of the update. Measured transfers include sending only: receiving is part of waiting. Memory "
                   "is the peak of a rank. Bytes are the activations of a micro-batch that cross the cut after a "
                   "stage; the gradients that come back are about as large. A plan for which no layer was profiled "
                   "predicts neither time nor memory.",
                   groups=_staged(study).values())  # fmt: skip
    return chart("pipeline-cut", "Stages as planned and as measured", text, pages, table, barmode="group", bargap=0.25,
                 bargroupgap=0.05)  # fmt: skip


def _beside(each: Beside) -> traces.Row:
    return {"stage": each.stage, "layers": len(each.layers), "first_layer": each.layers[0] if each.layers else "",
            "planned_compute_seconds": each.planned_compute, "planned_transfer_seconds": each.planned_transfer,
            "compute_seconds": each.compute, "sending_seconds": each.sending, "cut_bytes": each.cut_bytes,
            "planned_memory_bytes": each.planned_memory, "peak_rss_bytes": each.memory}  # fmt: skip


def _stages(found: Sequence[Beside]) -> list[str]:
    return [str(each.stage) for each in found]


def _times(who: str, found: Sequence[Beside]) -> Panel:
    """Two bars for each stage: compute, with transfers stacked on it."""
    panel = Panel("time", categories("stage", _stages(found)), from_zero("time of a micro-batch, ms"))
    planned = [each.planned_compute or 0.0 for each in found]
    parts = {
        PLANNED: ("compute planned", planned, [0.0] * len(found)),
        "planned: transfers": ("transfers planned", [each.planned_transfer or 0.0 for each in found], planned),
        MEASURED: ("compute measured", [each.compute for each in found], [0.0] * len(found)),
        "measured: sending": ("sending measured", [each.sending for each in found], [each.compute for each in found]),
    }  # fmt: skip
    for name, (what, values, below) in parts.items():
        hover = [f"{who}, stage {each.stage}: {what} {number(MS * value)} ms for a micro-batch"
                 for each, value in zip(found, values, strict=True)]  # fmt: skip
        if max(values) > 0:
            trace = _beside_each_other(name, _stages(found), [MS * value for value in values], hover)
            panel.traces.append(trace | {"base": [MS * value for value in below]})
    return panel


def _memory(who: str, found: Sequence[Beside]) -> Panel:
    panel = Panel("memory", categories("stage", _stages(found)), from_zero("memory of a rank, MB"))
    parts = {PLANNED: [(each, float(each.planned_memory)) for each in found if each.planned_memory],
             MEASURED: [(each, float(each.memory)) for each in found if each.memory]}  # fmt: skip
    for name, values in parts.items():
        hover = [f"{who}, stage {each.stage}: memory {name}, {size(value)}" for each, value in values]
        if values:
            panel.traces.append(_beside_each_other(name, [str(each.stage) for each, _ in values],
                                                   [value / MB for _, value in values], hover))  # fmt: skip
    return panel


def _cuts(who: str, found: Sequence[Beside]) -> Panel:
    """Bytes over each cut, which follow from the shapes of the model even if no layer was profiled."""
    cuts = found[:-1]
    places = [f"{each.stage}–{each.stage + 1}" for each in cuts]
    panel = Panel("cuts", categories("cut between stages", places), from_zero("activations of a micro-batch, MB"))
    hover = [f"{who}, between stages {place}: {size(each.cut_bytes)} of activations for a micro-batch"
             for place, each in zip(places, cuts, strict=True)]  # fmt: skip
    if cuts:
        name = COUNTED if cuts[0].planned_memory is None else PLANNED
        panel.traces.append(_beside_each_other(name, places, [each.cut_bytes / MB for each in cuts], hover))
    return panel


def _beside_each_other(name: str, x: Sequence[str], y: Sequence[float], hover: Sequence[str]) -> Trace:
    return bars(x, y, name, BARS[name], hover, offsetgroup=name.partition(":")[0], legendrank=list(BARS).index(name))

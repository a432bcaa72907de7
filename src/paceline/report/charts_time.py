"""Charts of time: the parts of a step by setting and by rank, time by batch size, effect of nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.breakdown import NAMES, Parts, by_rank, mean
from paceline.analysis.finding_speed import mean_parts
from paceline.analysis.scaling import Group, certain
from paceline.analysis.setting import nodes_of, shared
from paceline.analysis.statistics import Interval, median
from paceline.analysis.study import Study
from paceline.analysis.wording import count, number, percent
from paceline.report.figure import Chart, Page, Panel, categories, doublings, from_zero
from paceline.report.placement import chart
from paceline.report.series import SAME_PANEL, Styled, arrange
from paceline.report.strands import (
    AXES,
    Strand,
    by_workers,
    families,
    few_servers,
    places,
    settings,
    side_by_side,
    timed_by_batch,
    words,
)
from paceline.report.tables import is_whole
from paceline.report.traces import (
    INTERVALS,
    SPREAD,
    Measured,
    Row,
    bars,
    between,
    caption,
    error_bars,
    identity,
    line,
    of_runs,
    open_marks,
    over_repeats,
    scaled,
    with_interval,
)

# Parts of a step: the indices of colour and pattern.
PARTS = {
    "input": (2, 2),
    "compute": (0, 0),
    "core": (0, 1),
    "slowest": (4, 4),
    "bubble": (5, 5),
    "communication": (1, 1),
    "optimizer": (3, 3),
    "other": (6, 6),
}

SHARED_CORES = (
    "Waiting for a core: the worker was ready to compute, but other workers, threads or programs used the cores."
)
LEAST = 0.001  # of a step: smaller parts are not shown
MOST_APART = 12  # panels share a y axis if their highest bars differ by at most this factor


@dataclass(frozen=True)
class Unit:
    """The unit of the height of bars: seconds times a factor, which may depend on the setting."""

    what: str
    name: str
    factor: Callable[[Group], float]


@dataclass(frozen=True)
class Bar:
    """A setting, or one of its ranks."""

    place: str
    what: str
    group: Group
    parts: Parts


def breakdown(study: Study) -> Chart | None:
    """A bar for each setting, the mean of its ranks; if batch sizes differ, per sample."""
    along, strands = side_by_side(study)
    found = {id(one): mean_parts(one) for one in settings(strands)}
    unit = _unit(max((parts.total for parts in found.values() if parts), default=0.0))
    if along == "batch_size":
        unit = Unit("time for 1,000 samples", "s", lambda one: 1000 / one.first.summary.global_batch)
    pages, at = [], places(strands, along)
    for sheet in arrange(study, strands, words, None, without=(along,)):
        panels = []
        for heading, part in sheet.panels.items():
            bars_of = [Bar(at[id(one)], one.setting.text(along), one, parts) for one in part[0].thing.groups
                       if (parts := found[id(one)])]  # fmt: skip
            x = categories(AXES[along], list(dict.fromkeys(at.values())))
            panels.append(_stacked(heading, x, bars_of, part[0].full, unit))
        pages.append(Page(sheet.name, _one_scale(panels)))
    rows = [identity(one) | _row(parts) for one in settings(strands) if (parts := found[id(one)])]
    text = caption("The mean step of a worker after warm-up; the parts add up to the whole step. Waiting for the "
                   "slowest means waiting for a worker that computes longer; communication is the rest of the waiting.",
                   "Stages of a pipeline wait for messages from other stages." * _staged(found.values()),
                   SHARED_CORES * any(parts and parts.core for parts in found.values()),
                   groups=settings(strands))  # fmt: skip
    return chart("breakdown", "Where the time of a step goes", text, pages, rows, barmode="stack", bargap=0.3)


def breakdown_by_rank(study: Study) -> Chart | None:
    """A bar for each worker of the settings with the most workers."""
    strands = [one for one in few_servers(by_workers(study)) if one.groups[-1].workers > 1]
    found = {id(one): _by_rank(one.groups[-1]) for one in strands}
    unit = _unit(max((parts.total for ranks in found.values() for parts in ranks.values()), default=0.0))
    pages, rows = [], list[Row]()
    for sheet in arrange(study, strands, words, None, without=("workers",)):
        panels = []
        for heading, part in sheet.panels.items():
            widest, ranks = part[0].thing.groups[-1], found[id(part[0].thing)]
            title = f"{heading or part[0].full}, {count(widest.workers, 'worker')}"
            bars_of = [Bar(str(rank), f"rank {rank}", widest, parts) for rank, parts in ranks.items()]
            panels.append(_stacked(title, categories("rank", list(map(str, ranks))), bars_of, part[0].full, unit))
            rows += [identity(widest) | {"rank": rank} | _row(parts) for rank, parts in ranks.items()]
        pages.append(Page(sheet.name, _one_scale(panels)))
    text = caption("The same for each worker, with the most workers of each strategy. A rank with much compute and no "
                   "waiting is the one that the others wait for.",
                   SHARED_CORES * any(parts.core for ranks in found.values() for parts in ranks.values()),
                   groups=settings(strands))  # fmt: skip
    return chart("breakdown-by-rank", "Where the time of a step goes, by rank", text, pages, rows, barmode="stack",
                 bargap=0.3)  # fmt: skip


def _staged(found: Iterable[Parts | None]) -> bool:
    return any(parts and parts.bubble for parts in found)


def _by_rank(one: Group) -> dict[int, Parts]:
    """The mean over repeats."""
    found: dict[int, list[Parts]] = {}
    for run in one.runs:
        for rank, parts in by_rank(run).items():
            found.setdefault(rank, []).append(parts)
    return {rank: mean(many) for rank, many in sorted(found.items())}


def _unit(most: float) -> Unit:
    name, factor = ("s", 1.0) if most >= 2 else ("ms", 1000.0)
    return Unit("time of a step", name, lambda _: factor)


def _row(parts: Parts) -> Row:
    return {f"{name}_seconds": getattr(parts, name) for name in PARTS} | {"step_seconds": parts.total}


def _stacked(heading: str, x: dict[str, Any], bars_of: Sequence[Bar], full: str, unit: Unit) -> Panel:
    """Stacked bars; parts that take no time in any of them are omitted."""
    panel = Panel(heading, x, from_zero(f"{unit.what}, {unit.name}"))
    for part, (index, pattern) in PARTS.items():
        label = NAMES[part]
        shares = [getattr(bar.parts, part) / bar.parts.total for bar in bars_of]
        if max(shares, default=0.0) < LEAST:
            continue
        heights = [getattr(bar.parts, part) * unit.factor(bar.group) for bar in bars_of]
        hover = [f"{full}, {bar.what}: {label} {number(height)} {unit.name}, {percent(share)} of a step"
                 f"{_on_core(bar, unit) if part in ('compute', 'core') else ''}"
                 for bar, height, share in zip(bars_of, heights, shares, strict=True)]  # fmt: skip
        trace = bars([bar.place for bar in bars_of], heights, label, index, hover, pattern,
                     legendrank=list(PARTS).index(part))  # fmt: skip
        panel.traces.append(trace)
    return panel


def _on_core(bar: Bar, unit: Unit) -> str:
    """How much of compute was CPU time, if less than all of it."""
    ran, factor = bar.parts.compute, unit.factor(bar.group)
    if not bar.parts.core:
        return ""
    whole = ran + bar.parts.core
    return f"; of {number(whole * factor)} {unit.name} of compute, {number(ran * factor)} {unit.name} were CPU time"


def _one_scale(panels: Sequence[Panel]) -> list[Panel]:
    """Gives panels the same y axis so that bars can be compared, unless some would become too small."""
    highest = [max(map(sum, zip(*(trace["y"] for trace in panel.traces), strict=True)), default=0.0)
               for panel in panels]  # fmt: skip
    if max(highest, default=0.0) <= MOST_APART * min(highest, default=0.0):
        for panel in panels:
            panel.y["range"] = [0, 1.05 * max(highest)]
    return list(panels)


def whole_epochs(groups: Sequence[Group]) -> bool:
    return all(is_whole(one.first) for one in groups)


def epoch_time(one: Group) -> Interval:
    return median([np.array(run.summary.epoch_seconds) for run in one.runs])


def time_by_batch(study: Study) -> Chart | None:
    """Time of an epoch; in panels with incomplete epochs, time of 1,000 samples."""
    strands = timed_by_batch(study)
    pages, rows, said = [], dict[int, Row](), dict[str, None]()
    for sheet in arrange(study, strands, words, SAME_PANEL, without=("batch_size",)):
        panels = []
        for title, part in sheet.panels.items():
            groups = settings(styled.thing for styled in part)
            whole = whole_epochs(groups)
            what, column = ("an epoch", "epoch_seconds") if whole else ("1,000 samples", "seconds_per_1000_samples")
            measure = epoch_time if whole else _time_of_samples
            sizes = [one.first.summary.global_batch for one in groups]
            panel = Panel(title, doublings("batch size, samples per update", sizes), from_zero(f"time of {what}, s"))
            for styled in part:
                found = [Measured(one.first.summary.global_batch, y := measure(one),
                                  f"{styled.full}, batch {one.first.summary.global_batch:,}: {what} takes "
                                  f"{between(y, 's')}, {of_runs(one)}", certain(one))
                         for one in styled.thing.groups]  # fmt: skip
                panel.traces.append(line(found, styled.label, styled.look))
            rows |= {id(one): identity(one) | with_interval(column, measure(one)) for one in groups}
            said[what] = None
            panels.append(panel)
        pages.append(Page(sheet.name, panels))
    what = "an epoch, or of 1,000 samples if an epoch was not completed," if len(said) > 1 else next(iter(said), "")
    text = caption(f"Training time of {what} by global batch size.", INTERVALS,
                   open_marks(settings(strands)), groups=settings(strands))  # fmt: skip
    return chart("time-by-batch", "Time by batch size", text, pages, list(rows.values()))


def _time_of_samples(one: Group) -> Interval:
    return scaled(median([run.seconds_per_sample for run in one.runs]), 1000)


def nodes(study: Study) -> Chart | None:
    """Time of an epoch and of the whole run, for the same workers on different numbers of nodes."""
    strands = [Strand(shared([one.setting for one in many]), tuple(sorted(many, key=_workers_and_nodes)))
               for many in families(study.groups, ("workers", "threads"))
               if len({one.workers for one in many}) < len({_workers_and_nodes(one) for one in many})]  # fmt: skip
    whole = whole_epochs(settings(strands))
    what, column = ("an epoch", "epoch_seconds") if whole else ("training", "training_seconds")
    pages = []
    for sheet in arrange(study, strands, words, None, without=("workers", "nodes")):
        for title, part in sheet.panels.items():
            panels = [
                _by_nodes(f"time of {what}", part[0], _training),
                _by_nodes("time of the whole run", part[0], _total),
            ]
            pages.append(Page(", ".join(each for each in (sheet.name, title) if each), panels))
    rows = [identity(one) | with_interval(column, _training(one)) | with_interval("total_seconds", _total(one))
            for one in settings(strands)]  # fmt: skip
    text = caption("The same number of workers on one node and on several: the cost of the network between them.",
                   SPREAD, groups=settings(strands))  # fmt: skip
    return chart("nodes", "Effect of the number of nodes", text, pages, rows, barmode="group", bargap=0.25)


def _workers_and_nodes(one: Group) -> tuple[int, int]:
    return one.workers, nodes_of(one.first)


def _training(one: Group) -> Interval:
    """The median epoch of each repeat; for runs with a number of steps, their whole training."""
    return over_repeats([float(np.median(run.summary.epoch_seconds)) if whole_epochs([one])
                         else sum(run.summary.epoch_seconds) for run in one.runs])  # fmt: skip


def _total(one: Group) -> Interval:
    return over_repeats([run.summary.total_seconds or 0.0 for run in one.runs])


def _by_nodes(title: str, styled: Styled[Strand], measure: Callable[[Group], Interval]) -> Panel:
    groups = styled.thing.groups
    places = [str(workers) for workers in sorted({one.workers for one in groups})]
    panel = Panel(title, categories("workers", places), from_zero(f"{title}, s"))
    for index, many in enumerate(sorted({nodes_of(one.first) for one in groups})):
        chosen = [one for one in groups if nodes_of(one.first) == many]
        values = [measure(one) for one in chosen]
        hover = [f"{styled.full}, {count(one.workers, 'worker')} on {count(many, 'node')}: {between(value, 's')}, "
                 f"{of_runs(one)}" for one, value in zip(chosen, values, strict=True)]  # fmt: skip
        panel.traces.append(bars([str(one.workers) for one in chosen], [value.value for value in values],
                                 count(many, "node"), index, hover, error_y=error_bars(values, "#333333")))  # fmt: skip
    return panel

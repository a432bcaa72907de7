"""Charts of scaling: strong and weak scaling, speedup by model, throughput, servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from paceline.analysis.finding_speed import fits
from paceline.analysis.scaling import Group, Point, certain
from paceline.analysis.setting import MACHINE, NETWORK, shared
from paceline.analysis.statistics import LAWS, Interval, Series
from paceline.analysis.study import Study
from paceline.analysis.wording import count
from paceline.options import DIVISION, LEARNING, PROBLEM
from paceline.report.figure import COLOURS, DASHES, Chart, Page, Panel, axis, from_zero, whole_numbers
from paceline.report.placement import MOST_ABOVE, chart
from paceline.report.series import SAME_PANEL, Sheet, Styled, arrange, name, palette
from paceline.report.strands import Strand, apart, by_servers, by_workers, few, few_servers, of_curves, settings, words
from paceline.report.traces import (
    INTERVALS,
    Measured,
    Row,
    Trace,
    between,
    caption,
    ideal,
    identity,
    law,
    line,
    of_runs,
    open_marks,
    scaled,
    with_interval,
)

AT_ONE = Interval(1.0, 1.0, 1.0)
KIND = {"Amdahl's": "strong", "Gustafson's": "weak"}  # the kind of scaling that each law describes
MOST_LAWS = 4  # dotted lines in a panel
BASELINE = "one worker, the baseline"


def strong(study: Study) -> Chart | None:
    """Speedup over one worker with a fixed global batch."""
    lines = few(of_curves(study.strong))
    sheets = arrange(study, lines, words, SAME_PANEL, without=("workers",))
    pages = [Page(sheet.name, [_speedups(title, part, amdahl=True) for title, part in sheet.panels.items()])
             for sheet in sheets]  # fmt: skip
    text = caption("Speedup over one worker with a fixed global batch.",
                   INTERVALS, open_marks(settings(lines)), _serial_parts("Amdahl's", sheets),
                   groups=settings(lines))  # fmt: skip
    return chart("strong", "Strong scaling: fixed global batch", text, pages, _rows(lines))


def weak(study: Study) -> Chart | None:
    """Efficiency and time of a step with a fixed batch per worker."""
    lines = few(of_curves(study.weak))
    sheets = arrange(study, lines, words, SAME_PANEL, without=("workers",))
    alone = len(sheets) == 1 and len(sheets[0].panels) == 1
    pages = []
    for sheet in sheets:
        panels = [_efficiencies(title, part) for title, part in sheet.panels.items()]
        pages.append(Page(sheet.name, panels + [_steps(part) for part in sheet.panels.values() if alone]))
    text = caption("Efficiency with a fixed batch per worker: ideally, a step takes as long as with one worker. Steps "
                   "include input and waiting.", INTERVALS,
                   open_marks(settings(lines)), _serial_parts("Gustafson's", sheets),
                   groups=settings(lines))  # fmt: skip
    return chart("weak", "Weak scaling: fixed batch per worker", text, pages, _rows(lines))


def speedup_by_model(study: Study) -> Chart | None:
    """A panel per strategy; with one model, one panel."""
    everything = of_curves(study.weak or study.strong)
    lines = _whole_lines(everything)
    several = len({one.setting.text("model") for one in lines}) > 1
    if not several and not study.weak:
        return None
    panels = (DIVISION, NETWORK, *SAME_PANEL) if several else ()
    sheets = arrange(study, lines, words, panels, colour="model" if several else "strategy", without=("workers",))
    found = [point.speedup for one in lines for point in one.points]
    shared = min(max((each.high for each in found), default=1.0),
                 MOST_ABOVE * max((each.value for each in found), default=1.0))  # fmt: skip
    pages = [Page(sheet.name, [_speedups(title, part, top=shared) for title, part in sheet.panels.items()])
             for sheet in sheets]  # fmt: skip
    how = "with a fixed batch per worker" if study.weak else "with a fixed global batch"
    more = {one.setting.text("servers") for one in everything} - {one.setting.text("servers") for one in lines}
    rest = "Settings with more servers ran with few numbers of workers: see the chart by number of servers."
    text = caption(f"Samples per second relative to one worker, {how}.", INTERVALS, open_marks(settings(lines)),
                   rest if more else "", groups=settings(lines))  # fmt: skip
    title = "Speedup by model" if several else "Speedup"
    return chart("speedup-by-model", title, text, pages, _rows(lines))


def _whole_lines(strands: Sequence[Strand]) -> list[Strand]:
    """Without settings with more servers that ran with one number of workers only: they are in the chart of servers."""
    kept = set()
    for many in by_servers(few_servers(strands)):
        long = [strand for strand in many if len(strand.points) > 1]
        kept |= {id(strand) for strand in long or many}
    return [strand for strand in strands if id(strand) in kept]


def throughput(study: Study) -> Chart | None:
    """Samples per second, a panel per model: models differ too much to share an axis."""
    lines = few([one for one in by_workers(study) if one.points or len(one.groups) > 1])
    pages = []
    for sheet in arrange(study, lines, words, SAME_PANEL, without=("workers",)):
        panels = []
        for title, part in sheet.panels.items():
            seen = [each.workers for styled in part for each in styled.thing.groups]
            panel = Panel(title, whole_numbers("workers", seen), from_zero("samples per second"))
            panel.traces += [line(_speed(styled), styled.label, styled.look) for styled in part]
            panels.append(panel)
        pages.append(Page(sheet.name, panels))
    text = caption("Samples per second of all workers together.", INTERVALS, open_marks(settings(lines)),
                   groups=settings(lines))  # fmt: skip
    rows = [identity(one) | with_interval("samples_per_second", one.samples_per_second()) for one in settings(lines)]
    return chart("throughput", "Throughput", text, pages, rows)


def servers(study: Study) -> Chart | None:
    """Speedup with the most workers by number of servers; strategies without servers are horizontal lines."""
    found = of_curves(study.weak or study.strong)
    lines = list(_over_servers(found))
    alone = [one for one in found if not one.setting.text("servers")]
    pages = []
    for sheet in arrange(study, lines, words, SAME_PANEL, without=("servers", "workers", "nodes")):
        panels = []
        for title, part in sheet.panels.items():
            many = [point.group.first.summary.servers for styled in part for point in styled.thing.points]
            panel = Panel(title, whole_numbers("parameter servers", many), from_zero("speedup, times one worker"))
            panel.traces += _levels(alone, part[0].thing, max(many), palette(study, "strategy"))
            panel.traces += [line(_speedup(styled, "servers"), styled.label, styled.look) for styled in part]
            panels.append(panel)
        pages.append(Page(sheet.name, panels))
    most = " or ".join(map(str, sorted({one.points[0].workers for one in lines})))
    text = caption(f"Speedup of {most} workers over one, by number of parameter servers. Horizontal lines: the same "
                   "number of workers without a server.", INTERVALS, open_marks(settings(lines)),
                   groups=settings(lines))  # fmt: skip
    return chart("servers", "Speedup by number of servers", text, pages, _rows(lines))


def _over_servers(found: Sequence[Strand]) -> Iterable[Strand]:
    """Lines along servers, for the most workers that ran with several numbers of servers."""
    for same in by_servers(one for one in found if one.setting.text("servers")):
        points = [point for one in same for point in one.points]
        choices = {point.workers: {p.group.first.summary.servers for p in points if p.workers == point.workers}
                   for point in points}  # fmt: skip
        most = max((workers for workers, many in choices.items() if len(many) > 1), default=None)
        chosen = sorted((p for p in points if p.workers == most), key=lambda p: p.group.first.summary.servers)
        parts = apart(chosen, lambda point: point.group, "servers") if chosen else []
        for part in parts:
            yield Strand(shared([p.group.setting for p in part]), tuple(p.group for p in part), tuple(part))


def _levels(alone: Sequence[Strand], beside: Strand, most: int, strategies: Sequence[str]) -> list[Trace]:
    """Horizontal lines: strategies without servers, with as many workers on the same task."""
    found = list[Trace]()
    for one in alone:
        for point in one.points:
            if point.workers == beside.points[0].workers and _task(point.group) == _task(beside.groups[0]):
                said, y = name(point.group.setting, ("strategy", "overlap")), point.speedup.value
                hover = f"{said}, {count(point.workers, 'worker')}: {_times(point)}"
                colour = COLOURS[strategies.index(point.group.strategy) % len(COLOURS)]
                look = {"color": colour, "dash": DASHES[(len(found) + 1) % len(DASHES)], "width": 2}
                found.append(ideal([1, most], [y, y], hover) | {"name": f"{said}, no server", "line": look})
    return found


def _task(one: Group) -> str:
    return one.setting.key((PROBLEM, LEARNING, MACHINE), names=("links",))


def _rows(strands: Iterable[Strand]) -> list[Row]:
    rows: dict[int, Row] = {}
    for one in strands:
        if one.baseline:
            rows.setdefault(id(one.baseline), _row(one.baseline, AT_ONE, AT_ONE))
        for point in one.points:
            rows[id(point.group)] = _row(point.group, point.speedup, point.efficiency) | {"serial_part": one.serial}
    return list(rows.values())


def _row(one: Group, speedup: Interval, efficiency: Interval) -> Row:
    times = with_interval("speedup", speedup) | with_interval("efficiency", efficiency)
    return identity(one) | times | with_interval("step_seconds", one.step())


def _times(point: Point) -> str:
    return f"{between(point.speedup)} times as fast as one worker"


def _speedup(styled: Styled[Strand], against: str = "workers") -> list[Measured]:
    one = styled.thing
    found = []
    if against == "workers" and one.baseline:
        found.append(Measured(1, AT_ONE, f"{styled.full}: {BASELINE}", certain(one.baseline)))
    for point in one.points:
        x = point.workers if against == "workers" else point.group.first.summary.servers
        more = "" if against == "workers" else f", {count(x, 'server')}"
        text = f"{styled.full}{more}, {count(point.workers, 'worker')}: {_times(point)}, {of_runs(point.group)}"
        found.append(Measured(x, point.speedup, text, point.certain))
    return found


def _workers(part: Sequence[Styled[Strand]]) -> tuple[int, dict[str, Any]]:
    """The most workers, and an axis for all of them."""
    seen = {1, *(one.workers for styled in part for one in styled.thing.groups)}
    return max(seen), whole_numbers("workers", seen)


def _fits(one: Strand, whose: str) -> bool:
    return one.serial is not None and fits(KIND[whose], one.serial, one.points)


def _laws(
    whose: str, part: Sequence[Styled[Strand]], most: int, y: Callable[[Series, Series], Series]
) -> Iterable[Trace]:
    """Fitted laws in the units of the y axis, if they fit; with many lines only the caption has them."""
    n = np.linspace(1, most, 40)
    for styled in part if len(part) <= MOST_LAWS else ():
        serial = styled.thing.serial
        if serial is not None and _fits(styled.thing, whose):
            text = f"{whose} law for {styled.full}: {share(serial)} of the work is serial"
            yield law(n, y(LAWS[KIND[whose]](serial, n), n), styled.look, styled.label, text)


def _speedups(title: str, part: Sequence[Styled[Strand]], *, amdahl: bool = False, top: float | None = None) -> Panel:
    (most, x), label = _workers(part), "speedup, times one worker"
    highest = None if top is None else 1.05 * max(top, 1.0)
    panel = Panel(title, x, from_zero(label) if highest is None else axis(label, range=[0, highest], autorange=False))
    reach = most if highest is None else min(most, highest)
    panel.traces.append(ideal([1, reach], [1, reach], "ideal: n workers are n times as fast as one worker"))
    if amdahl:
        panel.traces += _laws("Amdahl's", part, most, lambda speedup, _: speedup)
    panel.traces += [line(_speedup(styled), styled.label, styled.look) for styled in part]
    return panel


def _efficiencies(title: str, part: Sequence[Styled[Strand]]) -> Panel:
    most, x = _workers(part)
    panel = Panel(title, x, from_zero("efficiency, % of ideal"))
    panel.traces.append(ideal([1, most], [100, 100], "ideal: each worker is as fast as one alone"))
    panel.traces += _laws("Gustafson's", part, most, lambda speedup, n: 100 * speedup / n)
    for styled in part:
        one = styled.thing
        found = []
        if one.baseline:
            found.append(Measured(1, scaled(AT_ONE, 100), f"{styled.full}: {BASELINE}", certain(one.baseline)))
        for point in one.points:
            y = scaled(point.efficiency, 100)
            text = f"{styled.full}, {count(point.workers, 'worker')}: {between(y, '% of the ideal')}"
            found.append(Measured(point.workers, y, f"{text}, {of_runs(point.group)}", point.certain))
        panel.traces.append(line(found, styled.label, styled.look))
    return panel


def _steps(part: Sequence[Styled[Strand]]) -> Panel:
    """Time of a step; ideally that of one worker."""
    most, x = _workers(part)
    panel = Panel("", x, from_zero("time of a step, ms"))
    bases = {1000 * styled.thing.baseline.step().value for styled in part if styled.thing.baseline}
    panel.traces += [ideal([1, most], [base, base], "ideal: as long as a step of one worker") for base in sorted(bases)]
    for styled in part:
        found = []
        for one in styled.thing.groups:
            y = scaled(one.step(), 1000)
            text = f"{styled.full}, {count(one.workers, 'worker')}: a step takes {between(y, 'ms')}, {of_runs(one)}"
            found.append(Measured(one.workers, y, text, certain(one)))
        panel.traces.append(line(found, styled.label, styled.look))
    return panel


def _speed(styled: Styled[Strand]) -> list[Measured]:
    found = []
    for one in styled.thing.groups:
        y = one.samples_per_second()
        text = f"{styled.full}, {count(one.workers, 'worker')}: {between(y, 'samples per second')}, {of_runs(one)}"
        found.append(Measured(one.workers, y, text, certain(one)))
    return found


def _serial_parts(whose: str, sheets: Sequence[Sheet[Strand]]) -> str:
    """The fitted serial fractions in words; of many, the smallest and the largest."""
    parts = [part for sheet in sheets for part in sheet.panels.values()]
    known = [each for part in parts for each in part if each.thing.serial is not None]
    found = [(each.thing.serial or 0.0, each.full) for each in known if _fits(each.thing, whose)]
    if not known:
        return ""
    if not found:
        return f"{whose} law fits none of these: the serial fraction is not constant."
    drawn = " (dotted)" if any(len(part) <= MOST_LAWS for part in parts) else ""
    (least, one), (most, other) = min(found), max(found)
    what = f"from {share(least)} ({one}) to {share(most)} ({other})"
    if len(found) <= MOST_LAWS:
        what = "; ".join(f"{full} {share(serial)}" for serial, full in found)
    misfits = len(known) - len(found)
    rest = f" It does not fit {count(misfits, 'other line')}." if misfits else ""
    return f"Serial fraction by {whose} law{drawn}: {what}.{rest}"


def share(part: float) -> str:
    return f"{100 * part:.1f} %"

"""Charts of resources: bytes per update through each node, and memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from paceline.analysis.resources import traffic as node_traffic
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group
from paceline.analysis.setting import Setting
from paceline.analysis.statistics import Interval
from paceline.analysis.study import Study
from paceline.analysis.traffic import by_kernel, by_ranks
from paceline.analysis.wording import count, number, size
from paceline.report.figure import COLOURS, MARKERS, Chart, Page, Panel, categories, from_zero, whole_numbers
from paceline.report.placement import chart
from paceline.report.series import SAME_PANEL, Styled, arrange
from paceline.report.strands import AXES, by_workers, few, places, settings, side_by_side, words
from paceline.report.traces import (
    SPREAD,
    Measured,
    Row,
    Trace,
    caption,
    identity,
    line,
    of_runs,
    scaled,
    with_interval,
    wrapped,
)

MB = 1e6
ROLES = ("server", "worker")
BY_KERNEL, BY_RANKS = "by the kernel's counters", "as counted by the ranks"
COUNTED = {
    BY_KERNEL: "everything on its network interfaces",
    BY_RANKS: "gradients and weights that they send and receive",
}


@dataclass(frozen=True)
class Flow:
    """Bytes per update through the servers or the workers of one kind of setting, for each of its groups."""

    setting: Setting
    role: str
    values: list[tuple[Group, Interval]]  # bytes in and out
    how: str  # how they were counted


def traffic(study: Study) -> Chart | None:
    """Bytes in and out of one node for each update, as in the claims."""
    flows = [flow for strand in few(by_workers(study)) for flow in _flows(strand.setting, strand.groups)]
    pages, rows = [], list[Row]()
    for sheet in arrange(study, flows, lambda flow: flow.setting, SAME_PANEL, without=("workers",)):
        panels = []
        for title, part in sheet.panels.items():
            seen = [one.workers for styled in part for one, _ in styled.thing.values]
            panel = Panel(title, whole_numbers("workers", seen), from_zero("MB in and out, for each update"))
            panel.traces += [_moved(styled) for styled in part]
            panels.append(panel)
        pages.append(Page(sheet.name, panels))
    for flow in flows:
        rows += [identity(one) | {"role": flow.role} | with_interval("bytes_per_update", y) | {"counted": flow.how}
                 for one, y in flow.values]  # fmt: skip
    ways = [way for way in COUNTED if any(flow.how == way for flow in flows)]
    how = "; or, for runs that are too short or have several ranks on a node, ".join(f"{way}: {COUNTED[way]}"
                                                                                     for way in ways)  # fmt: skip
    text = caption(f"Bytes in and out per update, of the busiest server and of a worker (mean), {how}.",
                   SPREAD, groups=[one for flow in flows for one, _ in flow.values], timed=False)  # fmt: skip
    return chart("traffic", "Traffic of an update", text, pages, rows)


def _ranks(one: Group) -> int:
    return one.first.summary.workers + one.first.summary.servers


def _flows(shared: Setting, groups: Sequence[Group]) -> Iterator[Flow]:
    """By the kernel's counters if all runs have them."""
    several = [one for one in groups if _ranks(one) > 1]
    counted = all(by_kernel(run) > 0 for one in several for run in one.runs)
    for role in ROLES:
        values = []
        for one in several:
            moved = [each for run in one.runs if np.isfinite(each := _bytes(run, role, counted))]
            values += [(one, Interval(fmean(moved), min(moved), max(moved)))] if moved else []
        if values:
            yield Flow(shared.saying("role", f"at the {role}"), role, values, BY_KERNEL if counted else BY_RANKS)


def _bytes(run: Run, role: str, counted: bool) -> float:
    """Bytes in and out per update, of the busiest server or the mean over workers; NaN if not known."""
    servers = run.summary.servers
    if role == "server" or not servers:  # what the claims are about
        return (by_kernel if counted else by_ranks)(run) if servers or role == "worker" else float("nan")
    if counted:
        return fmean(node.bytes_in + node.bytes_out for node in node_traffic(run) if node.role == role)
    s = run.summary
    if not s.bytes_sent or not s.bytes_received:
        return float("nan")
    moved = fmean(map(sum, zip(s.bytes_sent[servers:], s.bytes_received[servers:], strict=True)))
    return moved / max(1, s.counted_steps)


def _moved(styled: Styled[Flow]) -> Trace:
    found, whose = [], "the busiest server" if styled.thing.role == "server" else "a worker"
    for one, y in styled.thing.values:
        text = (f"{styled.full}, {count(one.workers, 'worker')}: {size(y.value)} in and out of {whose} for an update, "
                f"{styled.thing.how}, {of_runs(one)}")  # fmt: skip
        found.append(Measured(one.workers, scaled(y, 1 / MB), text))
    return line(found, styled.label, styled.look)


def memory(study: Study) -> Chart | None:
    """A point for each rank, a panel for each kind of setting."""
    along, strands = side_by_side(study)
    strands = [one for one in strands if any(run.summary.peak_rss_bytes for each in one.groups for run in each.runs)]
    at, title = places(strands, along), AXES[along]
    pages, rows = [], list[Row]()
    for sheet in arrange(study, strands, words, None, without=(along,)):
        panels = []
        for heading, part in sheet.panels.items():
            groups = part[0].thing.groups
            x = categories(title, list(dict.fromkeys(at.values())))
            panel = Panel(heading, x, from_zero("peak memory of a rank, MB"))
            for role in ROLES:
                peaks = [(one, rank, value) for one in groups for rank, value in _peaks(one, role)]
                if peaks:
                    panel.traces.append(_points(peaks, role, at, part[0].full, along))
                rows += [identity(one) | {"rank": rank, "role": role, "peak_rss_bytes": y} for one, rank, y in peaks]
            panels.append(panel)
        pages.append(Page(sheet.name, panels))
    text = caption("Peak resident memory of each rank (shared pages count for each of them); the median of the "
                   "repeats.", groups=settings(strands), timed=False)  # fmt: skip
    return chart("memory", "Peak memory", text, pages, rows)


def _peaks(one: Group, role: str) -> list[tuple[int, float]]:
    """By rank."""
    servers = one.first.summary.servers
    ranks = range(servers) if role == "server" else range(servers, servers + one.workers)
    found = []
    for rank in ranks:
        values = [run.summary.peak_rss_bytes[rank] for run in one.runs if rank < len(run.summary.peak_rss_bytes)]
        found += [(rank, float(np.median(values)))] if values else []
    return found


def _points(peaks: Sequence[tuple[Group, int, float]], role: str, at: dict[int, str], full: str, along: str) -> Trace:
    index = 1 if role == "server" else 0
    hover = [f"{full}, {one.setting.text(along)}: {role} rank {rank} had up to {number(value / MB)} MB"
             for one, rank, value in peaks]  # fmt: skip
    return {
        "type": "scatter", "mode": "markers", "name": role, "x": [at[id(one)] for one, _, _ in peaks],
        "y": [value / MB for _, _, value in peaks], "hovertext": [wrapped(each) for each in hover], "hoverinfo": "text",
        "marker": {"color": COLOURS[index], "symbol": f"{MARKERS[index]}-open", "size": 9, "line": {"width": 1.6}},
    }  # fmt: skip

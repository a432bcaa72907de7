"""What a setting takes: the bytes that an update moves through each node, the memory of each rank."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from paceline.analysis.resources import traffic as node_traffic
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group, nodes_of
from paceline.analysis.statistics import Interval
from paceline.analysis.study import Study
from paceline.analysis.wording import count, number, size
from paceline.report.figure import COLOURS, MARKERS, Chart, Page, Panel, categories, from_zero, whole_numbers
from paceline.report.placing import chart
from paceline.report.series import PROBLEM, Facets, Styled, arrange, facets
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
    over_repeats,
    scaled,
    with_interval,
    wrapped,
)

MB = 1e6
ROLES = ("server", "worker")


@dataclass(frozen=True)
class Flow:
    """What an update moves through the servers, or through the workers, of one kind of setting: by its groups."""

    facets: Facets
    role: str
    values: list[tuple[Group, Interval]]  # bytes in and out


def traffic(study: Study) -> Chart | None:
    """Bytes in and out of one node for each update: by the kernel where each rank has a node, else as ranks count."""
    strands = few(by_workers(study))
    shared = [one for one in settings(strands) if _ranks(one) > 1]
    counted = all(_by_kernel(run) is not None for one in shared for run in one.runs)
    flows = [flow for strand in strands for flow in _flows(strand.facets, strand.groups, counted)]
    pages, rows = [], list[Row]()
    for sheet in arrange(study, flows, lambda flow: flow.facets, PROBLEM, without=("workers",)):
        panels = []
        for title, part in sheet.panels.items():
            seen = [one.workers for styled in part for one, _ in styled.thing.values]
            panel = Panel(title, whole_numbers("workers", seen), from_zero("MB in and out, for each update"))
            panel.traces += [_moved(styled) for styled in part]
            panels.append(panel)
        pages.append(Page(sheet.name, panels))
    for flow in flows:
        rows += [identity(one) | {"role": flow.role} | with_interval("bytes_per_update", y) for one, y in flow.values]
    how = ("by the kernel's counters, all that goes over its network" if counted else
           "the gradients and weights that ranks send and receive, as they count them")  # fmt: skip
    text = caption(f"What goes in and out of the busiest server and the busiest worker for each update: {how}.",
                   SPREAD, groups=[one for flow in flows for one, _ in flow.values])  # fmt: skip
    return chart("traffic", "Traffic of an update", text, pages, rows)


def _ranks(one: Group) -> int:
    return one.first.summary.workers + one.first.summary.servers


def _flows(shared: Facets, groups: Sequence[Group], counted: bool) -> Iterator[Flow]:
    several = [one for one in groups if _ranks(one) > 1]
    for role in ROLES:
        values = []
        for one in several:
            moved = [found[role] for run in one.runs
                     if role in (found := (_by_kernel(run) if counted else _by_meter(run)) or {})]  # fmt: skip
            values += [(one, over_repeats(moved))] if moved else []
        if values:
            yield Flow({**shared, "role": f"at the {role}"}, role, values)


def _by_kernel(run: Run) -> dict[str, float] | None:
    """Of the busiest node of each role; None where nodes are shared, or samples too few."""
    found: dict[str, list[float]] = {}
    for node in node_traffic(run):
        found.setdefault(node.role, []).append(node.bytes_in + node.bytes_out)
    alone = nodes_of(run) == run.summary.workers + run.summary.servers and set(found) <= set(ROLES)
    if not alone or not found or not all(np.isfinite(values).all() for values in found.values()):
        return None
    return {role: max(values) for role, values in found.items()}


def _by_meter(run: Run) -> dict[str, float]:
    s = run.summary
    moved = [sent + received for sent, received in zip(s.bytes_sent, s.bytes_received, strict=True)]
    found = {"server": moved[: s.servers], "worker": moved[s.servers :]}
    return {role: max(values) / max(1, s.steps) for role, values in found.items() if values}


def _moved(styled: Styled[Flow]) -> Trace:
    found = []
    for one, y in styled.thing.values:
        text = (f"{styled.full}, {count(one.workers, 'worker')}: {size(y.value)} in and out of the busiest "
                f"{styled.thing.role} for an update, {of_runs(one)}")  # fmt: skip
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
    text = caption("The most memory that each rank had at any time (resident; pages that ranks share count for each of "
                   "them); the middle of the repeats.", groups=settings(strands))  # fmt: skip
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
    hover = [f"{full}, {facets(one)[along]}: {role} rank {rank} had up to {number(value / MB)} MB"
             for one, rank, value in peaks]  # fmt: skip
    return {
        "type": "scatter", "mode": "markers", "name": role, "x": [at[id(one)] for one, _, _ in peaks],
        "y": [value / MB for _, _, value in peaks], "hovertext": [wrapped(each) for each in hover], "hoverinfo": "text",
        "marker": {"color": COLOURS[index], "symbol": f"{MARKERS[index]}-open", "size": 9, "line": {"width": 1.6}},
    }  # fmt: skip

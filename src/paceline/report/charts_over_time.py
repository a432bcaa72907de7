"""Charts of ranks and nodes over time: utilisation, packets in and out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from paceline.analysis.resources import NodeSeries, RankSeries, node_series, rank_series
from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group
from paceline.analysis.statistics import Series
from paceline.analysis.study import Study
from paceline.report.figure import COLOURS, DASHES, MARKERS, Chart, Page, Panel, axis, from_zero
from paceline.report.placement import chart
from paceline.report.series import Look, arrange
from paceline.report.strands import Strand, settings, side_by_side, words
from paceline.report.traces import Row, caption, identity, middle, over_time

Fill = Callable[[Group, Panel], None]

MOST_SIZES = 3  # numbers of workers side by side, as in the figures of the thesis
SERVER = COLOURS[1]
OTHERS = tuple(colour for colour in COLOURS if colour != SERVER)
BINS = 60
MOST_POINTS = 120  # of a line, as a page has hundreds of lines


def some_sizes(strand: Strand) -> list[Group]:
    """The fewest workers (more than one), a medium number, and the most."""
    several = [one for one in strand.groups if one.workers > 1] or list(strand.groups)
    if len(several) <= MOST_SIZES:
        return several
    return [several[0], several[len(several) // 2], several[-1]]


def _looks(names: Sequence[str], nodes: Sequence[str] = OTHERS) -> dict[str, Look]:
    """Servers have one colour, each rank its own colour and dash, and so has each node, of the colours `nodes`."""
    servers = [each for each in names if "server" in each]
    found = {each: Look(SERVER, DASHES[rank % len(DASHES)], MARKERS[1], rank) for rank, each in enumerate(servers)}
    for index, each in enumerate(each for each in names if "server" not in each):
        colours, rank = (OTHERS, 100) if each.startswith("rank ") else (nodes, 500)
        turn, hue = divmod(index, len(colours))
        found[each] = Look(colours[hue], DASHES[turn % len(DASHES)], MARKERS[0], rank + index)
    return found


def names_of_ranks(run: Run) -> dict[int, str]:
    """A rank that is alone on its node is named after the node."""
    ranks = run.environment.get("ranks", [])
    hosts = [row["host"] for row in ranks]
    alone = len(set(hosts)) == len(hosts) and len(hosts) > 1
    return {row["rank"]: _called(row["host"], row["role"]) if alone else f"rank {row['rank']}" for row in ranks}


def _colours_of_nodes(groups: Iterable[Group]) -> Sequence[str]:
    """From the last one where ranks have names of their own, which are in the same legend and have the first ones."""
    names = (name for one in groups for name in names_of_ranks(middle(one)).values())
    return OTHERS[::-1] if any(name.startswith("rank ") for name in names) else OTHERS


def _called(node: str, role: str) -> str:
    """Without numbers of ranks, and in the singular, so that a node has the same name for any number of workers."""
    kind = re.sub(r"[0-9]+ ([a-z]+)s", r"\1", role)
    return f"{node} ({kind})" if role else node


def _by_node(
    found: Sequence[NodeSeries],
    values: Callable[[NodeSeries], Series],
    said: str,
    panel: Panel,
    colours: Sequence[str] = OTHERS,
) -> None:
    """A line for each node; `said` is the text of a point."""
    styles = _looks([_called(each.name, each.role) for each in found], colours)
    for each in found:
        label = _called(each.name, each.role)
        x, y = thinned(each.seconds, values(each))
        panel.traces.append(over_time(x, y, label, styles[label], f"{label}: {said}, at %{{x:.1f}} s"))


def utilisation(study: Study) -> Chart | None:
    """Above: how much of the time each worker computes. Below: busy cores of each node, and how many this run uses."""
    (along, strands), rows = side_by_side(study), list[Row]()
    colours = _colours_of_nodes(one for strand in strands for one in some_sizes(strand))

    def above(one: Group, panel: Panel) -> None:
        names = names_of_ranks(middle(one))
        found = rank_series(middle(one), BINS)
        styles = _looks([names[each.rank] for each in found], colours)
        for each in found:
            label = names[each.rank]
            hover = f"{label}: computes %{{y:.0f}} % of the time, at %{{x:.1f}} s"
            panel.traces.append(over_time(each.seconds, 100 * each.busy, label, styles[label], hover))
            rows.extend(_rank_rows(one, each))

    def below(one: Group, panel: Panel) -> None:
        found = node_series(middle(one))
        _by_node(found, lambda each: each.cores_busy, "%{y:.2f} cores busy", panel, colours)
        for each, trace in zip(found, panel.traces[-len(found) :], strict=True):
            if np.isfinite(each.cores_of_run).any():
                x, y = thinned(each.seconds, each.cores_of_run)
                label = f"{trace['name']}: this run"
                look = Look(trace["line"]["color"], "dash", MARKERS[0], trace["legendrank"])
                hover = f"{label}: %{{y:.2f}} cores busy with it, at %{{x:.1f}} s"
                panel.traces.append(over_time(x, y, label, look, hover))
        rows.extend(row for each in found for row in _node_rows(one, each))

    def lowest(one: Group, panel: Panel) -> None:
        said = "its GPUs are busy %{y:.0f} % of the time"
        found = node_series(middle(one))
        _by_node(found, lambda each: 100 * each.gpus_busy, said, panel, colours)

    nodes = [each for strand in strands for one in some_sizes(strand) for each in node_series(middle(one))]
    gpus, own = (any(np.isfinite(getattr(each, field)).any() for each in nodes)
                 for field in ("gpus_busy", "cores_of_run"))  # fmt: skip
    pages = _over_time(study, strands, along, [
        ("computing", "time spent computing, %", above),
        ("cores", "cores busy", below),
        *([("GPUs", "GPUs busy, %", lowest)] if gpus else []),
    ])  # fmt: skip
    text = caption("The share of time that each worker computes, instead of waiting or communicating",
                   "(above), and the busy cores of each node (below)." if nodes else "over time.",
                   "Dashed: cores that this run uses; the rest is other programs." * own,
                   "At the bottom, the mean utilisation of the GPUs of each node." if gpus else "",
                   "The middle repeat of each setting; 0 s is its first step.", groups=settings(strands))  # fmt: skip
    return chart("utilisation", "Utilisation over time", text, pages, rows, columns=_columns(strands))


def packets(study: Study) -> Chart | None:
    """Above: packets that each node receives. Below: packets that it sends."""
    (along, strands), rows = side_by_side(study), list[Row]()

    def half(which: str) -> Fill:
        def fill(one: Group, panel: Panel) -> None:
            found = [each for each in node_series(middle(one)) if np.nan_to_num(each.packets_in).any()]
            said = f"%{{y:,.0f}} packets {which} a second"
            _by_node(found, lambda each: each.packets_in if which == "in" else each.packets_out, said, panel)
            rows.extend(row for each in found for row in _node_rows(one, each) if which == "in")

        return fill

    pages = _over_time(study, strands, along, [
        ("packets in", "packets in per second", half("in")),
        ("packets out", "packets out per second", half("out")),
    ])  # fmt: skip
    text = caption("Packets that the kernel counts on the network interfaces of each node (with one node, on "
                   "loopback). Shared memory is not counted. The middle repeat of each setting; 0 s is its first step.",
                   groups=settings(strands), timed=False)  # fmt: skip
    return chart("packets", "Packets over time", text, pages, rows, columns=_columns(strands))


def thinned(seconds: Series, values: Series) -> tuple[Series, Series]:
    """At most MOST_POINTS points: each is the mean of several samples, at the time of the last."""
    if len(seconds) <= MOST_POINTS:
        return seconds, values
    ends, means = [], []
    for part in np.array_split(np.stack([seconds, values]), MOST_POINTS, axis=1):
        known = part[1][np.isfinite(part[1])]
        ends.append(float(part[0, -1]))
        means.append(float(known.mean()) if len(known) else float("nan"))
    return np.array(ends), np.array(means)


def _columns(strands: Sequence[Strand]) -> int:
    return max((len(some_sizes(strand)) for strand in strands), default=1)


def _over_time(
    study: Study, strands: Sequence[Strand], along: str, halves: Sequence[tuple[str, str, Fill]]
) -> list[Page]:
    """A page for each kind of setting, with a column for each number of workers and a row for each quantity."""
    columns, pages = _columns(strands), []
    for sheet in arrange(study, strands, words, None, without=(along,)):
        for part in sheet.panels.values():
            panels, chosen = list[Panel](), some_sizes(part[0].thing)
            for what, quantity, fill in halves:
                line = [Panel("", from_zero("time, s"), axis(quantity)) for _ in range(columns)]
                for panel, one in zip(line, chosen, strict=False):
                    panel.title = f"{one.setting.text(along)}: {what}"
                    fill(one, panel)
                panels += _one_scale(line)
            pages.append(Page(part[0].full, panels))
    return pages


def _one_scale(panels: Sequence[Panel]) -> Sequence[Panel]:
    """Gives panels in one row the same y axis; shares of time go up to 100 %."""
    values = [y for panel in panels for trace in panel.traces for y in trace["y"] if y is not None]
    for panel in panels:
        part = "%" in panel.y["title"]["text"]
        panel.y["range"] = [0, 104 if part else 1.06 * max(values, default=1.0) or 1.0]
    return panels


def _rank_rows(one: Group, each: RankSeries) -> list[Row]:
    columns = {"seconds": each.seconds, "computing": each.busy, "waiting": each.waiting}
    shared = identity(one) | {"rank": each.rank}
    return [shared | {column: float(values[i]) for column, values in columns.items()}
            for i in range(len(each.seconds))]  # fmt: skip


def _node_rows(one: Group, each: NodeSeries) -> list[Row]:
    columns = (
        "seconds",
        "cores_busy",
        "cores_of_run",
        "gpus_busy",
        "packets_in",
        "packets_out",
        "bits_in",
        "bits_out",
        "memory_bytes",
    )
    values = zip(*(getattr(each, column) for column in columns), strict=True)
    shared = identity(one) | {"node": each.name, "role": each.role}
    return [shared
            | {column: None if np.isnan(value) else float(value) for column, value in zip(columns, row, strict=True)}
            for row in values]  # fmt: skip

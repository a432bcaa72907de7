"""What the charts share: lines and bars with intervals, hover texts, captions, rows of numbers."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.runs import Run
from paceline.analysis.scaling import Group, certain, disturbed
from paceline.analysis.setting import kinds, nodes_of
from paceline.analysis.statistics import Interval, Series
from paceline.analysis.wording import count, listing, number
from paceline.emulation.table import device
from paceline.predict.ranges import Range
from paceline.report.figure import COLOURS, IDEAL, PATTERNS
from paceline.report.series import Look, natural

WIDE_HOVER = 44  # letters: a longer line does not fit on a phone
INTERVALS = "Error bars: 95 % intervals."
SPREAD = "Error bars: range of the repeats."

Row = dict[str, Any]
Trace = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """A value with its interval at a place of the x axis, its hover text, and whether it can be ranked."""

    x: float
    y: Interval
    hover: str
    certain: bool = True


def wrapped(text: str) -> str:
    """A hover text in lines that fit on a phone."""
    return "<br>".join(textwrap.wrap(text, WIDE_HOVER))


def between(value: Interval, unit: str = "") -> str:
    """A value and its interval, in words."""
    tail = f" {unit}" if unit else ""
    if value.low == value.high:
        return f"{number(value.value)}{tail}"
    return f"{number(value.value)}{tail} (between {number(value.low)} and {number(value.high)})"


def scaled(value: Interval | Range, factor: float = 1.0) -> Interval:
    return Interval(factor * value.value, factor * value.low, factor * value.high)


def over_repeats(values: Sequence[float]) -> Interval:
    """The median of a few runs, and their range."""
    return Interval(float(np.median(values)), min(values), max(values))


def line(found: Sequence[Measured], label: str, look: Look, **settings: Any) -> Trace:
    """A line through points with error bars; points that cannot be ranked have open marks."""
    values = [each.y for each in found]
    symbols = [look.marker if each.certain else f"{look.marker}-open" for each in found]
    return {
        "type": "scatter", "mode": "lines+markers", "name": label,
        "x": [each.x for each in found], "y": [each.value for each in values],
        "line": {"color": look.colour, "dash": look.dash, "width": 2},
        "marker": {"color": look.colour, "symbol": symbols if len({*symbols}) != 1 else symbols[0], "size": 8},
        "error_y": error_bars(values, look.colour),
        "hovertext": [wrapped(each.hover if each.certain else f"{each.hover}; not ranked") for each in found],
        "hoverinfo": "text", "legendrank": look.rank, **settings,
    }  # fmt: skip


def error_bars(values: Sequence[Interval], colour: str) -> dict[str, Any]:
    return {
        "type": "data", "symmetric": False, "array": [each.high - each.value for each in values],
        "arrayminus": [each.value - each.low for each in values], "color": colour, "thickness": 1.3, "width": 3,
    }  # fmt: skip


def band(name: str, x: Sequence[float], values: Sequence[Interval], colour: str, opacity: float) -> Trace:
    """The area of intervals along a line, which the legend shows and hides with the line of this name."""
    red, green, blue = (int(colour[at : at + 2], 16) for at in (1, 3, 5))
    ends = [each.high for each in values] + [each.low for each in reversed(values)]
    return {
        "type": "scatter", "mode": "lines", "name": name, "showlegend": False, "x": [*x, *reversed(x)], "y": ends,
        "fill": "toself", "line": {"width": 0, "color": colour}, "hoverinfo": "skip",
        "fillcolor": f"rgba({red},{green},{blue},{opacity})",
    }  # fmt: skip


def ideal(x: Sequence[float], y: Sequence[float], what: str) -> Trace:
    """The ideal, as a thin grey line."""
    return {
        "type": "scatter", "mode": "lines", "name": "ideal", "x": list(x), "y": list(y),
        "line": {"color": IDEAL, "width": 1.2}, "legendrank": 0,
        "hovertext": [wrapped(what)] * len(x), "hoverinfo": "text",
    }  # fmt: skip


def law(x: Series, y: Series, look: Look, label: str, what: str) -> Trace:
    """A fitted law as a dotted line, which the legend shows and hides together with its points."""
    return {
        "type": "scatter", "mode": "lines", "name": f"{label}: fit", "legendgroup": label, "showlegend": False,
        "x": [round(float(each), 4) for each in x], "y": [round(float(each), 5) for each in y],
        "line": {"color": look.colour, "dash": "dot", "width": 1.4},
        "hovertext": [wrapped(what)] * len(x), "hoverinfo": "text",
    }  # fmt: skip


def bars(x: Sequence[str], y: Sequence[float], label: str, index: int, hover: Sequence[str],
         pattern_index: int | None = None, **settings: Any) -> Trace:  # fmt: skip
    """Bars with this index's colour and pattern."""
    shape = PATTERNS[(index if pattern_index is None else pattern_index) % len(PATTERNS)]
    pattern = {"shape": shape, "fillmode": "overlay", "fgcolor": "#ffffff", "fgopacity": 0.7,
               "size": 7, "solidity": 0.2}  # fmt: skip
    marker = {"color": COLOURS[index % len(COLOURS)], "line": {"color": "#ffffff", "width": 0.5}, "pattern": pattern}
    return {
        "type": "bar", "name": label, "x": list(x), "y": list(y), "marker": marker,
        "hovertext": [wrapped(each) for each in hover], "hoverinfo": "text", **settings,
    }  # fmt: skip


def over_time(x: Series, y: Series, label: str, look: Look, hover: str) -> Trace:
    """A line without marks; unknown values are gaps."""
    return {
        "type": "scatter", "mode": "lines", "name": label, "x": [float(f"{each:.4g}") for each in x],
        "y": [None if np.isnan(each) else float(f"{each:.4g}") for each in y],
        "line": {"color": look.colour, "dash": look.dash, "width": 1.6}, "hovertemplate": f"{hover}<extra></extra>",
        "legendrank": look.rank,
    }  # fmt: skip


def identity(one: Group) -> Row:
    """The columns that identify a setting in a row of numbers."""
    s, busy = one.first.summary, len(disturbed(one))
    links = one.setting.text("links_as_of").removeprefix("links as of ")
    scaled = {"shrink": s.shrink, "links_as_of": links} if s.shrink > 1 else {}
    return {"model": s.model, "data": s.data, "strategy": s.strategy, "servers": s.servers, "workers": s.workers,
            "nodes": nodes_of(one.first), "batch_size": s.batch_size, "global_batch": s.global_batch,
            "compute": s.compute, "runs": len(one.runs), **({"disturbed_runs": busy} if busy else {}),
            **one.setting.own_options(), **scaled}  # fmt: skip


def with_interval(column: str, value: Interval) -> Row:
    return {column: value.value, f"{column}_low": value.low, f"{column}_high": value.high}


def middle(one: Group) -> Run:
    """The repeat of median length, to show what cannot be averaged."""
    return sorted(one.runs, key=lambda run: sum(run.summary.epoch_seconds))[(len(one.runs) - 1) // 2]


def _paced(compute: str) -> str:
    said = device(compute)
    return f"{said} a batch" if said.endswith(" s") else said


def emulated_as(compute: str, shrink: int) -> str:
    """A sentence about runs that all had this emulated compute."""
    smaller = f"; gradients {shrink:,} times smaller" if shrink > 1 else ""
    return f"Emulated compute ({_paced(compute)}{smaller})."


def caption(*sentences: str, groups: Iterable[Group], timed: bool = True) -> str:
    """Sentences, and at the end whether runs were disturbed (if `timed`) and whether compute was emulated."""
    found = list(groups)
    runs = [run for one in found for run in one.runs]
    busy = sum(run.disturbed is not None for run in runs)
    if busy and timed:
        was, whose = ("was", "its") if busy == 1 else ("were", "their")
        sentences += (
            f"{busy} of {count(len(runs), 'run')} {was} disturbed by other programs: do not compare {whose} times.",
        )
    emulated = [one for one in found if one.first.emulated]
    if emulated:
        how = "; ".join(
            [listing(sorted({_paced(one.first.summary.compute) for one in emulated})), *scaled_by(emulated)]
        )
        sentences += (f"Emulated compute ({how})." if len(emulated) == len(found) else
                      f"Compute is emulated ({how}) where it says so.",)  # fmt: skip
    return " ".join(each for each in sentences if each)


def scaled_by(groups: Iterable[Group]) -> list[str]:
    """What was scaled down or up, each once, and which links that corresponds to."""
    known = [one.setting for one in groups]
    paces = {each.text("node_speed") for each in known}
    same = paces.pop() if len(paces) == 1 else ""
    found = []
    for each in known:
        said = ", ".join(text for name in ("shrink", "node_speed") if (text := each.text(name)) and text != same)
        stands = each.text("links_as_of") if said or kinds(known, ["links_as_of"]) == 1 else ""
        found.append(": ".join(text for text in (said, stands) if text))
    return [same] * bool(same) + sorted(set(found) - {""}, key=natural)


def of_runs(one: Group) -> str:
    return count(len(one.runs), "run")


def open_marks(groups: Iterable[Group]) -> str:
    """What open marks mean, if there are any."""
    return "" if all(map(certain, groups)) else "Open marks: not ranked, because runs were too short or disturbed."

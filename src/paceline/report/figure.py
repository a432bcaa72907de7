"""A chart as plain data: a plotly figure for two widths, and its numbers. Nothing here imports plotly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, log10
from typing import Any

NARROW = 700  # pixels: a narrower page uses the `narrow` layout of a chart

# The colours of Okabe and Ito, which are safe for colour-blind readers, without yellow, which is too pale on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")  # fitted laws are dotted
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star")
PATTERNS = ("", "/", ".", "x", "-", "\\", "|")
TEXT, FAINT, GRID, IDEAL = "#333333", "#666666", "#e6e6e6", "#999999"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

LEAST_SPAN = 2.0  # per cent, of an axis of accuracies
LEAST_PART = 0.1  # of the highest value, of an axis of losses


@dataclass(frozen=True)
class Chart:
    """A figure with title and caption. `rows` are its numbers, for --csv.

    `figure` has `data` and `layout` for a wide page; `narrow` is the whole layout for a page narrower than NARROW
    pixels: panels below each other, a taller legend. Both have a fixed height and any width. Draw copies of them, as a
    menu modifies its figure.
    """

    name: str
    title: str
    caption: str
    figure: dict[str, Any]
    rows: list[dict[str, Any]]
    narrow: dict[str, Any] = field(default_factory=dict)


@dataclass
class Panel:
    """A pair of axes with traces."""

    title: str
    x: dict[str, Any]
    y: dict[str, Any]
    traces: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Page:
    """Panels that are shown together; a menu chooses one of several pages."""

    name: str
    panels: list[Panel]


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """An axis with a title and a unit, whose labels are never cut off."""
    look = {"automargin": True, "showline": True, "linecolor": FAINT, "ticks": "outside", "ticklen": 4,
            "gridcolor": GRID, "zeroline": False, "exponentformat": "none", "separatethousands": True,
            "tickfont": {"size": 12}}  # fmt: skip
    return {"title": {"text": title, "standoff": 8, "font": {"size": 13}}, **look, **settings}


def from_zero(title: str, **settings: Any) -> dict[str, Any]:
    return axis(title, rangemode="tozero", **settings)


def accuracies(title: str, lows: Sequence[float], highs: Sequence[float]) -> dict[str, Any]:
    """An axis of percentages around the values, but never so narrow that small differences look large."""
    low, high = min(lows, default=0.0), max(highs, default=100.0)
    room = max(0.06 * (high - low), (LEAST_SPAN - (high - low)) / 2)
    return axis(title, range=[max(0.0, low - room), min(100.4, high + room)])


def around(title: str, lows: Sequence[float], highs: Sequence[float]) -> dict[str, Any]:
    """An axis around the values that need not start at 0, but never so narrow that small differences look large."""
    low, high = min(lows, default=0.0), max(highs, default=1.0)
    room = max(0.06 * (high - low), (LEAST_PART * abs(high) - (high - low)) / 2)
    return axis(title, range=[low - room, high + room])


def whole_numbers(title: str, values: Iterable[int]) -> dict[str, Any]:
    """An axis from 1 for workers or servers, with a tick at each number, or at those that ran if there are many."""
    seen = sorted(set(values))
    most = max(seen, default=1)
    ticks = list(range(1, most + 1)) if most <= 8 else sorted({1, *seen})
    return axis(title, range=[1 - 0.06 * most, most * 1.06], tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])


def doublings(title: str, values: Iterable[int]) -> dict[str, Any]:
    """A logarithmic axis for batch sizes, with a tick at each one that ran."""
    seen = sorted(set(values))
    return axis(title, type="log", tickvals=seen, ticktext=[f"{value:,}" for value in seen])


def logarithmic(title: str, values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis with ticks at 1, 2 and 5, or only at powers of ten if there are many."""
    low, high = log10(min(values)) - 0.05, log10(max(values)) + 0.05
    digits = (1, 2, 5) if high - low < 2.5 else (1,)
    ticks = [digit * 10.0**power for power in range(floor(low), ceil(high) + 1) for digit in digits]
    shown = [tick for tick in ticks if low <= log10(tick) <= high]
    return axis(title, type="log", range=[low, high], tickvals=shown, ticktext=[f"{tick:,.10g}" for tick in shown])


def categories(title: str, names: Sequence[str], **settings: Any) -> dict[str, Any]:
    """An axis with a place for each name, even if it stays empty."""
    ends = [-0.5, len(names) - 0.5]
    return axis(title, type="category", categoryorder="array", categoryarray=list(names), range=ends, **settings)


def plain(text: str) -> str:
    """Escaped, as plotly would take a < for the start of a tag."""
    return escape(text, quote=False)

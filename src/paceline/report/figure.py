"""A chart as plain data: what plotly is to draw, at two widths, and the numbers in it. Nothing here imports plotly."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

NARROW = 700  # pixels: below this, a page is to draw with a chart's `narrow` layout

# Okabe and Ito's colours, which the colour-blind can tell apart; its yellow is too pale for lines on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", "dash", "dashdot", "longdash", "longdashdot")  # dotted is what a law says, not what was measured
MARKERS = ("circle", "square", "diamond", "triangle-up", "cross", "triangle-down", "star")
PATTERNS = ("", "/", ".", "x", "-", "\\", "|")
TEXT, FAINT, GRID, IDEAL = "#333333", "#666666", "#e6e6e6", "#999999"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

LEAST_SPAN = 2.0  # per cent, of an axis of accuracies


@dataclass(frozen=True)
class Chart:
    """A figure with its words. `rows` are its numbers, for --csv.

    `figure` has `data` and `layout` for a wide page; `narrow` is the layout, whole, for one that is narrower than
    NARROW pixels: panels below each other, a taller legend. Both say their height, and take any width. Draw with
    copies: a menu of the figure changes what it was given.
    """

    name: str
    title: str
    caption: str
    figure: dict[str, Any]
    rows: list[dict[str, Any]]
    narrow: dict[str, Any] = field(default_factory=dict)


@dataclass
class Panel:
    """One pair of axes and what is drawn on them."""

    title: str
    x: dict[str, Any]
    y: dict[str, Any]
    traces: list[dict[str, Any]] = field(default_factory=list)


@dataclass
class Page:
    """Panels that are seen together; of several pages a menu chooses one."""

    name: str
    panels: list[Panel]


def axis(title: str, **settings: Any) -> dict[str, Any]:
    """An axis that says what it has and in which unit, and is never cut."""
    look = {"automargin": True, "showline": True, "linecolor": FAINT, "ticks": "outside", "ticklen": 4,
            "gridcolor": GRID, "zeroline": False, "exponentformat": "none", "separatethousands": True,
            "tickfont": {"size": 12}}  # fmt: skip
    return {"title": {"text": title, "standoff": 8, "font": {"size": 13}}, **look, **settings}


def from_zero(title: str, **settings: Any) -> dict[str, Any]:
    return axis(title, rangemode="tozero", **settings)


def accuracies(title: str, lows: Sequence[float], highs: Sequence[float]) -> dict[str, Any]:
    """In per cent, near to where they are; but never so near that nothing looks like much."""
    low, high = min(lows, default=0.0), max(highs, default=100.0)
    room = max(0.06 * (high - low), (LEAST_SPAN - (high - low)) / 2)
    return axis(title, range=[max(0.0, low - room), min(100.4, high + room)])


def whole_numbers(title: str, values: Iterable[int]) -> dict[str, Any]:
    """Workers, servers: from 1, with a tick at each number, or at each that was run if they are many."""
    seen = sorted(set(values))
    most = max(seen, default=1)
    ticks = list(range(1, most + 1)) if most <= 8 else sorted({1, *seen})
    return axis(title, range=[1 - 0.06 * most, most * 1.06], tickvals=ticks, ticktext=[f"{tick:,}" for tick in ticks])


def doublings(title: str, values: Iterable[int]) -> dict[str, Any]:
    """Batch sizes: each doubling is as far as the next, and the ticks are those that were run."""
    seen = sorted(set(values))
    return axis(title, type="log", tickvals=seen, ticktext=[f"{value:,}" for value in seen])


def categories(title: str, names: Sequence[str], **settings: Any) -> dict[str, Any]:
    """A place for each of these names, also where it stays empty."""
    ends = [-0.5, len(names) - 0.5]
    return axis(title, type="category", categoryorder="array", categoryarray=list(names), range=ends, **settings)

"""Tables of a report as data: cells with few digits, under headers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.statistics import Interval

NOTHING = "–"
MOST_ROWS = 200  # of a chart's numbers that are on the page; --csv writes all
LONG = 32  # letters: a cell with more is wrapped


@dataclass(frozen=True)
class Cell:
    """The text of a table's cell; `note` is in small letters below it, such as an interval.

    `shade` is how dark it is, from 0 to 1, in a table that is a heat map.
    """

    text: str
    note: str = ""
    number: bool = True
    shade: float = 0.0

    @property
    def long(self) -> bool:
        return len(self.text) > LONG


@dataclass(frozen=True)
class TableData:
    """Rows under headers. `kind` is the table's CSS class; `note` is a sentence below it."""

    headers: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    kind: str = ""
    note: str = ""

    @property
    def words(self) -> tuple[bool, ...]:
        """Which columns have words, and so are aligned to the left."""
        return tuple(any(not row[at].number for row in self.rows) for at in range(len(self.headers)))


def number(value: float | None, digits: int = 3) -> str:
    """A number for reading: thousands apart, few digits, no exponents."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if isinstance(value, int) or value == 0:
        return f"{value:,.0f}".replace("-", "−")
    decimals = max(0, min(6, digits - 1 - math.floor(math.log10(abs(value)))))
    return f"{value:,.{decimals}f}".replace("-", "−")


def percent(value: float | None) -> str:
    return NOTHING if value is None else f"{100 * value:.2f} %"


def within(interval: Interval | None, factor: float = 1.0) -> Cell:
    """A value over its interval, both with as many decimals."""
    if interval is None:
        return Cell(NOTHING)
    value, low, high = (factor * each for each in (interval.value, interval.low, interval.high))
    text = number(value)
    decimals = len(text.partition(".")[2])
    return Cell(text, f"{low:,.{decimals}f}–{high:,.{decimals}f}")


def cell(value: Any) -> Cell:
    """A value of any type as a cell."""
    if isinstance(value, Cell):
        return value
    if value is None or isinstance(value, bool):
        return Cell(NOTHING if value is None else "yes" if value else "no", number=value is None)
    if isinstance(value, int | float):
        return Cell(number(value, digits=4))
    return Cell(str(value), number=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "", note: str = "") -> TableData:
    """A table of values of any type."""
    return TableData(tuple(headers), tuple(tuple(map(cell, row)) for row in rows), kind, note)


def table_of(rows: Sequence[Mapping[str, Any]]) -> TableData:
    """The numbers of a chart; of very many rows only the first."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[row.get(name) for name in names] for row in rows[:MOST_ROWS]]
    note = f"The first {MOST_ROWS} of {len(rows):,} rows; --csv writes all." if len(rows) > MOST_ROWS else ""
    return table([name.replace("_", " ") for name in names], shown, note=note)

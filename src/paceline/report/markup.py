"""HTML from values: everything that comes from a run is escaped here, and numbers get few digits."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from paceline.analysis.statistics import Interval
from paceline.strict_json import finite

NOTHING = "–"
# Of the numbers of a chart, so many rows are on the page; --csv has them all.
MOST_ROWS = 200
LONG = 32  # letters: a cell with more has lines


@dataclass(frozen=True)
class Cell:
    """What a cell of a table says; `note` is smaller, below it, such as an interval."""

    text: str
    note: str = ""
    number: bool = True


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
    """Of whatever a row of numbers has."""
    if isinstance(value, Cell):
        return value
    if value is None or isinstance(value, bool):
        return Cell(NOTHING if value is None else "yes" if value else "no", number=value is None)
    if isinstance(value, int | float):
        return Cell(number(value, digits=4))
    return Cell(str(value), number=False)


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], kind: str = "") -> str:
    """In a box of its own, which scrolls where the page is narrower than the table. `kind` is its class."""
    cells = [[cell(value) for value in row] for row in rows]
    words = [any(not row[at].number for row in cells) for at in range(len(headers))]
    head = "".join(f"<th{_side(word)}>{escape(name)}</th>" for name, word in zip(headers, words, strict=True))
    body = "".join(
        "<tr>" + "".join(_cell(each, word) for each, word in zip(row, words, strict=True)) + "</tr>\n" for row in cells
    )
    name = f' class="{kind}"' if kind else ""
    return scrolling(f"<table{name}><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>")


def scrolling(inner: str) -> str:
    return f'<div class="scroll" tabindex="0">{inner}</div>\n'


def _side(word: bool) -> str:
    return ' class="word"' if word else ""


def _cell(each: Cell, word: bool) -> str:
    note = f"<small>{escape(each.note)}</small>" if each.note else ""
    side = ' class="word long"' if len(each.text) > LONG else _side(word)
    return f"<td{side}>{escape(each.text)}{note}</td>"


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of a chart; the longest ones not all."""
    headers = list(dict.fromkeys(name for row in rows for name in row))
    shown = [[row.get(name) for name in headers] for row in rows[:MOST_ROWS]]
    more = "" if len(rows) <= MOST_ROWS else f"<p>The first {MOST_ROWS} of {len(rows):,} rows; --csv writes all.</p>\n"
    return table([name.replace("_", " ") for name in headers], shown) + more


def prose(text: str) -> str:
    """Escaped; what is between backticks is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))


def paragraphs(text: str) -> str:
    """Prose, whose paragraphs are apart by an empty line."""
    return "".join(f"<p>{prose(' '.join(part.split()))}</p>\n" for part in text.split("\n\n") if part.strip())


def bullets(texts: Iterable[str]) -> str:
    return "<ul>" + "".join(f"<li>{prose(text)}</li>\n" for text in texts) + "</ul>\n"


def details(title: str, inner: str) -> str:
    return f"<details><summary>{escape(title)}</summary>\n{inner}</details>\n"


def as_json(value: Any) -> str:
    """For a script element: nothing in it can end the element, and there is no NaN, which JSON does not have."""
    text = json.dumps(finite(value), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")

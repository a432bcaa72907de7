"""Numbers, intervals and lists in words, with units and few digits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from math import isfinite
from typing import TYPE_CHECKING

from paceline.options import plural

if TYPE_CHECKING:
    from paceline.analysis.statistics import Interval

LONG = 6  # numbers in a row: more are given as a range


def count(number: int, what: str) -> str:
    return f"{number:,} {what if number == 1 else plural(what)}"


def listing(words: Sequence[str]) -> str:
    """a, b and c; or a, x; b, y; and c, z, where commas are taken"""
    if any(", " in word for word in words):
        return "; and ".join(["; ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def some(words: Sequence[str], most: int = 3) -> str:
    """A short list; the rest is only counted."""
    return listing(words if len(words) <= most + 1 else [*words[:most], f"{len(words) - most} more"])


def ranged(values: Collection[int]) -> str:
    """1, 2 and 4; those that follow each other, and long lists, as a range: 1 to 6."""
    ordered = sorted(set(values))
    in_a_row = len(ordered) > 2 and ordered == list(range(ordered[0], ordered[-1] + 1))
    if in_a_row or len(ordered) > LONG:
        return f"{ordered[0]:,} to {ordered[-1]:,}"
    return listing([f"{value:,}" for value in ordered])


def numbers(values: Collection[int], what: str) -> str:
    return f"{ranged(values)} {what}{'' if set(values) == {1} else 's'}"


def number(value: float) -> str:
    """Three significant digits and no exponent: 0.0123, 4.56, 37.7, 3,665."""
    if not isfinite(value):
        return "unknown"
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    whole = f"{abs(value):.2e}"
    return f"{value:.{max(0, 2 - int(whole.split('e')[1]))}f}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def accuracy(value: float) -> str:
    return f"{100 * value:.2f} %"


def loss(value: float) -> str:
    """Four significant digits, as small differences count: 0.03124, 1.430."""
    return f"{value:#.4g}" if 1e-4 <= abs(value) < 1000 else number(value)


def seconds(value: float) -> str:
    for unit, length in (("h", 3600.0), ("min", 60.0)):
        if value >= 2 * length:
            return f"{number(value / length)} {unit}"
    return f"{number(value)} s" if value >= 1 else f"{number(value * 1000)} ms"


def size(value: float) -> str:
    """Bytes, in units of a thousand as networks have them."""
    for unit, length in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= length:
            return f"{number(value / length)} {unit}"
    return f"{value:.0f} B"


def link(value: float) -> str:
    """Bits per second."""
    return f"{value / 1e9:g} Gbit/s" if value >= 1e9 else f"{value / 1e6:g} Mbit/s"


def spread(found: Interval, form: Callable[[float], str] = number) -> str:
    """An interval: 3,600 to 3,720."""
    return f"{form(found.low)} to {form(found.high)}"


def within(found: Interval, form: Callable[[float], str] = number) -> str:
    """A value with its interval, 3,665 (3,600 to 3,720), or alone if the interval adds nothing."""
    said = form(found.value)
    return said if form(found.low) == said == form(found.high) else f"{said} ({spread(found, form)})"


def percents(found: Interval) -> str:
    """81 % (78 to 84)"""
    said = f"{100 * found.value:.0f} %"
    low, high = f"{100 * found.low:.0f}", f"{100 * found.high:.0f}"
    return said if f"{low} %" == said == f"{high} %" else f"{said} ({low} to {high})"


def sentence(text: str) -> str:
    return text[:1].upper() + text[1:]

"""Which panel of a chart settings are in and how they look, by what tells them apart."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Generic, TypeVar

from paceline.analysis.setting import MACHINE, Setting, distinguishing, kinds
from paceline.analysis.study import Study
from paceline.options import PROBLEM
from paceline.report.figure import COLOURS, DASHES, MARKERS
from paceline.strategies.table import describe

# What lines must share to be beside each other in a panel.
SAME_PANEL = (PROBLEM, MACHINE, "links_as_of")
PAGES_BY = ("links_as_of",)  # whatever else there is: its first value is what is seen first
MOST_LINES, MOST_PANELS = 10, 6  # of a panel, of a page

Thing = TypeVar("Thing")


def name(one: Setting, names: Iterable[str]) -> str:
    """For plotly, which would take a < for the beginning of a tag."""
    return escape(one.words(names), quote=False)


def natural(text: str) -> tuple[Any, ...]:
    """To sort by: numbers in a text count as numbers, in one unit, and the strategy of one worker comes last."""
    alike = re.sub(r"([\d.]+) Gbit/s", lambda found: f"{1000 * float(found[1]):g} Mbit/s", text.replace(",", ""))
    parts = re.split(r"(\d+)", alike)
    return (describe(text).single, [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts])


def palette(study: Study, key: str) -> list[str]:
    """All that a study has of one fact, in the order of the colours: it is the same for all charts."""
    return sorted({one.setting.text(key) for one in study.groups} - {""}, key=natural)


@dataclass(frozen=True)
class Look:
    """Of a line: told apart by colour, and on paper without colours by dash and marker."""

    colour: str
    dash: str
    marker: str
    rank: int = 0  # where it is in the legend


def looks(many: Sequence[Setting], keys: Sequence[str], known: Sequence[str]) -> list[Look]:
    """A colour for each value of the first of these facts, a dash for each of the others.

    The marker is by both, and as long as there are enough, no two that have the same dash have the same marker too.
    """
    first = [each.text(key) for each in many for key in keys[:1]] or [""] * len(many)
    second = [tuple(each.text(key) for key in keys[1:]) for each in many]
    colours, others = list(dict.fromkeys([*known, *first])), list(dict.fromkeys(second))
    both = list(dict.fromkeys(zip(first, second, strict=True)))
    ranks = sorted(both, key=lambda each: [natural(text) for text in (each[0], *each[1])])
    found: dict[tuple[str, tuple[str, ...]], Look] = {}
    taken: set[tuple[str, str]] = set()
    for one, two in both:
        hue = colours.index(one)
        dash = DASHES[(others.index(two) + hue // len(COLOURS) if len(others) > 1 else hue) % len(DASHES)]
        wishes = [MARKERS[(others.index(two) + hue + more) % len(MARKERS)] for more in range(len(MARKERS))]
        marker = next((each for each in wishes if (dash, each) not in taken), wishes[0])
        taken.add((dash, marker))
        found[one, two] = Look(COLOURS[hue % len(COLOURS)], dash, marker, ranks.index((one, two)) + 1)
    return [found[each] for each in zip(first, second, strict=True)]


@dataclass(frozen=True)
class Styled(Generic[Thing]):
    """Something to be drawn: its name in the legend, its name where nothing else is said, its looks."""

    thing: Thing
    label: str
    full: str
    look: Look


@dataclass(frozen=True)
class Sheet(Generic[Thing]):
    """What is on one page of a chart, by the titles of its panels."""

    name: str
    panels: dict[str, list[Styled[Thing]]]


def arrange(
    study: Study,
    things: Iterable[Thing],
    words: Callable[[Thing], Setting],
    panels: Sequence[str] | None = (),
    *,
    colour: str = "strategy",
    without: Collection[str] = (),
    most: int = MOST_LINES,
) -> list[Sheet[Thing]]:
    """Things in panels by these facts (None: each in its own), and by more where one would have too many.

    Many panels are on several pages. A value of `colour` looks the same in every chart of a study. `without`: what the
    x axis says.
    """
    given = list(things)
    many = [words(thing) for thing in given]
    chosen = distinguishing(many, (*without, colour), SAME_PANEL if panels is None else panels)
    keys = distinguishing(many, without, known=chosen)
    above = keys[:] if panels is None else chosen
    own = sorted((key for key in keys if key not in above), key=lambda key: key != colour)
    while len(own) > 1 and _fullest(many, above) > most:
        above.append(own.pop(own.index(_divider(many, above, own, most))))
    above.sort(key=lambda key: key not in PAGES_BY)
    ordered = sorted(given, key=lambda thing: [natural(words(thing).text(key)) for key in (*above, *own)])
    known = [words(thing) for thing in ordered]
    colours = palette(study, own[0]) if own else []
    turned = 0  # how many of them the pages are by
    while turned < len(above) - 1 and _most_panels(known, above, turned) > MOST_PANELS:
        turned += 1
    full, titles = (keys if "strategy" in keys else [*keys, "strategy"]), [key for key in keys if key in above[turned:]]
    found: dict[str, dict[str, list[Styled[Thing]]]] = {}
    for thing, each, look in zip(ordered, known, looks(known, own, colours), strict=True):
        page = found.setdefault(name(each, above[:turned]), {})
        styled = Styled(thing, name(each, own) or name(each, ["strategy"]), name(each, full), look)
        page.setdefault(name(each, titles) or (name(each, ["model"]) if titles else ""), []).append(styled)
    return [Sheet(page, parts) for page, parts in found.items()]


def _divider(many: Sequence[Setting], above: Sequence[str], own: Sequence[str], most: int) -> str:
    """What to make more panels by: the last, or what makes the fewest of them if these would not be on one page."""
    fitting = [key for key in own if _fullest(many, [*above, key]) <= most]
    if not fitting or kinds(many, [*above, own[-1]]) <= MOST_PANELS:
        return own[-1]
    return min(reversed(fitting), key=lambda key: kinds(many, [*above, key]))


def _fullest(known: Sequence[Setting], above: Sequence[str]) -> int:
    titles = [name(each, above) for each in known]
    return max((titles.count(title) for title in titles), default=0)


def _most_panels(known: Sequence[Setting], above: Sequence[str], turned: int) -> int:
    pages: dict[str, set[str]] = {}
    for each in known:
        pages.setdefault(name(each, above[:turned]), set()).add(name(each, above))
    return max(map(len, pages.values()), default=0)

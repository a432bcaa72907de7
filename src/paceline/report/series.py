"""Panels, colours and names of settings in a chart, by the facts that distinguish them."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from paceline.analysis.setting import ALWAYS, MACHINE, Setting, distinguishing, kinds
from paceline.analysis.study import Study
from paceline.options import PROBLEM
from paceline.report.figure import COLOURS, DASHES, MARKERS, plain
from paceline.strategies.table import describe

# Facts that lines in one panel have in common.
SAME_PANEL = (PROBLEM, MACHINE, "links_as_of")
PAGES_BY = ("links_as_of",)  # pages are always by these facts
MOST_LINES, MOST_PANELS = 10, 6  # per panel, per page

Thing = TypeVar("Thing")


def name(one: Setting, names: Iterable[str]) -> str:
    """The name as plotly takes it."""
    return plain(one.words(names))


def short_names(many: Sequence[Setting], keys: Sequence[str]) -> list[str]:
    """Names by these facts, each without those that do not tell it apart from the others: of threads, for example, if
    all settings with its strategy have as many.
    """
    bare = [Setting({key: fact for key, fact in each.facts.items() if key in keys}) for each in many]
    return [plain(each.label(bare, always=(*ALWAYS, *keys[:1]))) for each in bare]


def natural(text: str) -> tuple[Any, ...]:
    """A sort key: numbers in a text are compared as numbers, in one unit; the strategy of one worker comes last."""
    alike = re.sub(r"([\d.]+) Gbit/s", lambda found: f"{1000 * float(found[1]):g} Mbit/s", text.replace(",", ""))
    parts = re.split(r"(\d+)", alike)
    return (describe(text).single, [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts])


def palette(study: Study, key: str) -> list[str]:
    """All values of one fact in a study, in the order of their colours, which is the same in all charts."""
    return sorted({one.setting.text(key) for one in study.groups} - {""}, key=natural)


@dataclass(frozen=True)
class Look:
    """Colour, dash and marker of a line: without colour, dash and marker distinguish it."""

    colour: str
    dash: str
    marker: str
    rank: int = 0  # position in the legend


def looks(many: Sequence[Setting], keys: Sequence[str], known: Sequence[str]) -> list[Look]:
    """A colour for each value of the first fact, a dash for each combination of the others.

    Markers depend on both; lines with the same dash have different markers as long as there are enough.
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
    """Something to draw, with its name in the legend, its full name, and its look."""

    thing: Thing
    label: str
    full: str
    look: Look


@dataclass(frozen=True)
class Sheet(Generic[Thing]):
    """One page of a chart: what is in each panel, by its title."""

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
    """Things in panels by these facts (None: each in its own panel), and by more facts if a panel would have too many.

    Many panels are divided over several pages. A value of `colour` has the same colour in every chart of a study.
    `without` are the facts that the x axis shows.
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
    turned = 0  # pages are by so many of the facts
    while turned < len(above) - 1 and _most_panels(known, above, turned) > MOST_PANELS:
        turned += 1
    full, titles = (keys if "strategy" in keys else [*keys, "strategy"]), [key for key in keys if key in above[turned:]]
    found: dict[str, dict[str, list[Styled[Thing]]]] = {}
    labels, pages, panels_of = (short_names(known, each) for each in (own, above[:turned], titles))
    for index, (thing, each, look) in enumerate(zip(ordered, known, looks(known, own, colours), strict=True)):
        styled = Styled(thing, labels[index] or name(each, ["strategy"]), name(each, full), look)
        title = panels_of[index] or (name(each, ["model"]) if titles else "")
        found.setdefault(pages[index], {}).setdefault(title, []).append(styled)
    return [Sheet(page, parts) for page, parts in found.items()]


def _divider(many: Sequence[Setting], above: Sequence[str], own: Sequence[str], most: int) -> str:
    """The fact to divide panels by: the last, or the one that needs the fewest panels if these do not fit on a page."""
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

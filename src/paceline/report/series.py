"""What tells settings apart, in words; and from that, which panel of a chart they are in and how they look."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Generic, TypeVar

from paceline.analysis import division, scaling
from paceline.analysis.runs import MACHINE
from paceline.analysis.scaling import NETWORK, Group, machine_of, nodes_of, stands_for
from paceline.analysis.study import Study
from paceline.analysis.wording import count, link, listing
from paceline.report.figure import COLOURS, DASHES, MARKERS
from paceline.strategies.table import describe

# What names are made of, most telling first; whatever else differs comes after these.
TELLING = ("model", "data", "strategy", "servers", *division.PARTS, "schedule", "microbatches", "recompute",
           "overlap", "batch", "compute", "stands", "workers", "nodes", "device", "link", "transport", "threads",
           "replicas")  # fmt: skip
# Of a spec, what these say already, and what follows from them.
SAID = ("model", "data", "strategy", "servers", "batch_size", "workers", "device", "compute", "transport", "threads",
        "lab", "normalize", "staleness", "overlap", "shrink", "read",
        *division.KEYS, *MACHINE, *NETWORK)  # fmt: skip
# What lines must share to be beside each other in a panel.
PROBLEM = ("model", "data", "compute", "stands", "shrink", "pace", "cpu", "image_size", "hidden", "dtype", *MACHINE)
PAGES_BY = ("stands",)  # whatever else there is: its first value is what is seen first
MOST_LINES, MOST_PANELS = 10, 6  # of a panel, of a page

Facets = Mapping[str, str]
Thing = TypeVar("Thing")


def facets(one: Group) -> dict[str, str]:
    """What a setting is, in words, by what they are about."""
    s, setting = one.first.summary, one.setting
    links, speeds, cpus = (_of_nodes(one, key) for key in ("up", "speed", "cpu"))
    staleness, threads, overlap = (setting.get(key) for key in ("staleness", "threads", "overlap"))
    averages = s.workers > 1 and one.first.has("overlap")
    words = {"model": s.model, "data": s.data, "strategy": s.strategy,
             "servers": count(s.servers, "server") if s.servers else "", "batch": f"batch {s.batch_size:,}",
             "workers": count(s.workers, "worker"), "nodes": count(nodes_of(one.first), "node"),
             "device": str(setting.get("device", "")), "link": listing([link(up) for up in links]),
             "compute": "real compute" if s.compute == "real" else f"emulated ({device(s.compute)})",
             "transport": s.transport, "threads": count(threads, "thread") if threads else "",
             "staleness": "" if staleness is None else f"staleness {staleness}",
             "read": f"read {setting['read']}" if setting.get("read", "own") != "own" else "",
             "overlap": "overlap off" if averages and overlap == "off" else "",
             "overlap_asked": f"overlap {overlap}" if averages and overlap else "", "stands": stands(one),
             "shrink": f"gradients {s.shrink:,} times smaller" if s.shrink > 1 else "",
             "pace": f"devices {listing([f'{each:g}' for each in speeds])} times as fast" if speeds not in ([], [1])
                     else "",
             "cpu": f"{listing([f'{each:g}' for each in cpus])} cores a node" if cpus else ""}  # fmt: skip
    words |= division.words(setting) | {"replicas": division.replicas(one.first)}
    words |= dict(zip(MACHINE, machine_of(one), strict=True))
    words |= {key: text for key, text in scaling.words(one).items() if key in NETWORK}
    rest = {key: value for key, value in setting.items() if key not in SAID}
    return words | {key: f"{key.replace('_', ' ')} {value}" for key, value in sorted(rest.items())}


def _of_nodes(one: Group, key: str) -> list[float]:
    """What its lab's nodes have, each number once."""
    return sorted({node[key] for node in one.setting.get("lab") or [] if node.get(key)})


def stands(one: Group) -> str:
    """Of smaller gradients and faster devices: the links that would take as large a part of a step at full size."""
    known = stands_for(one)
    return f"links as of {link(float(f'{known:.3g}'))}" if known else ""


def device(compute: str) -> str:
    """What an emulated run waits like: a device, seconds that a batch was given, or another run."""
    given = compute.removeprefix("emulated:")
    if re.fullmatch(r"[0-9.e-]+", given):
        return f"{given} s"
    return f"as in {given.rstrip('/').rpartition('/')[2]}" if "/" in given else given


def common(many: Sequence[Facets]) -> dict[str, str]:
    """What all of these have."""
    return {key: value for key, value in many[0].items() if all(each.get(key) == value for each in many)}


def telling(
    many: Sequence[Facets], without: Iterable[str] = (), only: Iterable[str] | None = None, known: Iterable[str] = ()
) -> list[str]:
    """As few kinds of facets as tell all of these apart that can be told apart; `known` are chosen already."""
    left_out, allowed, chosen = set(without), None if only is None else set(only), list(known)
    order = [*TELLING, *sorted({key for each in many for key in each} - set(TELLING))]
    apart = _kinds(many, chosen)
    for key in order:
        found = _kinds(many, [*chosen, key])
        if key not in left_out and (allowed is None or key in allowed) and found > apart:
            chosen, apart = [*chosen, key], found
    return sorted(chosen, key=order.index)


def _kinds(many: Sequence[Facets], keys: Sequence[str]) -> int:
    return len({tuple(each.get(key, "") for key in keys) for each in many})


def name(one: Facets, keys: Iterable[str]) -> str:
    """For people, and for plotly, which would take a < for the beginning of a tag."""
    return escape(", ".join(one[key] for key in keys if one.get(key)), quote=False)


def natural(text: str) -> tuple[Any, ...]:
    """To sort by: numbers in a text count as numbers, in one unit, and the strategy of one worker comes last."""
    alike = re.sub(r"([\d.]+) Gbit/s", lambda found: f"{1000 * float(found[1]):g} Mbit/s", text.replace(",", ""))
    parts = re.split(r"(\d+)", alike)
    return (describe(text).single, [(part.isdigit(), int(part) if part.isdigit() else part) for part in parts])


def palette(study: Study, key: str) -> list[str]:
    """All that a study has of one kind of facets, in the order of the colours: it is the same for all charts."""
    return sorted({facets(one).get(key, "") for one in study.groups} - {""}, key=natural)


@dataclass(frozen=True)
class Look:
    """Of a line: told apart by colour, and on paper without colours by dash and marker."""

    colour: str
    dash: str
    marker: str
    rank: int = 0  # where it is in the legend


def looks(many: Sequence[Facets], keys: Sequence[str], known: Sequence[str]) -> list[Look]:
    """A colour for each value of the first of these kinds of facets, a dash for each of the others.

    The marker is by both, and as long as there are enough, no two that have the same dash have the same marker too.
    """
    first = [each.get(key, "") for each in many for key in keys[:1]] or [""] * len(many)
    second = [tuple(each.get(key, "") for key in keys[1:]) for each in many]
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
    words: Callable[[Thing], Facets],
    panels: Sequence[str] | None = (),
    *,
    colour: str = "strategy",
    without: Iterable[str] = (),
    most: int = MOST_LINES,
) -> list[Sheet[Thing]]:
    """Things in panels by these kinds of facets (None: each in its own), and by more where one would have too many.

    Many panels are on several pages. A value of `colour` looks the same in every chart of a study. `without`: what the
    x axis says.
    """
    given = list(things)
    many = [words(thing) for thing in given]
    chosen = telling(many, without, PROBLEM if panels is None else panels)
    keys = telling(many, without, known=chosen)
    above = keys[:] if panels is None else chosen
    own = sorted((key for key in keys if key not in above), key=lambda key: key != colour)
    while len(own) > 1 and _fullest(many, above) > most:
        above.append(own.pop(own.index(_divider(many, above, own, most))))
    above.sort(key=lambda key: key not in PAGES_BY)
    ordered = sorted(given, key=lambda thing: [natural(words(thing).get(key, "")) for key in (*above, *own)])
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


def _divider(many: Sequence[Facets], above: Sequence[str], own: Sequence[str], most: int) -> str:
    """What to make more panels by: the last, or what makes the fewest of them if these would not be on one page."""
    fitting = [key for key in own if _fullest(many, [*above, key]) <= most]
    if not fitting or _kinds(many, [*above, own[-1]]) <= MOST_PANELS:
        return own[-1]
    return min(reversed(fitting), key=lambda key: _kinds(many, [*above, key]))


def _fullest(known: Sequence[Facets], above: Sequence[str]) -> int:
    titles = [name(each, above) for each in known]
    return max((titles.count(title) for title in titles), default=0)


def _most_panels(known: Sequence[Facets], above: Sequence[str], turned: int) -> int:
    pages: dict[str, set[str]] = {}
    for each in known:
        pages.setdefault(name(each, above[:turned]), set()).add(name(each, above))
    return max(map(len, pages.values()), default=0)

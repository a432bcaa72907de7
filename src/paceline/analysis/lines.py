"""Settings that differ in their number of workers alone, and whether one setting is really faster than another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis import division, scaling
from paceline.analysis.compare import BETWEEN_RUNS
from paceline.analysis.runs import MACHINE
from paceline.analysis.scaling import (
    AT_LAST,
    NETWORK,
    OF_STRATEGY,
    Group,
    along_workers,
    certain,
    nodes_of,
    problem_of,
    size,
    stands_for,
)
from paceline.analysis.statistics import Interval, ratio
from paceline.analysis.wording import count, link, listing
from paceline.strategies.base import Strategy

LENGTH = scaling.LENGTH
ENOUGH_RUNS = 3
MATTERS = 0.03  # of speed: a smaller difference may be real, and decides nothing


@dataclass(frozen=True)
class Line:
    """By workers, rising. Weak: each worker's batch is fixed; strong: the batch of all together."""

    kind: str
    groups: dict[int, Group]

    @property
    def first(self) -> Group:
        return next(iter(self.groups.values()))

    @property
    def widest(self) -> Group:
        return self.groups[max(self.groups)]

    @property
    def model(self) -> str:
        return self.first.first.summary.model

    @property
    def servers(self) -> int:
        return self.first.first.summary.servers

    @property
    def strategy(self) -> str:
        return self.first.strategy

    @property
    def method(self) -> Strategy:
        return self.first.method

    @property
    def family(self) -> str:
        """What lines must have in common so that their strategies can be compared."""
        network = {key: value for key, value in self.first.setting.items() if key in NETWORK}
        kept = problem_of(self.first) | network
        return repr((sorted(kept.items()), links(self.first), self.kind, size(self.first, self.kind)))


def links(one: Group) -> tuple[tuple[Any, ...], ...]:
    """The kinds of nodes and links of its lab, however many there are of each."""
    return scaling.links(one)


def network(one: Group) -> str:
    """The speeds of its lab's links, in words; empty outside a lab."""
    speeds = sorted({float(speed) for row in links(one) for speed in row[:2] if speed})
    return f"links of {listing([link(speed) for speed in speeds])}" if speeds else ""


def lines(groups: Iterable[Group], kind: str) -> list[Line]:
    """Weak or strong lines; those of one number of workers only are weak ones."""
    made = [Line(kind, rows) for rows in along_workers(groups, kind)]
    return made if kind == "weak" else [line for line in made if len(line.groups) > 1]


def all_lines(groups: Sequence[Group]) -> list[Line]:
    """Weak lines and strong ones; a setting that has a line to itself is left out if it is part of another."""
    strong, weak = lines(groups, "strong"), lines(groups, "weak")
    used = [one for line in strong for one in line.groups.values()]
    return [line for line in weak if len(line.groups) > 1 or not any(line.first is one for one in used)] + strong


def words(line: Line) -> dict[str, str]:
    """What a line is, by what it is about; all but its workers."""
    s, found = line.first.first.summary, scaling.words(line.first)
    batch = f"{'' if line.kind == 'weak' else 'global '}batch {round(size(line.first, line.kind), 2)}"
    said = {"model": s.model, "strategy": s.strategy, "division": _division(line), "servers": found["servers"],
            "links": network(line.first), "batch": batch, "data": s.data, "compute": s.compute,
            "transport": s.transport}  # fmt: skip
    left_out = {*said, *LENGTH, *AT_LAST, "workers", "threads", "nodes"} - {*MACHINE}
    if stands := stands_for(line.first):
        found["shrink"] = f"as {link(stands)}"
    rest = {key: word for key, word in sorted(found.items()) if key not in left_out}
    return said | rest | {"nodes": count(nodes_of(line.widest.first), "node")}


def _division(line: Line) -> str:
    """What is the same of all its models in parts: the number of parts, or of replicas."""
    runs = [one.first for one in line.groups.values()]
    if len(runs) == 1:
        return division.workers(runs[0]) if division.replicas(runs[0]) else ""
    for word in (division.parts, division.replicas):
        said = {word(run) for run in runs}
        if len(said) == 1:
            return said.pop()
    return ""


def name(line: Line, among: Sequence[Line], without: Sequence[str] = (), always: Sequence[str] = ()) -> str:
    """A short name: what is always to be said, and then only as much as tells it from the others."""
    mine = words(line)
    others = [words(each) for each in among if each is not line]
    shown = [key for key in mine if key in (*always, *without)]
    rivals = [other for other in others if all(other.get(key) == mine[key] for key in shown)]
    for key in mine:
        relevant = [r for r in rivals if key not in OF_STRATEGY or r["strategy"] == line.strategy]
        if any(rival.get(key) != mine[key] for rival in relevant):
            shown.append(key)
            rivals = [rival for rival in rivals if rival.get(key) == mine[key]]
    return ", ".join(mine[key] for key in mine if key in shown and key not in without and mine[key])


def speed(one: Group) -> float:
    """Images/s, the middle run's."""
    return one.speed


def faster(one: Group, other: Group) -> Interval:
    """How many times as fast as the other it is, in images/s."""
    return ratio(other.series, one.series)


def told(ratio: Interval, *groups: Group) -> bool | None:
    """Whether the first is really faster (or slower: False), by as much as matters. None where that cannot be told.

    Of few runs nobody knows how much runs differ, so that a small difference between them proves nothing.
    """
    few = min(len(one.runs) for one in groups) < ENOUGH_RUNS
    least = BETWEEN_RUNS if few else MATTERS
    if not all(map(certain, groups)) or not ratio.excludes(1.0) or abs(ratio.value - 1) < least:
        return None
    return ratio.value > 1

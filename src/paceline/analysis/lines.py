"""Settings that differ in their number of workers alone, and whether one setting is really faster than another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.compare import BETWEEN_RUNS
from paceline.analysis.scaling import BY_DIVISION, NAMED, Group, nodes_of
from paceline.analysis.statistics import Interval, interval, medians
from paceline.analysis.wording import count, link, listing

ENOUGH_RUNS = 3
ENOUGH_STEPS = 5  # without warm-up: of fewer, a run's speed is a guess
MATTERS = 0.03  # of speed: a smaller difference may be real, and decides nothing
# How long a run was and what came after it: its speed is not of them.
LENGTH = ("epochs", "steps", "test", "validation")
# What follows from the number of workers, and so may differ along a line.
BY_WORKERS = ("workers", "batch_size", "threads", "lab", *LENGTH)
# What a strategy has of its own: it tells its lines apart, and not one strategy from another.
OF_STRATEGY = ("servers", "transport", "encrypt", "overlap")


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
    def family(self) -> str:
        """What lines must have in common so that their strategies can be compared."""
        kept = {key: value for key, value in self.first.setting.items() if key not in (*BY_DIVISION, *BY_WORKERS)}
        return repr((sorted(kept.items()), links(self.first), self.kind, _size(self.first, self.kind)))


def links(one: Group) -> tuple[tuple[Any, ...], ...]:
    """The kinds of nodes and links of its lab, however many there are of each."""
    rows = {tuple(node.get(key) for key in ("up", "down", "cpu", "speed")) for node in one.setting.get("lab") or []}
    return tuple(sorted(rows, key=repr))


def network(one: Group) -> str:
    """The speeds of its lab's links, in words; empty outside a lab."""
    speeds = sorted({float(speed) for row in links(one) for speed in row[:2] if speed})
    return f"links of {listing([link(speed) for speed in speeds])}" if speeds else ""


def _size(one: Group, kind: str) -> int:
    s = one.first.summary
    return s.batch_size if kind == "weak" else s.global_batch


def lines(groups: Iterable[Group], kind: str) -> list[Line]:
    """Weak or strong lines; those of one number of workers only are weak ones."""
    found: dict[str, list[Group]] = {}
    for one in groups:
        kept = {key: value for key, value in one.setting.items() if key not in BY_WORKERS}
        key = repr((sorted(kept.items()), links(one), one.first.summary.transport, _size(one, kind)))
        found.setdefault(key, []).append(one)
    made = [Line(kind, rows) for members in found.values() for rows in _by_workers(members)]
    return made if kind == "weak" else [line for line in made if _divides(line)]


def _divides(line: Line) -> bool:
    """Whether the batch of all is divided: that of ps-async is one worker's, however many there are."""
    return len({one.first.summary.batch_size for one in line.groups.values()}) > 1


def _by_workers(members: Sequence[Group]) -> list[dict[int, Group]]:
    """One line, or one for each number of nodes where the same workers were put on several numbers of them.

    Of settings that differ in their length alone, the longest counts.
    """
    ordered = sorted(members, key=lambda one: (one.workers, -sum(len(run.steady) for run in one.runs)))
    if len({one.workers for one in ordered}) == len(ordered):
        return [{one.workers: one for one in ordered}]
    found: dict[int, dict[int, Group]] = {}
    for one in ordered:
        found.setdefault(nodes_of(one.first), {}).setdefault(one.workers, one)
    return list(found.values())


def all_lines(groups: Sequence[Group]) -> list[Line]:
    """Weak lines and strong ones; a setting that has a line to itself is left out if it is part of another."""
    strong, weak = lines(groups, "strong"), lines(groups, "weak")
    used = [one for line in strong for one in line.groups.values()]
    return [line for line in weak if len(line.groups) > 1 or not any(line.first is one for one in used)] + strong


def words(line: Line) -> dict[str, str]:
    """What a line is, by what it is about; all but its workers."""
    s, setting = line.first.first.summary, line.first.setting
    batch = f"batch {s.batch_size}" if line.kind == "weak" else f"global batch {s.global_batch}"
    said = {"model": s.model, "strategy": s.strategy, "servers": count(s.servers, "server") if s.servers else "",
            "links": network(line.first), "batch": batch, "data": s.data, "compute": s.compute,
            "transport": s.transport}  # fmt: skip
    named = {*NAMED, *LENGTH} - {*OF_STRATEGY}
    rest = {key: value for key, value in setting.items() if key not in {*named, *said}}
    nodes = {"nodes": count(nodes_of(line.widest.first), "node")}
    return said | {key: f"{key.replace('_', ' ')} {value}" for key, value in sorted(rest.items())} | nodes


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
    """Images/s, the median run's."""
    return float(np.median([1 / np.median(run.seconds_per_image) for run in one.runs]))


def faster(one: Group, other: Group) -> Interval:
    """How many times as fast as the other it is, in images/s."""
    top = medians([run.seconds_per_image for run in other.runs], seed=1)
    bottom = medians([run.seconds_per_image for run in one.runs], seed=2)
    return interval(speed(one) / speed(other), top / bottom)


def certain(one: Group) -> bool:
    """Whether its runs have steps enough to know their speed."""
    return all(len(run.steady) >= ENOUGH_STEPS for run in one.runs)


def told(ratio: Interval, *groups: Group) -> bool | None:
    """Whether the first is really faster (or slower: False), by as much as matters. None where that cannot be told.

    Of few runs nobody knows how much runs differ, so that a small difference between them proves nothing.
    """
    few = min(len(one.runs) for one in groups) < ENOUGH_RUNS
    least = BETWEEN_RUNS if few else MATTERS
    if not all(map(certain, groups)) or not ratio.excludes(1.0) or abs(ratio.value - 1) < least:
        return None
    return ratio.value > 1

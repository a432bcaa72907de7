"""Settings that differ in their number of workers alone, and whether one setting is really faster than another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from paceline.analysis.compare import BETWEEN_RUNS
from paceline.analysis.scaling import Group, along_workers, certain, size
from paceline.analysis.setting import ALWAYS, MACHINE, NETWORK, Setting, shared
from paceline.analysis.statistics import Interval, ratio
from paceline.options import LEARNING, PROBLEM
from paceline.strategies.base import Strategy

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

    @cached_property
    def setting(self) -> Setting:
        """What all of its settings have, but their workers; the batch is that of each worker, or of all."""
        found = shared([one.setting for one in self.groups.values()])
        batch = f"{'' if self.kind == 'weak' else 'global '}batch {round(size(self.first, self.kind), 2):,}"
        facts = {name: fact for name, fact in found.facts.items() if name not in ("workers", "global_batch")}
        found = Setting(facts).saying("batch_size", batch)
        return Setting({**found.facts, "batch_size": replace(found.facts["batch_size"], minor=True)})

    def label(self, among: Iterable[Line], without: Collection[str] = (), always: Collection[str] = ALWAYS) -> str:
        """What it is called among these."""
        return self.setting.label([each.setting for each in among], always=always, without=without)

    @property
    def family(self) -> str:
        """What lines must have in common so that their strategies can be compared."""
        kept = self.first.setting.key((PROBLEM, LEARNING, MACHINE, NETWORK), without=("lab",))
        return repr((kept, self.kind, size(self.first, self.kind)))


def lines(groups: Iterable[Group], kind: str) -> list[Line]:
    """Weak or strong lines; those of one number of workers only are weak ones."""
    made = [Line(kind, rows) for rows in along_workers(groups, kind)]
    return made if kind == "weak" else [line for line in made if len(line.groups) > 1]


def all_lines(groups: Sequence[Group]) -> list[Line]:
    """Weak lines and strong ones; a setting that has a line to itself is left out if it is part of another."""
    strong, weak = lines(groups, "strong"), lines(groups, "weak")
    used = [one for line in strong for one in line.groups.values()]
    return [line for line in weak if len(line.groups) > 1 or not any(line.first is one for one in used)] + strong


def speed(one: Group) -> float:
    """Images/s, the middle run's."""
    return one.speed


def faster(one: Group, other: Group) -> Interval:
    """How many times as fast as the other it is, in images/s."""
    return ratio(other.series, one.series)


def is_faster(ratio: Interval, *groups: Group) -> bool | None:
    """Whether the first is really faster (or slower: False), by as much as matters. None where that cannot be told.

    Of few runs nobody knows how much runs differ, so that a small difference between them proves nothing.
    """
    few = min(len(one.runs) for one in groups) < ENOUGH_RUNS
    least = BETWEEN_RUNS if few else MATTERS
    if not all(map(certain, groups)) or not ratio.excludes(1.0) or abs(ratio.value - 1) < least:
        return None
    return ratio.value > 1

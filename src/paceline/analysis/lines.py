"""Lines: settings that differ only in their number of workers; whether one setting is significantly faster."""

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
MATTERS = 0.03  # of speed: a smaller difference is ignored even if it is significant


@dataclass(frozen=True)
class Line:
    """Settings by increasing workers. Weak: with a fixed batch per worker; strong: with a fixed global batch."""

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
        """What its settings have in common except workers; the batch is that of each worker, or of all."""
        found = shared([one.setting for one in self.groups.values()])
        batch = f"{'' if self.kind == 'weak' else 'global '}batch {round(size(self.first, self.kind), 2):,}"
        facts = {name: fact for name, fact in found.facts.items() if name not in ("workers", "global_batch")}
        found = Setting(facts).saying("batch_size", batch)
        return Setting({**found.facts, "batch_size": replace(found.facts["batch_size"], minor=True)})

    def label(self, among: Iterable[Line], without: Collection[str] = (), always: Collection[str] = ALWAYS) -> str:
        """Its name among these lines."""
        return self.setting.label([each.setting for each in among], always=always, without=without)

    @property
    def family(self) -> str:
        """What lines must have in common for a comparison of their strategies."""
        kept = self.first.setting.key((PROBLEM, LEARNING, MACHINE, NETWORK), without=("lab",))
        return repr((kept, self.kind, size(self.first, self.kind)))


def lines(groups: Iterable[Group], kind: str) -> list[Line]:
    """Weak or strong lines; those with one number of workers are weak."""
    made = [Line(kind, rows) for rows in along_workers(groups, kind)]
    return made if kind == "weak" else [line for line in made if len(line.groups) > 1]


def all_lines(groups: Sequence[Group]) -> list[Line]:
    """Weak and strong lines, without lines of one setting that is part of another line."""
    strong, weak = lines(groups, "strong"), lines(groups, "weak")
    used = [one for line in strong for one in line.groups.values()]
    return [line for line in weak if len(line.groups) > 1 or not any(line.first is one for one in used)] + strong


def speed(one: Group) -> float:
    """Samples/s of the middle run."""
    return one.speed


def faster(one: Group, other: Group) -> Interval:
    """The ratio of the speeds of the first and the second, in samples/s."""
    return ratio(other.series, one.series)


def is_faster(ratio: Interval, *groups: Group) -> bool | None:
    """Whether the first is significantly faster (True) or slower (False); None if neither.

    With few runs their variation is not known, so a small difference is not significant.
    """
    few = min(len(one.runs) for one in groups) < ENOUGH_RUNS
    least = BETWEEN_RUNS if few else MATTERS
    if not all(map(certain, groups)) or not ratio.excludes(1.0) or abs(ratio.value - 1) < least:
        return None
    return ratio.value > 1

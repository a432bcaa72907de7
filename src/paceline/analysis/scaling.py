"""Repeats of a setting; speedup and efficiency by workers, with a fixed global batch (strong) or a fixed batch per
worker (weak).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from paceline.analysis.runs import Run
from paceline.analysis.setting import BY_WORKERS, MACHINE, Setting, setting_of
from paceline.analysis.statistics import ENOUGH_SAMPLES, Interval, Series, amdahl, gustafson, median, middle, ratio
from paceline.options import LENGTH, PROBLEM
from paceline.strategies.base import Strategy

PARTS = ("stages", "tensor")  # options that divide a replica


@dataclass(frozen=True)
class Group:
    """Repeats of one setting."""

    runs: tuple[Run, ...]

    @cached_property
    def setting(self) -> Setting:
        return setting_of(self.first)

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def workers(self) -> int:
        return self.first.summary.workers

    @property
    def ranks(self) -> int:
        return self.workers + self.first.summary.servers

    @property
    def strategy(self) -> str:
        return self.first.summary.strategy

    @property
    def method(self) -> Strategy:
        return self.first.method

    @property
    def series(self) -> list[Series]:
        """Seconds per sample of the steps of each run; all speeds are computed from it."""
        return [run.seconds_per_sample for run in self.runs]

    @cached_property
    def speed(self) -> float:
        """Samples/s of the middle run: the value of `samples_per_second`."""
        return 1 / middle(self.series)

    @property
    def too_short(self) -> bool:
        """Whether its runs together have too few independent steps to be ranked."""
        return sum(run.effective_samples for run in self.runs) < ENOUGH_SAMPLES

    @property
    def crowded(self) -> bool:
        """Whether its workers were oversubscribed."""
        return any(run.crowded for run in self.runs)

    def label(self, among: Iterable[Group]) -> str:
        """The name of its setting among these."""
        return self.setting.label([each.setting for each in among])

    def step(self) -> Interval:
        """Seconds of one update."""
        return median([run.step_seconds for run in self.runs])

    def samples_per_second(self) -> Interval:
        found = median(self.series)
        return Interval(1 / found.value, 1 / found.high, 1 / found.low)


def disturbed(one: Group) -> list[str]:
    """The reason for each disturbed run."""
    return [run.disturbed for run in one.runs if run.disturbed]


def certain(one: Group) -> bool:
    """Whether its speed can be ranked: its runs are long enough and were not disturbed."""
    return not one.too_short and not disturbed(one)


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs grouped by setting, in the order of their first runs."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(setting_of(run).key(), []).append(run)
    return [Group(tuple(same)) for same in found.values()]


@dataclass(frozen=True)
class Point:
    """One number of workers: its speedup over one worker, its efficiency, and its setting.

    `certain` means that both speeds can be ranked, its own and that of the baseline.
    """

    group: Group
    workers: int
    speedup: Interval
    efficiency: Interval
    certain: bool


@dataclass(frozen=True)
class Curve:
    """The speedups of a strategy over one worker. `serial` is the serial fraction, fitted to the certain points."""

    kind: str  # strong or weak
    batch: float  # of each worker, or of all
    baseline: Group
    points: tuple[Point, ...]
    serial: float | None


def size(one: Group, kind: str) -> float:
    """The batch that is constant along a line: of each worker, or of all. Workers of a replica share its batch."""
    s = one.first.summary
    if kind != "weak":
        return s.global_batch
    if not one.method.part:
        return s.batch_size
    return s.global_batch // s.workers if s.global_batch % s.workers == 0 else s.global_batch / s.workers


def along_workers(groups: Iterable[Group], kind: str) -> list[dict[int, Group]]:
    """Settings that differ only in their number of workers, by increasing workers. The scaling of workers that update
    with their own batch is weak, as there is no global batch to divide.

    If the same number of workers ran with several numbers of nodes or threads, each is a separate line. Of settings
    that differ only in length, the longest counts. Workers of a partitioned model are more replicas with the same
    number of parts, or one replica with more parts.
    """
    found: dict[str, list[Group]] = {}
    for one in groups:
        if kind == "strong" and one.method.updates_by_worker:
            continue
        for but in ((), PARTS) if one.method.part and one.first.replicas == 1 else ((),):
            length = one.setting.only(LENGTH).facts
            key = repr((one.setting.key(without=(*BY_WORKERS, *length, *but)), but, size(one, kind)))
            found.setdefault(key, []).append(one)
    made = list[dict[int, Group]]()
    for members in _whole(list(found.values())):
        ordered = sorted(members, key=lambda one: (one.workers, -sum(len(run.steady) for run in one.runs)))
        apart: dict[tuple[Any, ...], dict[int, Group]] = {}
        for one in ordered:
            apart.setdefault(_varied(one, ordered), {}).setdefault(one.workers, one)
        made += apart.values()
    return made


def _whole(lines: Sequence[list[Group]]) -> list[list[Group]]:
    """Without lines that are part of another line, or equal to it."""
    kinds = [frozenset(map(id, members)) for members in lines]
    return [members for i, members in enumerate(lines)
            if not any(kinds[i] < other or (kinds[i] == other and j < i) for j, other in enumerate(kinds))]  # fmt: skip


def _varied(one: Group, among: Sequence[Group]) -> tuple[Any, ...]:
    """Its nodes and threads, each if several of them ran with the same number of workers."""
    workers, found = {each.workers for each in among}, list[Any]()
    for name in ("nodes", "threads"):
        several = len({(each.workers, each.setting.get(name)) for each in among}) > len(workers)
        found.append(one.setting.get(name) if several else None)
    return tuple(found)


def family(one: Group) -> str:
    """What a setting has in common with those that differ only in division of work, learning, length and links."""
    return one.setting.key((PROBLEM, MACHINE))


def curves(groups: Sequence[Group], kind: str) -> list[Curve]:
    """All strong or weak curves of settings that have a baseline."""
    found = []
    alone = [one for one in groups if one.workers == 1 and not one.first.summary.servers]
    for members in along_workers([one for one in groups if one.ranks > 1], kind):
        one = next(iter(members.values()))
        fitting = [each for each in alone if (family(each), size(each, kind)) == (family(one), size(one, kind))
                   and each.setting.get("faults") in (None, one.setting.get("faults"))]  # fmt: skip
        if not fitting:
            continue
        # With the same number of threads per worker; if no run of one worker has it, the fastest.
        same = [each for each in fitting if each.setting.get("threads") == one.setting.get("threads")]
        baseline = max(same or fitting, key=lambda each: each.speed)
        points = [_point(baseline, each) for each in members.values()]
        found.append(Curve(kind, size(one, kind), baseline, tuple(points), serial_part(kind, points)))
    return found


def _point(baseline: Group, one: Group) -> Point:
    speedup, n = ratio(baseline.series, one.series), one.workers
    efficiency = Interval(speedup.value / n, speedup.low / n, speedup.high / n)
    return Point(one, n, speedup, efficiency, certain(one) and certain(baseline))


def serial_part(kind: str, points: Sequence[Point]) -> float | None:
    known = [point for point in points if point.certain]
    workers, speedups = [point.workers for point in known], [point.speedup.value for point in known]
    if kind == "weak":
        return gustafson(workers, speedups)
    return amdahl([1, *workers], [1.0, *(1 / speedup for speedup in speedups)])

"""Lines of a chart: settings that differ only in their workers, or only in their batch size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from paceline.analysis.scaling import Curve, Group, Point, serial_part
from paceline.analysis.setting import Setting, distinguishing, shared
from paceline.analysis.study import Study
from paceline.options import LENGTH
from paceline.report.series import MOST_LINES, natural

Thing = TypeVar("Thing")
SIZE: dict[str, Callable[[Group], int]] = {
    "workers": lambda one: one.workers,
    "batch_size": lambda one: one.first.summary.global_batch,
}

# Facets that differ between lines with different numbers of servers.
BY_SERVERS = ("servers", "workers", "nodes", "lab")
BATCH = ("batch_size", "global_batch")

AXES = {"workers": "workers", "batch_size": "batch size, samples per update"}


@dataclass(frozen=True)
class Strand:
    """Settings in the order of the x axis. `points` are those with a speedup; a setting before them is the baseline."""

    setting: Setting  # what is the same in all of them
    groups: tuple[Group, ...]
    points: tuple[Point, ...] = ()
    serial: float | None = None

    @property
    def baseline(self) -> Group | None:
        return None if self.points and self.points[0].group is self.groups[0] else self.groups[0]


def words(strand: Strand) -> Setting:
    return strand.setting


def of_curves(found: Iterable[Curve]) -> list[Strand]:
    """One line per curve, or several if a number of workers ran in more than one way, such as on 1 and 2 nodes."""
    strands = []
    for curve in found:
        batch = f"batch {curve.batch:,} {'in all' if curve.kind == 'strong' else 'each'}"
        parts = apart(curve.points, lambda point: point.group)
        for points in parts:
            if points[-1].workers == 1:
                continue
            same = shared([point.group.setting for point in points]).saying("batch_size", batch)
            groups = tuple(point.group for point in points)
            if points[0].workers > 1:
                groups = (curve.baseline, *groups)
            serial = curve.serial if len(parts) == 1 else serial_part(curve.kind, points)
            strands.append(Strand(same, groups, tuple(points), serial))
    if all(len(strand.points) == 1 for strand in strands):
        return strands
    # Next to longer lines, a single point far from the baseline is drawn without a line to it.
    return [strand if len(strand.points) > 1 or strand.points[0].workers == 2 else
            replace(strand, groups=(strand.points[0].group,), serial=None) for strand in strands]  # fmt: skip


def apart(things: Sequence[Thing], group: Callable[[Thing], Group], along: str = "workers") -> list[list[Thing]]:
    """Divides things so that each part has every number of workers (or other value of `along`) at most once."""
    same: dict[str, list[Setting]] = {}
    for thing in things:
        each = group(thing).setting
        same.setdefault(each.text(along), []).append(each)
    keys = list(dict.fromkeys(key for many in same.values() for key in distinguishing(many)))
    found: dict[str, list[Thing]] = {}
    for thing in things:
        found.setdefault(group(thing).setting.words(keys), []).append(thing)
    return list(found.values())


def by_workers(study: Study) -> list[Strand]:
    """Lines along workers that contain every setting: of weak scaling, else of strong scaling, else of similar ones."""
    strands, seen = list[Strand](), set[int]()
    for found in (study.weak, study.strong):
        for strand in of_curves(found):
            if any(id(point.group) not in seen for point in strand.points):
                strands.append(strand)
        seen |= {id(one) for strand in strands for one in strand.groups}
    others = alike([one for one in study.groups if id(one) not in seen], "workers", ("workers", "threads"))
    return strands + [
        replace(one, setting=one.setting.saying("batch_size", _batch(one.groups[0], study))) for one in others
    ]


def _batch(one: Group, study: Study) -> str:
    """The batch as the curves of the study name it: of all workers, or of each."""
    if bool(study.strong) == bool(study.weak):
        return one.setting.text("batch_size")
    s = one.first.summary
    return f"batch {s.global_batch:,} in all" if study.strong else f"batch {s.batch_size:,} each"


def by_batch(study: Study) -> list[Strand]:
    """Lines of settings that differ only in their batch size."""
    return [strand for strand in alike(study.groups, "batch_size", BATCH) if len(strand.groups) > 1]


def timed_by_batch(study: Study) -> list[Strand]:
    """The same for runs of any length, as speed does not depend on it."""
    strands = alike(_longest(study.groups), "batch_size", BATCH, timed=True)
    return [strand for strand in strands if len(strand.groups) > 1]


def _longest(groups: Iterable[Group]) -> list[Group]:
    """Of settings that differ only in length, the one with the most steps."""
    found: dict[str, Group] = {}
    for one in groups:
        same = one.setting.key(without=one.setting.only(LENGTH).facts)
        if same not in found or _steps(one) > _steps(found[same]):
            found[same] = one
    return list(found.values())


def _steps(one: Group) -> int:
    return sum(len(run.steady) for run in one.runs)


def side_by_side(study: Study) -> tuple[str, list[Strand]]:
    """Whether settings are compared along workers or along batch sizes, and the lines along it.

    Along batch sizes if workers do not differ, or if that needs fewer lines.
    """
    strands, by_size = by_workers(study), timed_by_batch(study)
    all_of_them = len(settings(by_size)) == len(_longest(study.groups))
    if any(len(strand.groups) > 1 for strand in strands) and not (all_of_them and len(by_size) < len(strands)):
        return "workers", few_servers(strands)
    return ("batch_size", by_size) if by_size else ("workers", strands)


def places(strands: Iterable[Strand], along: str) -> dict[int, str]:
    """The label of each setting on an axis along workers or batch sizes, in order."""
    ordered = sorted(settings(strands), key=SIZE[along])
    return {id(one): f"{SIZE[along](one):,}" for one in ordered}


def alike(groups: Iterable[Group], along: str, but: Sequence[str], *, timed: bool = False) -> list[Strand]:
    """Lines along one option, of settings that differ only in the options `but`, and in length if `timed`."""
    return [
        Strand(shared([one.setting for one in part]), tuple(sorted(part, key=SIZE[along])))
        for many in families(groups, but, timed=timed)
        for part in apart(many, lambda one: one, along)
    ]


def families(groups: Iterable[Group], but: Sequence[str], *, timed: bool = False) -> list[list[Group]]:
    """Settings that differ only in the options `but` and the number of nodes."""
    found: dict[str, list[Group]] = {}
    for one in groups:
        length = one.setting.only(LENGTH).facts if timed else ()
        found.setdefault(one.setting.key(without=(*but, *length, "nodes", "lab")), []).append(one)
    return list(found.values())


def few(strands: Sequence[Strand]) -> list[Strand]:
    """All lines, or with many lines only those with the fewest and the most servers."""
    return few_servers(strands) if len(strands) > MOST_LINES else list(strands)


def few_servers(strands: Sequence[Strand]) -> list[Strand]:
    """Of lines that differ only in servers, those with the fewest and the most."""
    kept = set()
    for many in by_servers(strands):
        ends = {many[0].setting.text("servers"), many[-1].setting.text("servers")}
        kept |= {id(strand) for strand in many if strand.setting.text("servers") in ends}
    return [strand for strand in strands if id(strand) in kept]


def by_servers(strands: Iterable[Strand]) -> list[list[Strand]]:
    """Lines that differ only in servers, the fewest first; a line without servers is alone."""
    found: dict[str, list[Strand]] = {}
    for strand in strands:
        served = bool(strand.setting.text("servers"))
        same = strand.setting.key(without=(*BY_SERVERS, *strand.setting.only(LENGTH).facts))
        found.setdefault(same if served else f"{id(strand)}", []).append(strand)
    return [sorted(many, key=lambda strand: natural(strand.setting.text("servers"))) for many in found.values()]


def settings(strands: Iterable[Strand]) -> list[Group]:
    """The settings of these lines, each once."""
    return list({id(one): one for strand in strands for one in strand.groups}.values())

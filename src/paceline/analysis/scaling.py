"""Speedup and efficiency over workers: of a fixed problem (strong) and of fixed work for each worker (weak)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.analysis.runs import Run
from paceline.analysis.statistics import Interval, amdahl, gustafson, interval, median, medians

# What makes two runs repeats of each other is all of the spec but these.
NOT_THE_SETTING = ("seed", "name", "output_dir", "timeout", "log_every", "check_replicas")
# What may differ between a run and the run of one worker that it is compared with.
BY_DIVISION = ("strategy", "workers", "servers", "batch_size", "transport", "overlap", "bucket_mb", "read",
               "staleness", "staleness_lr", "worker_timeout", "snapshot_every", "restarts", "encrypt",
               "threads")  # fmt: skip
# How long a run is makes no difference to its speed.
LENGTH = ("steps", "epochs", "test")
# What `label` says in its own way, or does not say.
NAMED = (*BY_DIVISION, "model", "data", "compute", "lab", "normalize", "steps", "test")
# What tells settings apart only where these are the same.
OF_STRATEGY = ("servers", "transport", "read", "threads", "links")
ONLY_WITHIN: dict[str, tuple[str, ...]] = dict.fromkeys(OF_STRATEGY, ("strategy",))
ONLY_WITHIN["nodes"] = ("strategy", "workers", "servers", "model", "compute")


@dataclass(frozen=True)
class Group:
    """Repeats of one setting."""

    setting: dict[str, Any]
    runs: tuple[Run, ...]

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def workers(self) -> int:
        return self.first.summary.workers

    @property
    def strategy(self) -> str:
        return self.first.summary.strategy

    def step(self) -> Interval:
        """Seconds of one update."""
        return median([run.step_seconds for run in self.runs])

    def images_per_second(self) -> Interval:
        values = [1 / np.median(run.seconds_per_image) for run in self.runs]
        return interval(float(np.median(values)), 1 / medians([run.seconds_per_image for run in self.runs]))


def nodes_of(run: Run) -> int:
    """How many machines, of the lab or real."""
    return max(1, len({row["host"] for row in run.environment.get("ranks", [])}))


def label(one: Group, among: Sequence[Group]) -> str:
    """A short name of a setting: its strategy and workers, and what else tells it from these."""
    mine, others = _words(one), [_words(each) for each in among]
    shown = []
    for name, word in mine.items():
        alike = [o for o in others if all(o[key] == mine[key] for key in ONLY_WITHIN.get(name, ()))]
        if word and (name in ("strategy", "workers") or any(o.get(name) != word for o in alike)):
            shown.append(word)
    return ", ".join(shown)


def _words(one: Group) -> dict[str, str]:
    """What a setting is, by what it is about."""
    s, nodes = one.first.summary, nodes_of(one.first)

    def count(number: int, what: str) -> str:
        return f"{number} {what}{'' if number == 1 else 's'}" if number else ""

    links = {(node["up"], node["down"]) for node in one.setting["lab"]} if s.workers + s.servers > 1 else set()
    words = {"model": s.model, "data": s.data, "strategy": s.strategy, "workers": count(s.workers, "worker"),
             "servers": count(s.servers, "server"), "nodes": count(nodes, "node"), "batch": f"batch {s.batch_size}",
             "threads": count(one.setting.get("threads") or 0, "thread"), "transport": s.transport,
             "read": f"read {one.setting.get('read', 'own')}",
             "links": " and ".join(f"{up / 1e6:g}/{down / 1e6:g} Mbit/s" for up, down in sorted(links)),
             "compute": s.compute}  # fmt: skip
    rest = {key: value for key, value in one.setting.items() if key not in NAMED}
    return words | {key: f"{key.replace('_', ' ')} {value}" for key, value in sorted(rest.items())}


def setting_of(run: Run) -> dict[str, Any]:
    """The spec, and the lab that it ran in."""
    lab = run.environment.get("lab") or {}
    links = [{key: node.get(key) for key in ("up", "down", "cpu", "speed", "rack")} for node in lab.get("nodes", [])]
    return {key: value for key, value in run.spec.items() if key not in NOT_THE_SETTING} | {"lab": links}


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs by their setting, in the order they come."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(repr((sorted(setting_of(run).items()), nodes_of(run))), []).append(run)
    return [Group(setting_of(same[0]), tuple(same)) for same in found.values()]


@dataclass(frozen=True)
class Point:
    """One number of workers: how much faster than one, what part of the ideal that is, and what it stands on."""

    group: Group
    workers: int
    speedup: Interval
    efficiency: Interval


@dataclass(frozen=True)
class Curve:
    """A strategy over its numbers of workers, beside one worker. `serial` is the part that the fitted law leaves."""

    kind: str  # strong or weak
    label: dict[str, Any]
    baseline: Group
    points: tuple[Point, ...]
    serial: float | None


def _family(one: Group) -> str:
    """Settings that differ only in how the work is divided, how long it goes on, and in links."""
    kept = {key: value for key, value in one.setting.items() if key not in (*BY_DIVISION, *LENGTH, "lab")}
    devices = {(node["cpu"], node["speed"]) for node in one.setting["lab"]}
    return repr(sorted(kept.items())) + repr(sorted(devices, key=repr))


def _links(one: Group) -> str:
    return repr([[node[key] for key in ("up", "down", "rack")] for node in one.setting["lab"]][:1])


def curves(groups: Sequence[Group], kind: str) -> list[Curve]:
    """All strong or weak scaling that the groups have a baseline for."""
    size: Callable[[Group], int] = {
        "strong": lambda one: one.first.summary.global_batch,
        "weak": lambda one: one.first.summary.batch_size,
    }[kind]
    found = []
    alone = [one for one in groups if one.workers == 1 and not one.first.summary.servers]
    several = [one for one in groups if one.workers > 1 or one.first.summary.servers]
    for (family, batch, strategy, servers, transport, _, nodes), members in _lines(several, size).items():
        fitting = [one for one in alone if (_family(one), size(one)) == (family, batch)]
        if not fitting:
            continue
        # With as many threads a worker; if one worker had other numbers of them only, the fastest is the honest rival.
        same = [one for one in fitting if one.setting.get("threads") == members[0].setting.get("threads")]
        baseline = max(same or fitting, key=lambda one: one.images_per_second().value)
        points = [_point(baseline, one) for one in sorted(members, key=lambda one: one.workers)]
        label = {"strategy": strategy, "servers": servers, "transport": transport, "nodes": nodes, "batch": batch,
                 "model": baseline.first.summary.model, "compute": baseline.first.summary.compute}  # fmt: skip
        found.append(Curve(kind, label, baseline, tuple(points), _serial(kind, points)))
    return found


def _lines(groups: Sequence[Group], size: Callable[[Group], int]) -> dict[tuple[Any, ...], list[Group]]:
    """Settings that differ in their number of workers only, and in that of nodes, unless that was varied as well."""
    found: dict[tuple[Any, ...], list[Group]] = {}
    for one in groups:
        s = one.first.summary
        way = (_links(one), one.setting.get("read"))
        key = (_family(one), size(one), one.strategy, s.servers, s.transport, way)
        found.setdefault(key, []).append(one)
    apart: dict[tuple[Any, ...], list[Group]] = {}
    for key, members in found.items():
        varied = len({one.workers for one in members}) < len({(one.workers, nodes_of(one.first)) for one in members})
        for one in members:
            apart.setdefault((*key, nodes_of(one.first) if varied else None), []).append(one)
    return apart


def _point(baseline: Group, one: Group) -> Point:
    top = medians([run.seconds_per_image for run in baseline.runs], seed=1)
    bottom = medians([run.seconds_per_image for run in one.runs], seed=2)
    value = baseline.images_per_second().value
    speedup = interval(one.images_per_second().value / value, top / bottom)
    n = one.workers
    return Point(one, n, speedup, Interval(speedup.value / n, speedup.low / n, speedup.high / n))


def _serial(kind: str, points: Sequence[Point]) -> float | None:
    workers, speedups = [point.workers for point in points], [point.speedup.value for point in points]
    if kind == "weak":
        return gustafson(workers, speedups)
    return amdahl([1, *workers], [1.0, *(1 / speedup for speedup in speedups)])

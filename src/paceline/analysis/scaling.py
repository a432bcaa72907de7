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
BY_DIVISION = ("strategy", "workers", "servers", "batch_size", "transport", "overlap", "bucket_mb", "staleness",
               "staleness_lr", "worker_timeout", "snapshot_every", "restarts", "encrypt", "threads")  # fmt: skip


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


def setting_of(run: Run) -> dict[str, Any]:
    """The spec, and the lab that it ran in."""
    lab = run.environment.get("lab") or {}
    links = [{key: node.get(key) for key in ("up", "down", "cpu", "speed", "rack")} for node in lab.get("nodes", [])]
    return {key: value for key, value in run.spec.items() if key not in NOT_THE_SETTING} | {"lab": links}


def group(runs: Iterable[Run]) -> list[Group]:
    """Runs by their setting, in the order they come."""
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(repr(sorted(setting_of(run).items())), []).append(run)
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
    """Settings that differ only in how the work is divided, and in the number of the lab's nodes."""
    kept = {key: value for key, value in one.setting.items() if key not in BY_DIVISION}
    links = kept.pop("lab")
    return repr(sorted(kept.items())) + repr(links[:1])


def curves(groups: Sequence[Group], kind: str) -> list[Curve]:
    """All strong or weak scaling that the groups have a baseline for."""
    size: Callable[[Group], int] = {
        "strong": lambda one: one.first.summary.global_batch,
        "weak": lambda one: one.first.summary.batch_size,
    }[kind]
    found = []
    baselines = {(_family(one), size(one)): one for one in groups if one.workers == 1 and not one.first.summary.servers}
    several = [one for one in groups if one.workers > 1 or one.first.summary.servers]
    lines: dict[tuple[Any, ...], list[Group]] = {}
    for one in several:
        key = (_family(one), size(one), one.strategy, one.first.summary.servers, one.first.summary.transport)
        lines.setdefault(key, []).append(one)
    for (family, batch, strategy, servers, transport), members in lines.items():
        baseline = baselines.get((family, batch))
        if baseline is None:
            continue
        points = [_point(baseline, one) for one in sorted(members, key=lambda one: one.workers)]
        label = {"strategy": strategy, "servers": servers, "transport": transport, "batch": batch,
                 "model": baseline.first.summary.model, "compute": baseline.first.summary.compute}  # fmt: skip
        found.append(Curve(kind, label, baseline, tuple(points), _serial(kind, points)))
    return found


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

"""What only runs with parameter servers record; no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from paceline.run.records import Line
from paceline.strict_json import Count, Ranks, Seconds


@dataclass
class Figures:
    """In the summary, under the strategy's name.

    `staleness` says how many gradients had missed how many updates. `lost_workers` are those that were given up, after
    how many updates and why, and after how many they were back; `returns` are returns to snapshots. `gradients` (that
    were applied) and `wait_seconds` have a value for each rank.
    """

    security: str | None = None
    staleness: dict[str, int] | None = None
    staleness_mean: float | None = None
    staleness_max: int | None = None
    lost_workers: list[dict[str, Any]] = field(default_factory=list)
    returns: list[dict[str, Any]] = field(default_factory=list)
    dropped_messages: dict[str, int] = field(default_factory=dict)
    gradients: list[int] = field(default_factory=list)
    wait_seconds: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Joined(Line):
    """A worker has joined the run, or joined it again, after this many updates."""

    kind: ClassVar[str] = "joined"
    rank: Ranks
    time: Seconds
    update: Count


@dataclass(frozen=True)
class Lost(Line):
    """A worker was given up, after this many updates; others compute the samples that it had."""

    kind: ClassVar[str] = "lost"
    rank: Ranks
    why: str
    time: Seconds
    update: Count
    samples: Count


@dataclass(frozen=True)
class WentBack(Line):
    """Training went back to the snapshot after update `number`."""

    kind: ClassVar[str] = "went back"
    number: Count
    why: str
    time: Seconds


LINES: tuple[type[Line], ...] = (Joined, Lost, WentBack)

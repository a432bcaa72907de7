"""Counts of a run's updates: losses by epoch, gradients by worker, and their staleness."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from paceline.tasks.base import NOTHING, Sums


@dataclass
class Result:
    """Sums over `count` samples."""

    sums: Sums = NOTHING
    count: int = 0
    skipped: int = 0  # samples of updates that were not made

    def add(self, sums: Sums, count: int) -> None:
        self.sums, self.count = self.sums.plus(sums), self.count + count


@dataclass
class Tally:
    """Counts each gradient once, when it is accepted, and each update once, when it is made."""

    updates: int = 0
    epochs: dict[int, Result] = field(default_factory=dict)
    gradients: Counter[int] = field(default_factory=Counter)  # by worker
    staleness: Counter[int] = field(default_factory=Counter)
    open: dict[int, Result] = field(default_factory=dict)  # of updates that have not been made
    pending: dict[int, list[tuple[int, int]]] = field(default_factory=dict)  # likewise: workers and staleness

    def gradient(self, rank: int, update: int, missed: int, sums: Sums, count: int) -> None:
        self.pending.setdefault(update, []).append((rank, missed))
        self.open.setdefault(update, Result()).add(sums, count)

    def made(self, update: int, epoch: int, *, finite: bool = True) -> Result:
        """Count an update that was made, or skipped because a gradient is not finite; return its sums."""
        result = self.open.pop(update)
        for rank, missed in self.pending.pop(update):
            self.gradients[rank] += 1
            self.staleness[missed] += 1
        self.updates += 1
        total = self.epochs.setdefault(epoch, Result())
        if finite:
            total.add(result.sums, result.count)
        else:
            total.skipped += result.count
        return result

    def state(self) -> dict[str, Any]:
        """The state for a checkpoint; no update is open then."""
        return {
            "updates": self.updates,
            "epochs": {epoch: asdict(result) for epoch, result in self.epochs.items()},
            "gradients": dict(self.gradients),
            "staleness": dict(self.staleness),
        }

    @classmethod
    def of(cls, state: dict[str, Any]) -> Tally:
        """Restore from a state that may have been through JSON, whose keys are strings."""
        return cls(
            state["updates"],
            {
                int(epoch): Result(Sums(*result["sums"]), result["count"], result["skipped"])
                for epoch, result in state["epochs"].items()
            },
            Counter({int(rank): count for rank, count in state["gradients"].items()}),
            Counter({int(missed): count for missed, count in state["staleness"].items()}),
        )

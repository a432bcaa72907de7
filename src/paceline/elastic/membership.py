"""Who takes part in an elastic training, and whose state counts: decisions without sockets, clock or torch.

A registrar makes *generations* of members. A communicator is made for one generation, and never repaired. When a
member ends, the registrar makes a generation of the others at once; when a worker is ready to join, it makes one for
which the members complete their step first.

The members of a new generation compare their progress. All ranks give their gradients to a step before any rank can
make its update, so two living members are at most one step apart. Those that are behind, and those that are new, take
the state of one that is furthest; if nobody has made the update of a step, all repeat it, divided among the members.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Generation:
    """The workers that train together from now on, in the order of their ranks: the longest-serving one is rank 0."""

    number: int
    members: tuple[int, ...]
    at_once: bool  # a member has ended, and the step cannot be completed; otherwise members complete it first
    fresh: bool  # nobody has trained yet: every worker has the state that training starts from
    why: str
    last: bool = False  # there were too few workers for too long: save, and stop


class Reached(NamedTuple):
    """How far a member has come; of two, the larger one is further. `UNHEALTHY` has no state of the training.

    `ending`: all updates are made, and the best weights are loaded.
    """

    steps: int
    validations: int = 0
    epochs: int = 0
    ending: int = 0


UNHEALTHY = Reached(-1)


def choose_source(progress: Sequence[Reached]) -> int | None:
    """The rank whose state all that are not as far must take; None if no member has the state of the training."""
    furthest = max(progress)
    return None if furthest == UNHEALTHY else progress.index(furthest)


class Registrar:
    """The only writer of generations. It is told of workers; `due` returns the next generation when it is time."""

    def __init__(self, workers: Collection[int], least: int, number: int = 0) -> None:
        """Nothing begins before all of `workers` are ready. Generations are numbered from `number` + 1 on."""
        self.number = number
        self._expected, self._least = set(workers), least
        self._ready = set[int]()  # wait to enter
        self._members = list[int]()  # of the newest generation, as far as they live
        self._entered = set[int]()  # members that train in it
        self._healthy = set[int]()  # members that have the state of the training, of this generation or an earlier one
        self._begun, self._patient = False, True
        self._lost = list[str]()  # why members of the newest generation cannot go on together

    @property
    def members(self) -> tuple[int, ...]:
        return tuple(self._members)

    @property
    def healthy(self) -> frozenset[int]:
        """Members that have the state of the training."""
        return frozenset(self._healthy)

    @property
    def training(self) -> frozenset[int]:
        """Members that have entered the newest generation."""
        return frozenset(self._entered)

    @property
    def begun(self) -> bool:
        return self._begun

    @property
    def settled(self) -> bool:
        """Whether all members of the newest generation train."""
        return self._begun and not self._lost and self._entered == set(self._members)

    @property
    def short(self) -> bool:
        """Whether members wait because there are too few."""
        return bool(self._lost) and not self.lost_all and len({*self._members} | self._ready) < self._least

    @property
    def lost_all(self) -> bool:
        """Whether all that had the state of the training have ended."""
        return self._begun and not self._healthy

    def ready(self, worker: int) -> None:
        """A worker has all that it needs, but for the state of the training."""
        self._ready.add(worker)

    def entered(self, worker: int, number: int) -> None:
        """A member has the state of the training, and trains in this generation."""
        if number == self.number and worker in self._members:
            self._entered.add(worker)
            self._healthy.add(worker)

    def ended(self, worker: int, how: str) -> None:
        """The process of a worker has ended."""
        for workers in (self._ready, self._entered, self._healthy):
            workers.discard(worker)
        if worker in self._members:
            self._members.remove(worker)
            self._lost.append(f"worker {worker}: {how}")

    def repeat(self, number: int, why: str) -> None:
        """Members have lost each other in this generation, although none has ended: they connect again."""
        if number == self.number and not self._lost:
            self._lost.append(why)

    def give_up(self) -> None:
        """There are too few workers for too long: stop with those that are left."""
        self._patient = False

    def due(self) -> Generation | None:
        if not self._begun:
            return self._make("the start") if self._ready >= self._expected else None
        together = {*self._members} | self._ready
        if self.lost_all or not self._members:
            return None
        if self._lost and (len(together) >= self._least or not self._patient):
            return self._make("; ".join(self._lost), at_once=True)
        if self._ready and self.settled:
            names = ", ".join(map(str, sorted(self._ready)))
            return self._make(f"worker {names} joins")
        return None

    def _make(self, why: str, *, at_once: bool = False) -> Generation:
        # What has the state comes first: rank 0 leads, and stays as long as it lives.
        self._members += sorted(self._ready)
        self._ready, self._entered, self._lost = set(), set(), []
        fresh, self._begun = not self._begun, True
        if fresh:  # all have the same state, and none can make a step before all others have entered
            self._healthy = set(self._members)
        self.number += 1
        last = not fresh and len(self._members) < self._least
        return Generation(self.number, tuple(self._members), at_once, fresh, why, last)

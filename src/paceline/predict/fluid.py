"""An event simulation of processes that compute and send data, in which links and processors are shared fairly.

A process is a generator. It yields what it waits for: a `Delay`, or a `Done` that another process or an activity sets.
An activity (a transfer, a computation) has an amount of work and uses resources; while it lasts, its rate is the
max-min fair one: no activity can have more without taking from one that has less.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

# Activities that end within this part of the time that the next one takes end together: rounding must not divide what
# is one event into many.
TOGETHER = 1e-9
# With fewer activities than this, plain Python is faster than NumPy.
FEW = 12
# A resource of which more than this part is used is full: what is left is rounding.
FULL = 1 - 1e-9


@dataclass(frozen=True)
class Delay:
    """Seconds during which nothing that is shared is used."""

    seconds: float


@dataclass(eq=False)
class Done:
    """Something that happens once; processes wait for it."""

    at: float | None = None
    waiting: list[Process] = field(default_factory=list)
    then: list[Callable[[], None]] = field(default_factory=list)


Process = Generator[Delay | Done, None, None]
Uses = tuple[tuple[int, float], ...]  # resources, and units of each for a unit of work


@dataclass(eq=False, slots=True)
class Activity:
    left: float
    weight: float  # activities that share a bottleneck get rates in proportion to it
    most: float  # the greatest rate
    uses: Uses
    done: Done
    rate: float = 0.0

    @property
    def kind(self) -> tuple[Uses, float, float]:
        """Activities of one kind have the same rate."""
        return self.uses, self.weight, self.most


class Fluid:
    """Runs processes until all have ended. `capacities` are those of the resources, in units per second.

    Rates are computed anew only if they may change: an activity that begins where one of its kind has just ended has
    the rate of that one, and one that begins or ends where no resource is full changes no other.
    """

    def __init__(self, capacities: Sequence[float]) -> None:
        self.now = 0.0
        self._capacities = [float(each) for each in capacities]
        self._active: list[Activity] = []
        self._load = [0.0] * len(self._capacities)
        self._begun: list[Activity] = []  # since time last passed
        self._ended: dict[tuple[Uses, float, float], list[Activity]] = {}
        self._ready: deque[Process] = deque()  # in the order in which they became ready
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._alive = 0

    def start(self, process: Process) -> None:
        self._ready.append(process)
        self._alive += 1

    def work(self, amount: float, uses: Uses, weight: float = 1.0, most: float = float("inf")) -> Done:
        """Begin an activity."""
        done = Done()
        if amount <= 0:
            done.at = self.now
            return done
        begun = Activity(amount, weight, most, uses, done)
        self._active.append(begun)
        if alike := self._ended.get(begun.kind):
            begun.rate = alike.pop().rate
        else:
            self._begun.append(begun)
        return done

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._timers, (self.now + seconds, next(self._number), call))

    def set(self, done: Done) -> None:
        assert done.at is None
        done.at = self.now
        self._ready += done.waiting
        done.waiting.clear()
        for call in done.then:
            call()

    def run(self, until: Done | None = None) -> float:
        """The time at which the last process has ended, or this has happened. Raises RuntimeError if processes wait for
        each other.
        """
        while True:
            while self._ready:
                self._advance(self._ready.popleft())
            if until is not None and until.at is not None:
                return self.now
            if not self._active and not self._timers:
                break
            self._next_event()
        if self._alive:
            raise RuntimeError(f"{self._alive} processes wait for something that never happens")
        return self.now

    def _advance(self, process: Process) -> None:
        """Run a process until it has to wait."""
        for wanted in process:
            if isinstance(wanted, Delay):
                self.later(wanted.seconds, lambda: self._ready.append(process))
                return
            if wanted.at is None:
                wanted.waiting.append(process)
                return
        self._alive -= 1

    def _next_event(self) -> None:
        """Let time pass until something ends."""
        self._share()
        step = float("inf")
        for each in self._active:
            if each.left < step * each.rate:
                step = each.left / each.rate
        if self._timers and self._timers[0][0] - self.now <= step:
            step = max(0.0, self._timers[0][0] - self.now)
        self.now += step
        limit, going = step * (1 + TOGETHER), []
        ended = []
        for each in self._active:
            if each.left <= each.rate * limit:
                ended.append(each)
            else:
                each.left -= each.rate * step
                going.append(each)
        if ended:
            self._active = going
            for each in ended:
                self._ended.setdefault(each.kind, []).append(each)
            for each in ended:
                self.set(each.done)
        while self._timers and self._timers[0][0] <= self.now * (1 + TOGETHER):
            heapq.heappop(self._timers)[2]()

    def _share(self) -> None:
        """Give each activity its rate."""
        if not self._ended and not self._begun:
            return
        alone = [self._release(each) for alike in self._ended.values() for each in alike]
        alone += [self._admit(each) for each in self._begun]
        self._ended.clear()
        self._begun.clear()
        if all(alone):
            return
        self._load = [0.0] * len(self._capacities)
        for each, rate in zip(self._active, fair_rates(self._active, self._capacities), strict=True):
            each.rate = rate
            for resource, units in each.uses:
                self._load[resource] += rate * units

    def _release(self, ended: Activity) -> bool:
        """Whether no other activity can be faster without this one."""
        full = any(self._load[resource] > FULL * self._capacities[resource] for resource, _ in ended.uses)
        for resource, units in ended.uses:
            self._load[resource] -= ended.rate * units
        return not full

    def _admit(self, begun: Activity) -> bool:
        """Whether this activity can have its greatest rate without making any other slower."""
        begun.rate = begun.most
        for resource, units in begun.uses:
            self._load[resource] += begun.rate * units
        return all(self._load[resource] <= FULL * self._capacities[resource] for resource, _ in begun.uses)


def fair_rates(active: Sequence[Any], capacities: Sequence[float]) -> list[float]:
    """The max-min fair rates by progressive filling: all rates grow in proportion to the weights, until a resource or
    an activity's greatest rate holds some of them.
    """
    if len(active) >= FEW:
        return _fair_rates_of_many(active, capacities)
    left = dict[int, float]()
    for each in active:
        for resource, _ in each.uses:
            left[resource] = capacities[resource]
    rates, growing, level = [0.0] * len(active), set(range(len(active))), 0.0
    while growing:
        load: dict[int, float] = {}
        for i in growing:
            for resource, units in active[i].uses:
                load[resource] = load.get(resource, 0.0) + units * active[i].weight
        bounds = {resource: left[resource] / used for resource, used in load.items()}
        rise = min(min(bounds.values(), default=float("inf")),
                   min(active[i].most / active[i].weight for i in growing) - level)  # fmt: skip
        level += rise
        for resource, used in load.items():
            left[resource] -= rise * used
        full = {resource for resource, bound in bounds.items() if bound <= rise * (1 + TOGETHER)}
        held = {i for i in growing if active[i].most <= level * active[i].weight * (1 + TOGETHER)
                or any(resource in full for resource, _ in active[i].uses)}  # fmt: skip
        for i in held:
            rates[i] = level * active[i].weight
        growing -= held
    return rates


def _fair_rates_of_many(active: Sequence[Any], capacities: Sequence[float]) -> list[float]:
    """The same with NumPy."""
    width, rows = max(len(each.uses) for each in active), len(active)
    nothing = len(capacities)  # a resource that never runs out
    where = np.full((rows, width), nothing)
    units = np.zeros((rows, width))
    for i, each in enumerate(active):
        for j, (resource, used) in enumerate(each.uses):
            where[i, j], units[i, j] = resource, used
    left = np.array([*capacities, np.inf])
    weights = np.array([each.weight for each in active])
    most = np.array([each.most for each in active]) / weights
    rates, growing, level = np.zeros(rows), np.ones(rows, dtype=bool), 0.0
    while growing.any():
        load = np.bincount(where[growing].ravel(), (units[growing] * weights[growing, None]).ravel(), len(left))
        with np.errstate(divide="ignore", invalid="ignore"):
            bounds = np.where(load > 0, left / load, np.inf)
        rise = min(float(bounds.min()), float(most[growing].min()) - level)
        level += rise
        left = left - rise * load
        full = bounds <= rise * (1 + TOGETHER)
        held = growing & ((most <= level * (1 + TOGETHER)) | full[where].any(axis=1))
        rates[held] = level * weights[held]
        growing &= ~held
    found: list[float] = rates.tolist()
    return found

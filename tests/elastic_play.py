"""An elastic training without sockets, clock or torch: workers, a registrar, and a script that says what happens next.

The registrar and the choice of a source are the real ones. A worker does what `training/elastic.py` does, one event at
a time; collectives complete for each member at a moment of its own, or never, if another member has ended by then.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

from paceline.elastic.membership import UNHEALTHY, Generation, Reached, Registrar, choose_source
from paceline.layout import share

Weights = tuple[tuple[int, frozenset[int]], ...]  # the updates made, each with its samples
GLOBAL_BATCH = 12
MOST_EVENTS = 20_000
Choose = Callable[[list[Reached]], int | None]


class Unrecoverable(Exception):
    """All that had the state have ended; the launcher goes back to a checkpoint."""


@dataclass
class Step:
    """A collective of a generation: what its members give."""

    given: dict[int, frozenset[int] | Reached | Weights] = field(default_factory=dict)
    regroup: bool = False  # rank 0 knew of a newer generation


@dataclass
class Worker:
    name: int
    weights: Weights = ()
    healthy: bool = False
    generation: Generation | None = None
    calls: int = 0  # collectives in this generation
    doing: str = "wait"  # for a generation; or compare, take, train
    inbox: deque[Generation] = field(default_factory=deque)
    source: int = 0


class Play:
    def __init__(
        self, dice: random.Random, workers: int, least: int, steps: int, choose: Choose = choose_source
    ) -> None:
        self.dice, self.steps, self.choose, self.least = dice, steps, choose, least
        self.registrar = Registrar(range(workers), least)
        self.workers = {name: Worker(name) for name in range(workers)}
        self.collectives: dict[tuple[int, int], Step] = {}
        self.members: dict[int, tuple[int, ...]] = {}
        self.to_registrar: dict[int, deque[tuple[str, int]]] = {name: deque() for name in range(workers)}
        self.to_worker: dict[int, deque[Generation]] = {name: deque() for name in range(workers)}
        self.deaths: deque[int] = deque()  # that the registrar has not been told of
        self.committed: dict[int, set[int]] = {}  # by step: the generations in which somebody made its update
        self.done: Counter[str] = Counter()
        for name in self.workers:
            self._say(name, "ready", 0)

    def _say(self, name: int, what: str, number: int) -> None:
        self.to_registrar[name].append((what, number))

    def run(self, kills: int) -> None:
        """Until all living members have made all updates."""
        moments = [self.dice.randrange(10, 15 * self.steps * len(self.workers)) for _ in range(kills)]
        moments = sorted(moment - moment % self.dice.choice([1, 1, 50]) for moment in moments)  # some at once
        for event in range(MOST_EVENTS):
            while moments and event >= moments[0]:
                moments.pop(0)
                self.kill(self.dice.choice(sorted(self.workers)))
            if self._finished():
                return
            choices = self._possible()
            if choices:
                self.dice.choice(choices)()
            elif self.registrar.lost_all:
                raise Unrecoverable
            elif not moments:
                raise AssertionError(f"nothing can happen any more: {self.workers}, {self.registrar.members}")
        raise AssertionError("it does not end")

    def _finished(self) -> bool:
        """Whether all members of a generation have made all updates; newcomers may still wait to join."""

        def done(worker: Worker, number: int) -> bool:
            same = worker.generation is not None and worker.generation.number == number
            return same and worker.doing == "train" and len(worker.weights) == self.steps

        return any(all(done(self.workers[name], n) for name in members) for n, members in self.members.items())

    def kill(self, name: int) -> None:
        """SIGKILL: what it has said before still arrives, and it begins anew, without any state."""
        self.done["killed"] += 1
        self.deaths.append(name)
        self.workers[name].doing = "dead"

    def _possible(self) -> list[Callable[[], object]]:
        """Everything that can happen next."""
        found: list[Callable[[], object]] = []
        for name, queue in self.to_registrar.items():
            if queue:
                found.append(partial(self._hear, name))
        for name, news in self.to_worker.items():
            if news and self.workers[name].doing != "dead":
                found.append(partial(self._deliver, name))
        found += [partial(self._bury, name) for name in self.deaths if not self.to_registrar[name]]
        found += chain.from_iterable(map(self._acts, self.workers.values()))
        return found

    def _deliver(self, name: int) -> None:
        self.workers[name].inbox.append(self.to_worker[name].popleft())

    def _hear(self, name: int) -> None:
        what, number = self.to_registrar[name].popleft()
        if what == "ready":
            self.registrar.ready(name)
        elif what == "left":  # the launcher waits for a while, which may be too short
            self.registrar.repeat(number, "lost each other")
        else:
            self.registrar.entered(name, number)
        self._announce()

    def _bury(self, name: int) -> None:
        self.deaths.remove(name)
        if name in self.deaths:
            return  # killed twice
        self.registrar.ended(name, "killed")
        self.to_worker[name].clear()
        self._announce()
        self.workers[name] = Worker(name)
        self._say(name, "ready", 0)

    def _announce(self) -> None:
        while generation := self.registrar.due():
            self.members[generation.number] = generation.members
            self.done["generations"] += 1
            for member in generation.members:
                self.to_worker[member].append(generation)

    # A worker.

    def _acts(self, worker: Worker) -> list[Callable[[], None]]:
        """What it may do next."""
        if worker.doing == "dead":
            return []
        if worker.doing == "wait":
            return [lambda: self._enter(worker)] if worker.inbox else []
        found: list[Callable[[], None]] = []
        if self._lost_one(worker):
            found.append(lambda: self._leave(worker))
        if worker.doing == "train" and len(worker.weights) == self.steps:
            return found
        number, call = self._key(worker)
        step = self.collectives.setdefault((number, call), Step())
        if worker.name not in step.given:
            found.append(lambda: self._give(worker, step))
        elif len(step.given) == len(self.members[number]):
            found.append(lambda: self._complete(worker, step))
        return found

    def _key(self, worker: Worker) -> tuple[int, int]:
        assert worker.generation is not None
        return worker.generation.number, worker.calls

    def _lost_one(self, worker: Worker) -> bool:
        """Whether its waits fail: it has been told of a loss, or sees that a member has gone."""
        number, _ = self._key(worker)
        return any(news.at_once for news in worker.inbox) or any(map(partial(self._left, number), self.members[number]))

    def _left(self, number: int, name: int) -> bool:
        other = self.workers[name]
        if other.doing == "dead" or other.generation is None:
            return other.doing == "dead"  # else it is a newcomer that has not entered yet
        return other.generation.number > number or (other.generation.number == number and other.doing == "wait")

    def _leave(self, worker: Worker) -> None:
        worker.doing = "wait"
        self._say(worker.name, "left", self._key(worker)[0])

    def _enter(self, worker: Worker) -> None:
        generation = worker.inbox[-1]
        worker.healthy = worker.healthy or any(news.fresh for news in worker.inbox)
        worker.inbox.clear()
        worker.generation, worker.calls, worker.doing = generation, 0, "compare"

    def _give(self, worker: Worker, step: Step) -> None:
        step.given[worker.name] = self._gives(worker)
        if worker.doing == "train" and worker.inbox and self.members[self._key(worker)[0]][0] == worker.name:
            step.regroup = True

    def _complete(self, worker: Worker, step: Step) -> None:
        {"compare": self._compare, "take": self._take, "train": self._update}[worker.doing](worker, step)
        worker.calls += 1

    def _gives(self, worker: Worker) -> frozenset[int] | Reached | Weights:
        assert worker.generation is not None
        if worker.doing == "compare":
            return Reached(len(worker.weights)) if worker.healthy else UNHEALTHY
        if worker.doing == "take":
            return worker.weights
        members = worker.generation.members
        part = share(GLOBAL_BATCH, len(members), members.index(worker.name))
        return frozenset(GLOBAL_BATCH * len(worker.weights) + place for place in part)

    def _compare(self, worker: Worker, step: Step) -> None:
        number, _ = self._key(worker)
        table = [step.given[name] for name in self.members[number]]
        source = self.choose(table)  # type: ignore[arg-type]
        assert source is not None, f"{worker} has nobody to go on from"
        worker.source, worker.doing = source, "take"

    def _take(self, worker: Worker, step: Step) -> None:
        """All of the state has arrived: use it. Before, nothing of this worker has changed."""
        number, _ = self._key(worker)
        theirs = step.given[self.members[number][worker.source]]
        if not worker.healthy or len(worker.weights) < len(theirs):
            self.done["states taken"] += 1
            worker.weights = theirs  # type: ignore[assignment]
        worker.healthy, worker.doing = True, "train"
        self._say(worker.name, "entered", number)

    def _update(self, worker: Worker, step: Step) -> None:
        """All have given their gradients. Every member leaves after this step if rank 0 knew of a newcomer."""
        number, _ = self._key(worker)
        samples = frozenset(chain.from_iterable(given for given in step.given.values() if isinstance(given, frozenset)))
        made = len(worker.weights)
        expected = frozenset(range(GLOBAL_BATCH * made, GLOBAL_BATCH * (made + 1)))
        assert samples == expected, f"update {made} of worker {worker.name} has {sorted(samples)}"
        worker.weights = (*worker.weights, (made, samples))
        self.committed.setdefault(made, set()).add(number)
        if step.regroup:
            worker.doing = "wait"

    def check(self) -> None:
        """All that train have the weights of one process, each sample in them once."""
        alone = tuple((n, frozenset(range(GLOBAL_BATCH * n, GLOBAL_BATCH * (n + 1)))) for n in range(self.steps))
        for worker in self.workers.values():
            if worker.doing == "train":
                assert worker.weights == alone
        self.done["steps made again"] += sum(len(made) - 1 for made in self.committed.values())

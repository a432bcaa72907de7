"""Divides the run's work into parts and leases them to workers, so that each part is done once."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import cached_property

from paceline.data.course import START, Course, Position
from paceline.layout import share

TRAIN = "train"


@dataclass(frozen=True)
class UpdatePlan:
    """The updates of a run: how many there are, and the samples of each.

    `staleness` is the maximum number of updates between reading the weights for a gradient and applying it. None is no
    bound: then an update is the batch of one worker, applied on arrival.
    """

    samples: int
    batch: int  # samples of an update
    updates: int
    staleness: int | None = 0
    start: Position = START  # later in a run that is continued

    @cached_property
    def course(self) -> Course:
        return Course(self.samples, self.batch, self.start)

    @property
    def per_epoch(self) -> int:
        return self.course.per_epoch

    def epoch(self, update: int) -> int:
        return self.course.epoch(update)

    def span(self, update: int) -> range:
        """The positions of an update's samples in the epoch's shuffle."""
        return self.course.span(update)

    def samples_of(self, epoch: int) -> int:
        """The samples that an epoch has until the run is over."""
        return self.course.after(min(self.course.end(epoch), self.updates)).used


@dataclass(frozen=True, order=True)
class Part:
    """A piece of work. In training: the gradient of some samples, slot `slot` of `slots` of an update."""

    update: int
    slot: int
    slots: int
    start: int
    stop: int
    total: int  # samples of the whole update
    need: int  # the oldest version of the weights to use
    epoch: int
    kind: str = TRAIN


@dataclass
class Worker:
    """A worker, as the ledger sees it."""

    heard: float
    held: dict[int, Part] = field(default_factory=dict)  # leases by number
    mine: deque[Part] = field(default_factory=deque)  # its parts of open updates that are not leased yet
    computing: int | None = None  # the lease that it is computing; `since`: from when
    since: float = 0.0


class Ledger:
    """Leases parts to workers, and takes them back from lost workers.

    Updates are opened in order. Each is divided over the current workers, in the order of their ranks; without a bound,
    a whole update goes to the worker that asks. At most `ahead` updates more than the staleness allows are open, so
    that workers can prepare their batches; the part's `need` says when they may start to compute.
    """

    def __init__(self, plan: UpdatePlan, ahead: int = 3) -> None:
        self.plan, self.ahead = plan, ahead
        self.workers: dict[int, Worker] = {}
        self.limit = 0  # updates that may be opened
        self.opened = 0
        self.complete = 0  # updates that are done, without a gap
        self._left: dict[int, int] = {}  # by open update: the number of parts that are not done
        self._free: list[Part] = []  # parts without a worker: of lost workers, and of evaluation
        self._leases = 0
        self.evaluating: str | None = None

    # Membership.

    def join(self, rank: int, now: float) -> None:
        self.drop(rank)
        self.workers[rank] = Worker(heard=now)

    def drop(self, rank: int) -> list[Part]:
        """Remove a worker, and free its parts for others; return those that it had leased."""
        worker = self.workers.pop(rank, None)
        if worker is None:
            return []
        self._free += [*worker.held.values(), *worker.mine]
        self._free.sort()
        return sorted(worker.held.values())

    def beat(self, rank: int, computing: int | None, now: float) -> bool:
        """Record a heartbeat; false if the worker is not a member."""
        worker = self.workers.get(rank)
        if worker is None:
            return False
        worker.heard = now
        if computing != worker.computing:
            worker.computing, worker.since = computing, now
        return True

    def overdue(self, now: float, silent: float, stuck: float) -> dict[int, str]:
        """The workers that count as lost, and why."""
        found = {}
        for rank, worker in self.workers.items():
            if now - worker.heard > silent:
                found[rank] = f"it has sent nothing for {now - worker.heard:.1f} s"
            elif worker.computing is not None and now - worker.since > stuck:
                found[rank] = f"it has been computing one gradient for {now - worker.since:.0f} s"
        return found

    # Work.

    def lease(self, rank: int, target: int) -> dict[int, Part]:
        """Let the worker hold up to `target` leases; return all that it holds, by number.

        A part of the oldest update comes on top, because workers with `target` leases may be waiting for just that one.
        """
        worker = self.workers[rank]
        while (len(worker.held) < target or self._awaited(worker)) and (part := self._next(rank, worker)):
            self._leases += 1
            worker.held[self._leases] = part
        return worker.held

    def _next(self, rank: int, worker: Worker) -> Part | None:
        if self._free and (not worker.mine or self._free[0] < worker.mine[0]):
            return self._free.pop(0)
        while not worker.mine and self._may_open():
            self._open(rank)
        return worker.mine.popleft() if worker.mine else None

    def _awaited(self, worker: Worker) -> bool:
        """Whether this worker can get a part of the oldest update."""
        first = [parts[0] for parts in (self._free, worker.mine) if parts]
        return any(part.kind == TRAIN and part.update == self.complete for part in first)

    def _may_open(self) -> bool:
        if self.evaluating or self.opened >= self.limit:
            return False
        s = self.plan.staleness
        return s is None or self.opened < self.complete + s + self.ahead

    def _open(self, asker: int) -> None:
        """Divide the next update over the workers."""
        update, plan = self.opened, self.plan
        span = plan.span(update)
        ranks = sorted(self.workers) if plan.staleness is not None else [asker]
        ranks = ranks[: len(span)]
        need = max(0, update - plan.staleness) if plan.staleness is not None else 0
        for slot, rank in enumerate(ranks):
            piece = share(len(span), len(ranks), slot)
            part = Part(update, slot, len(ranks), span.start + piece.start, span.start + piece.stop, len(span), need,
                        plan.epoch(update))  # fmt: skip
            self.workers[rank].mine.append(part)
        self._left[update] = len(ranks)
        self.opened += 1

    def done(self, rank: int, lease: int) -> Part | None:
        """Mark a lease as done; return its part, the first time."""
        worker = self.workers.get(rank)
        part = worker.held.pop(lease, None) if worker else None
        if part is None:
            return None
        self._left[part.update] -= 1
        if part.kind == TRAIN:
            while self._left.get(self.complete) == 0:
                del self._left[self.complete]
                self.complete += 1
        return part

    # Evaluation: starts when all open updates are complete; none is opened until it is over.

    @property
    def idle(self) -> bool:
        """Whether no part is open."""
        return not any(self._left.values())

    def evaluate(self, name: str, samples: int, size: int, version: int) -> None:
        """Add parts that evaluate the weights of this version."""
        assert self.idle
        self.evaluating = name
        starts = range(0, samples, size)
        self._left = {self.opened: len(starts)}
        self._free = [
            Part(self.opened, slot, len(starts), start, min(start + size, samples), samples, version,
                 self.plan.epoch(self.opened), name)
            for slot, start in enumerate(starts)
        ]  # fmt: skip

    def end_evaluation(self) -> None:
        self.evaluating, self._left = None, {}

    def restart_at(self, update: int) -> None:
        """Go back to the point where exactly the updates before this one are done; workers must join again."""
        self.opened = self.complete = update
        self._free, self._left, self.evaluating, self.workers = [], {}, None, {}

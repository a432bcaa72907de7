"""The threads transport: ranks are threads of one process, and exchange tensors through its memory."""

from __future__ import annotations

import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.comm.base import Comm, Work, lost, took_too_long, whoami
from paceline.errors import CommError, CommTimeout
from paceline.layout import share


@dataclass
class Parcel:
    """One side of a message, which waits for the other side; then the values are copied."""

    comm: ThreadComm
    tensor: Tensor
    what: str
    peer: int
    tag: int
    done: bool = False
    wrong: str | None = None

    def wait(self) -> None:
        self.comm.until(lambda: self.done, self.what, self.peer, self.tag)
        if self.wrong:
            raise CommError(self.wrong, lost(self.comm, self.peer))


@dataclass
class Meeting:
    """The shared state of the ranks of one group."""

    size: int
    changed: threading.Condition
    sent: dict[tuple[int, int, int], deque[Parcel]] = field(default_factory=lambda: defaultdict(deque))
    awaited: dict[tuple[int, int, int], deque[Parcel]] = field(default_factory=lambda: defaultdict(deque))
    arrived: int = 0
    round: int = 0
    slots: dict[int, Tensor] = field(default_factory=dict)
    children: dict[tuple[int, tuple[int, ...]], Meeting] = field(default_factory=dict)
    broken: str | None = None


class ThreadComm(Comm):
    transport = "threads"

    def __init__(self, meeting: Meeting, rank: int, timeout: float) -> None:
        self.rank, self.size, self.timeout = rank, meeting.size, timeout
        self._meeting = meeting
        self._groups: Counter[tuple[int, ...]] = Counter()

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self.check(tensor, to)
        return self._put(Parcel(self, tensor, "send to", to, tag), (self.rank, to, tag), sending=True)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        self.check(tensor, source)
        return self._put(Parcel(self, tensor, "receive from", source, tag), (source, self.rank, tag), sending=False)

    def _put(self, mine: Parcel, way: tuple[int, int, int], *, sending: bool) -> Parcel:
        """Copy the values if the other side is already there, otherwise wait in line."""
        meeting = self._meeting
        with meeting.changed:
            theirs = (meeting.awaited if sending else meeting.sent)[way]
            if not theirs:
                (meeting.sent if sending else meeting.awaited)[way].append(mine)
                return mine
            other = theirs.popleft()
            out, into = (mine, other) if sending else (other, mine)
            if out.tensor.numel() == into.tensor.numel():
                into.tensor.copy_(out.tensor)
            else:
                into.wrong = (
                    f"rank {way[1]} expected {into.tensor.numel()} values from rank {way[0]}, got {out.tensor.numel()}"
                )
            mine.done = other.done = True
            meeting.changed.notify_all()
        return mine

    def allreduce(self, tensor: Tensor) -> None:
        """Each rank sums one part over all ranks, in rank order; then all ranks copy all parts."""
        self.check(tensor)
        theirs = self._exchange(tensor)
        part = share(tensor.numel(), self.size, self.rank)
        mine = theirs[0][part.start : part.stop].clone()
        for other in theirs[1:]:
            mine += other[part.start : part.stop]
        sums = self._exchange(mine)
        tensor.copy_(torch.cat(sums))
        self.barrier()

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check(tensor)
        theirs = self._exchange(tensor)
        if self.rank != root:
            tensor.copy_(theirs[root])
        self.barrier()

    def barrier(self) -> None:
        meeting = self._meeting
        with meeting.changed:
            meeting.arrived += 1
            mine = meeting.round
            if meeting.arrived == self.size:
                meeting.arrived, meeting.round = 0, mine + 1
                meeting.changed.notify_all()
        self.until(lambda: meeting.round > mine, "meet", None, 0)

    def group(self, ranks: list[int]) -> Comm:
        # The n-th call for these ranks matches the n-th call on the other ranks; each gets its own shared state.
        self._groups[tuple(ranks)] += 1
        key = (self._groups[tuple(ranks)], tuple(ranks))
        with self._meeting.changed:
            child = self._meeting.children.setdefault(key, Meeting(len(ranks), self._meeting.changed))
            child.broken = child.broken or self._meeting.broken
        made = ThreadComm(child, ranks.index(self.rank), self.timeout)
        made.numbers = self.named(ranks)
        return made

    def abort(self, reason: str, code: int = 1) -> None:
        with self._meeting.changed:
            _break(self._meeting, f"rank {self.name()} aborted: {reason}")
            self._meeting.changed.notify_all()

    def close(self) -> None:
        pass

    def until(self, ready: Callable[[], bool], what: str, peer: int | None, tag: int) -> None:
        """Wait until `ready`, an abort or the deadline."""
        meeting, deadline = self._meeting, time.monotonic() + self.timeout
        with meeting.changed:
            while not ready():
                if meeting.broken:
                    raise CommError(f"{whoami(self)}: {meeting.broken}")
                if not meeting.changed.wait(deadline - time.monotonic()) and time.monotonic() >= deadline:
                    raise CommTimeout(took_too_long(self, what, peer, tag), lost(self, peer))

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._meeting.slots[self.rank] = tensor
        self.barrier()
        all_ranks = [self._meeting.slots[r] for r in range(self.size)]
        self.barrier()
        return all_ranks


def _break(meeting: Meeting, why: str) -> None:
    meeting.broken = meeting.broken or why
    for child in meeting.children.values():
        _break(child, why)


def thread_world(size: int, timeout: float) -> list[ThreadComm]:
    """The communicators of `size` ranks; give one to each thread."""
    meeting = Meeting(size, threading.Condition())
    return [ThreadComm(meeting, rank, timeout) for rank in range(size)]

"""The shm transport: ranks on one machine exchange tensors through memory that they share.

A group's memory is created by its first rank, which sends it to the others:

    semaphores    of each pair of ranks: `signal` (a step of a collective), `item` and `room` (pieces of messages);
                  of each rank: `bell` (an item or room for one has come) and `alarm` (the group was aborted)
    why           the reason of an abort
    slots         of each pair of ranks: SLOTS pieces of messages, each with a header
    staging       BUFFERS pieces of what each rank gives to sums, of the sums, and of what each rank broadcasts

Nothing is read from memory that another rank writes before a semaphore has been taken which that rank posted after
writing: that orders memory on every processor (see `Semaphore`). A wait spins for a moment, yielding its core, then
sleeps in the kernel, and wakes now and then to see whether a rank has ended, or whether the wait was cancelled.
"""

from __future__ import annotations

import atexit
import math
import os
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from paceline.comm.base import Comm, Part, SharedSum, Work, lost, took_too_long, whoami
from paceline.comm.process_group import private_folder
from paceline.comm.seat import Seat
from paceline.comm.shared_memory import LINE, Semaphore, SharedMemory
from paceline.comm.shm_links import Links
from paceline.elastic.membership import Generation
from paceline.errors import CommError, CommTimeout, UsageError
from paceline.layout import share

SPIN_SECONDS = 2e-4
SLICE_SECONDS = 0.02  # between two looks at whether a rank has ended
SLOTS = BUFFERS = 4
PIECE = 1 << 20  # bytes; less in large groups, so that all slots together have at most MOST bytes
MOST = 1 << 30
SMALL = 1 << 16  # bytes of a tensor that every rank sums on its own
CACHED = 1 << 16  # values that are added up, and squared while they are in the cache
WHY = 1024
HEADER = struct.Struct("=qqq")  # of a piece: tag, bytes of the whole message, bytes of this piece
PAGE = 4096
_yield = os.sched_yield


@dataclass
class Layout:
    """Where everything lies in the memory of a group of so many ranks, in bytes."""

    ranks: int

    def __post_init__(self) -> None:
        pairs = self.ranks**2
        self.piece = max(1 << 14, min(PIECE, MOST // (pairs * SLOTS)) & -(1 << 14))
        self.semaphores = 3 * pairs + 2 * self.ranks
        self.why = self.semaphores * LINE
        self.slots = self.why + WHY
        self.staging = self.slots + pairs * SLOTS * (LINE + self.piece)
        # Three ranks and more wait for each other twice for each piece that they sum: longer pieces, fewer waits.
        self.staged_piece = self.piece * (1 if self.ranks == 2 else 4)
        self.size = self.staging + (2 * self.ranks + 1) * BUFFERS * self.staged_piece

    def slot(self, source: int, to: int, number: int) -> int:
        return self.slots + ((source * self.ranks + to) * SLOTS + number % SLOTS) * (LINE + self.piece)

    def staged(self, rank: int, number: int) -> int:
        """A rank's piece of this number; after those of all ranks come the sums, then what ranks broadcast."""
        return self.staging + (rank * BUFFERS + number % BUFFERS) * self.staged_piece


class ShmComm(Comm):
    transport = "shm"
    shares_memory = True

    def __init__(
        self,
        links: Links,
        ranks: list[int],
        path: str,
        timeout: float,
        parent: ShmComm | None = None,
        cancelled: Callable[[], str | None] = lambda: None,
    ) -> None:
        """A communicator of these ranks of the world. `cancelled` may give a reason to stop waiting."""
        self._cancelled = cancelled
        self._links, self._ranks, self._path, self._parent = links, ranks, path, parent
        names = tuple(links.names[rank] for rank in ranks)
        self.numbers = None if names == tuple(range(links.size)) else names
        self.rank, self.size, self.timeout = ranks.index(links.rank), len(ranks), timeout
        self._others = [other for other in range(self.size) if other != self.rank]
        self._broken: str | None = None
        self._alarm = list[Semaphore]()
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._layout = Layout(self.size)
        self._memory = self.allocate(path, self._layout.size, self._initialise)
        n, found = self.size, self._memory.semaphores(0, self._layout.semaphores)
        rows = [found[row * n : (row + 1) * n] for row in range(3 * n)]
        self._signal, self._item, self._room = rows[:n], rows[n : 2 * n], rows[2 * n :]  # each [from][to]
        self._bell, self._alarm = found[3 * n * n : -n], found[-n:]
        self._bytes = self._memory.tensor(torch.uint8, 0, self._layout.size)
        self._made = 0  # sums and vectors
        self._turn = 0  # pieces that have been summed
        self._sending: list[deque[_Send]] = [deque() for _ in range(n)]
        self._sent, self._received = [0] * n, [0] * n  # pieces, by rank
        self._expected: list[list[_Receive]] = [[] for _ in range(n)]
        self._early: list[list[_Early]] = [[] for _ in range(n)]
        self._arriving: list[_Receive | _Early | None] = [None] * n

    def _initialise(self, memory: SharedMemory) -> None:
        n = self.size
        for number, semaphore in enumerate(memory.semaphores(0, self._layout.semaphores)):
            semaphore.initialise(SLOTS if 2 * n * n <= number < 3 * n * n else 0)

    def allocate(
        self, name: str, size: int, initialise: Callable[[SharedMemory], None] = lambda _: None
    ) -> SharedMemory:
        """Memory of the group; all its ranks call this. The first rank initialises it."""
        if self.rank == 0:
            memory = SharedMemory.create(size)
            initialise(memory)
            for other in self._others:
                self._links.send(self._ranks[other], memory, name)
        else:
            start = time.monotonic()
            while (found := self._links.take(self._ranks[0], name)) is None:
                if error := self._trouble(start, "get memory from", 0):
                    raise error
                time.sleep(0.0005)
            memory = found
        memory.close()
        return memory

    # Waiting.

    def _take(self, semaphore: Semaphore, what: str, peer: int, tag: int | None = None) -> None:
        """Wait until the peer has posted the semaphore, and take it."""
        start = time.monotonic()
        until = start + SPIN_SECONDS
        while not semaphore.take():
            if time.monotonic() < until:
                _yield()
            elif semaphore.wait(SLICE_SECONDS):
                return
            elif error := self._trouble(start, what, peer, tag):
                if semaphore.take():  # the peer posted it before it ended
                    return
                raise error

    def _trouble(self, start: float, what: str, peer: int, tag: int | None = None) -> CommError | None:
        """Why a wait that began at `start` must end."""
        self._links.look()
        if why := self._why_broken():
            return CommError(f"{whoami(self)}: {why}")
        for other in self._others:
            left = self._links.ended.get(self._ranks[other])
            if left is False or (left and other == peer):
                how = "left" if left else "its process has ended"
                return CommError(
                    f"{whoami(self)} lost rank {self.name(other)} while trying to {what} rank {self.name(peer)} over "
                    f"shm: {how}",
                    lost(self, other),
                )
        if time.monotonic() - start > self.timeout:
            return CommTimeout(took_too_long(self, what, peer, tag), lost(self, peer))
        return None

    def _why_broken(self) -> str | None:
        if self._broken is None and self._alarm and self._alarm[self.rank].take():
            raw = bytes(self._bytes[self._layout.why : self._layout.why + WHY].tolist())
            self._broken = raw.rstrip(b"\0").decode(errors="replace")
        return self._broken or (self._parent._why_broken() if self._parent else self._cancelled())

    def cancel(self, reason: str) -> None:
        """Make this rank's waits fail, here and in groups; another thread may call it."""
        self._broken = self._broken or f"cancelled: {reason}"

    def abort(self, reason: str, code: int = 1) -> None:
        why = f"rank {self.name()} aborted: {reason}"
        raw = why.encode(errors="replace")[:WHY]
        self._bytes[self._layout.why : self._layout.why + len(raw)] = torch.frombuffer(
            bytearray(raw), dtype=torch.uint8
        )
        self._broken = self._broken or why
        for other in self._others:
            self._alarm[other].post()

    def close(self) -> None:
        if self._parent is None:
            self._links.close()

    def group(self, ranks: list[int]) -> Comm:
        # The n-th call for these ranks matches the n-th call on the other ranks.
        self._groups[tuple(ranks)] += 1
        path = f"{self._path}/{self._groups[tuple(ranks)]}:{','.join(map(str, ranks))}"
        return ShmComm(self._links, [self._ranks[rank] for rank in ranks], path, self.timeout, self)

    # Collectives.

    def post(self) -> None:
        """Tell all other ranks that this one has come to the next point."""
        for other in self._others:
            self._signal[self.rank][other].post()

    def collect(self, what: str) -> None:
        """Wait until all other ranks have come to the next point."""
        for other in self._others:
            self.await_signal(other, what)

    def await_signal(self, other: int, what: str) -> None:
        self._take(self._signal[other][self.rank], what, other)

    def came(self, other: int) -> bool:
        """Whether another rank has come to the next point; true once for each."""
        return self._signal[other][self.rank].take()

    def barrier(self) -> None:
        self.post()
        self.collect("meet")

    def _stage(self, rank: int, number: int, like: Tensor) -> Tensor:
        """A piece in staging memory, as long as a tensor."""
        return self._memory.tensor(like.dtype, self._layout.staged(rank, number), len(like))

    def _pieces(self, tensor: Tensor) -> tuple[Tensor, ...]:
        pieces: tuple[Tensor, ...] = tensor.split(self._layout.staged_piece // tensor.element_size())
        return pieces

    def allreduce(self, tensor: Tensor) -> None:
        """Each rank copies a piece to its staging memory, and sums its part of what all have there; then all copy the
        sums. A piece is copied while others still sum the one before.

        Of a small tensor, and if there are two ranks, each rank sums everything itself, in the same order.
        """
        self.check(tensor)
        if self.size == 1 or not len(tensor):
            return
        pieces = list(enumerate(self._pieces(tensor), self._turn))
        self._turn += len(pieces)
        self._put(*pieces[0])
        if self.size == 2 or tensor.nbytes <= SMALL:
            self._sum_alone(pieces)
        else:
            self._sum_in_parts(pieces)

    def _put(self, number: int, piece: Tensor) -> None:
        self._stage(self.rank, number, piece).copy_(piece)
        self.post()

    def _sum_alone(self, pieces: list[tuple[int, Tensor]]) -> None:
        # A rank that has put piece k has read piece k - 2. So a rank that has collected "put k - 1" may overwrite what
        # it put up to k - 3, and the next two pieces that it puts, k and k + 1, replace k - 4 and k - 3.
        for i, (number, piece) in enumerate(pieces):
            for following in pieces[i + 1 : i + 2]:
                self._put(*following)
            self.collect("sum with")
            add_up([self._stage(rank, number, piece) for rank in range(self.size)], piece)

    def _sum_in_parts(self, pieces: list[tuple[int, Tensor]]) -> None:
        # All ranks post and collect in the same order: put 0, put 1, sum 0, put 2, sum 1 … A piece of staging memory
        # is used again when all have read it: who collects "sum k" knows that all have read what was put as k; who
        # collects "put k" knows that all have copied sum k - 3.
        for i, (number, piece) in enumerate(pieces):
            for following in pieces[i + 1 : i + 2]:
                self._put(*following)
            self.collect("sum with")
            own = share(len(piece), self.size, self.rank)
            parts = [self._stage(rank, number, piece)[own.start : own.stop] for rank in range(self.size + 1)]
            add_up(parts[:-1], parts[-1])
            self.post()
            if i:
                self._get_sum(*pieces[i - 1])
        self._get_sum(*pieces[-1])

    def _get_sum(self, number: int, piece: Tensor) -> None:
        self.collect("sum with")
        piece.copy_(self._stage(self.size, number, piece))

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        """The root copies pieces to memory that only its broadcasts use; the others post when they have copied one."""
        self.check(tensor)
        if self.size == 1 or not len(tensor):
            return
        pieces, what = self._pieces(tensor), "broadcast with"
        for number, piece in enumerate(pieces):
            place = self._stage(self.size + 1 + root, number, piece)
            if self.rank != root:
                self.await_signal(root, what)
                piece.copy_(place)
                self._signal[self.rank][root].post()
                continue
            if number >= BUFFERS:
                self.collect(what)
            place.copy_(piece)
            self.post()
        for _ in pieces[-BUFFERS:] if self.rank == root else ():
            self.collect(what)

    def shared_sum(self, lengths: Mapping[torch.dtype, int], *, squares: bool = False) -> SharedSum:
        return ShmSum(self, lengths, squares)

    def shared_vector(self, dtype: torch.dtype, length: int) -> Tensor:
        return self.allocate(self._name("vector"), length * dtype.itemsize).tensor(dtype, 0, length)

    def _name(self, kind: str) -> str:
        """The name of memory that all ranks create now."""
        self._made += 1
        return f"{self._path}/{kind} {self._made}"

    # Messages.

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self.check(tensor, to)
        work = _Send(self, to, tag, tensor.view(torch.uint8))
        if not work.done:
            self._sending[to].append(work)
            self._push(to)
        return work

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        self.check(tensor, source)
        work = _Receive(self, source, tag, tensor.view(torch.uint8))
        early = next((each for each in self._early[source] if each.tag == tag), None)
        if work.done:
            pass  # empty messages are not sent
        elif early is None:
            self._expected[source].append(work)
        else:
            self._early[source].remove(early)
            early.receive = work
            early.deliver()
        return work

    def finish(self, work: _Send | _Receive, what: str) -> None:
        """Move pieces of messages until this one is done."""
        start = time.monotonic()
        until, bell = start + SPIN_SECONDS, self._bell[self.rank]
        while not work.done:
            if self._advance() or bell.take():
                until = time.monotonic() + SPIN_SECONDS
            elif time.monotonic() < until:
                _yield()
            elif not bell.wait(SLICE_SECONDS):
                error = self._trouble(start, what, work.peer, work.tag)
                if error and not self._advance():  # the peer may have sent it before it ended
                    raise error

    def _advance(self) -> bool:
        """Move pieces that can be moved; whether there were any."""
        moved = False
        for other in self._others:
            if self._sending[other] and self._push(other):
                moved = True
            if (self._expected[other] or self._arriving[other]) and self._pull(other):
                moved = True
        return moved

    def _push(self, to: int) -> bool:
        """Copy pieces of messages to the slots that are free."""
        room, moved = self._room[self.rank][to], False
        while self._sending[to] and room.take():
            self._bell[self.rank].take()  # that of this room, or of something else that is looked for before a wait
            work = self._sending[to][0]
            piece = work.data[work.at : work.at + self._layout.piece]
            place = self._layout.slot(self.rank, to, self._sent[to])
            HEADER.pack_into(self._memory.buffer, place, work.tag, len(work.data), len(piece))
            self._bytes[place + LINE : place + LINE + len(piece)].copy_(piece)
            self._item[self.rank][to].post()
            self._bell[to].post()
            self._sent[to] += 1
            work.at, moved = work.at + len(piece), True
            if work.done:
                self._sending[to].popleft()
        return moved

    def _pull(self, source: int) -> bool:
        """Copy pieces of messages from the slots that are filled."""
        item, moved = self._item[source][self.rank], False
        while item.take():
            self._bell[self.rank].take()
            place = self._layout.slot(source, self.rank, self._received[source])
            tag, whole, count = HEADER.unpack_from(self._memory.buffer, place)
            target = self._arriving[source] or self._target(source, tag, whole)
            target.data[target.at : target.at + count].copy_(self._bytes[place + LINE : place + LINE + count])
            target.at += count
            self._room[source][self.rank].post()
            self._bell[source].post()
            self._received[source] += 1
            self._arriving[source], moved = None if target.at == whole else target, True
            target.deliver()
        return moved

    def _target(self, source: int, tag: int, whole: int) -> _Receive | _Early:
        """Where a message that begins to arrive goes: to the first receive that expects it."""
        found = next((each for each in self._expected[source] if each.tag == tag), None)
        if found is not None:
            self._expected[source].remove(found)
            if len(found.data) == whole:
                return found
        early = _Early(tag, torch.empty(whole, dtype=torch.uint8), found)
        if found is None:
            self._early[source].append(early)
        return early


def add_up(parts: list[Tensor], out: Tensor, scaled: int = 0, factor: float = 1) -> None:
    """Add tensors in their order, one of them times a factor."""
    if scaled:
        torch.add(parts[0], parts[1], alpha=factor if scaled == 1 else 1, out=out)
    else:
        torch.add(parts[1], parts[0], alpha=factor, out=out)
    for number, part in enumerate(parts[2:], 2):
        out.add_(part, alpha=factor if scaled == number else 1)


@dataclass
class _Send:
    comm: ShmComm
    peer: int
    tag: int
    data: Tensor
    at: int = 0  # bytes that have been copied

    @property
    def done(self) -> bool:
        return self.at == len(self.data)

    def wait(self) -> None:
        self.comm.finish(self, "send to")


@dataclass
class _Receive:
    comm: ShmComm
    peer: int
    tag: int
    data: Tensor
    at: int = 0
    wrong: str | None = None

    @property
    def done(self) -> bool:
        return self.at == len(self.data) or self.wrong is not None

    def deliver(self) -> None:
        return

    def wait(self) -> None:
        self.comm.finish(self, "receive from")
        if self.wrong:
            raise CommError(self.wrong, lost(self.comm, self.peer))


@dataclass
class _Early:
    """A message that nobody expected when it came, or that has another length than its receive."""

    tag: int
    data: Tensor
    receive: _Receive | None = None
    at: int = 0

    def deliver(self) -> None:
        if self.receive is None or self.at < len(self.data):
            return
        if len(self.data) == len(self.receive.data):
            self.receive.data.copy_(self.data)
            self.receive.at = self.at
        else:
            comm, peer = self.receive.comm, self.receive.peer
            self.receive.wrong = (
                f"rank {comm.name()} expected {len(self.receive.data)} bytes from rank {comm.name(peer)}, got {self.at}"
            )


class ShmSum:
    """Vectors of all ranks, and their sum, in shared memory.

    When all ranks have given a span, each rank adds up its part of the span. So a sum is written once, in the order of
    ranks, and read by all where it is. Nobody writes to `total` but the rank that adds up, and it does so only when all
    ranks have given that span again: by then they have read the sum before. A rank may change `mine` again when
    `finish` has returned: then all have added up.
    """

    def __init__(self, comm: ShmComm, lengths: Mapping[torch.dtype, int], squares: bool) -> None:
        self._comm, self.moved = comm, 0
        places, region = dict[torch.dtype, int](), 0
        for dtype, length in lengths.items():
            places[dtype], region = region, region + -(-length * dtype.itemsize // PAGE) * PAGE
        memory = comm.allocate(comm._name("sum"), region * (comm.size + 1))
        self._all = {
            dtype: [memory.tensor(dtype, region * row + places[dtype], length) for row in range(comm.size + 1)]
            for dtype, length in lengths.items()
        }
        self.mine = {dtype: rows[comm.rank] for dtype, rows in self._all.items()}
        self.total = {dtype: rows[-1] for dtype, rows in self._all.items()}
        self._given: deque[tuple[torch.dtype, int, int, Sequence[Part]]] = deque()
        self._squares: list[Tensor] | None = [] if squares else None
        self._missing = set(comm._others)  # ranks that have not given the first of these spans

    def give(self, dtype: torch.dtype, start: int, stop: int, parts: Sequence[Part] = ()) -> None:
        """This span of `mine` is complete, except for the `parts`, which only this rank adds up.

        Spans that all ranks have given are added up; this does not wait.
        """
        self._comm.post()
        self._given.append((dtype, start, stop, parts))
        self._advance(wait=False)

    def wait(self) -> float:
        """Return when this rank has added up its part of all spans: the squares of what it has added up."""
        self._advance(wait=True)
        if self._squares is None:
            return 0.0
        squares, self._squares = math.fsum(map(float, self._squares)), []
        return squares

    def finish(self) -> None:
        """Return when `total` is complete in all spans."""
        self.wait()
        self._comm.barrier()

    def _advance(self, *, wait: bool) -> None:
        while self._given:
            if wait:
                for other in self._missing:
                    self._comm.await_signal(other, "sum with")
                self._missing = set()
            self._missing = {other for other in self._missing if not self._comm.came(other)}
            if self._missing:
                return
            dtype, start, stop, parts = self._given.popleft()
            self._missing = set(self._comm._others)
            own = share(stop - start, self._comm.size, self._comm.rank)
            at = start + own.start
            for part in parts:
                self._add_up(dtype, at, part.start)
                at = part.start + len(part.values)
                self._add_up(dtype, part.start, at, part)
            self._add_up(dtype, at, start + own.stop)
            others = (
                (self._comm.size - 1) * len(own) + stop - start - len(own)
            )  # parts of their vectors, and their sums
            self.moved += others * dtype.itemsize

    def _add_up(self, dtype: torch.dtype, start: int, stop: int, part: Part | None = None) -> None:
        if start == stop:
            return
        *rows, total = [row[start:stop] for row in self._all[dtype]]
        if part:
            rows[self._comm.rank] = part.values
        factor = part.factor if part else 1
        if self._squares is None:
            add_up(rows, total, self._comm.rank, factor)
            return
        for *pieces, summed in zip(*(row.split(CACHED) for row in (*rows, total)), strict=True):
            add_up(pieces, summed, self._comm.rank, factor)
            self._squares.append(summed.dot(summed))


def shm_world(seat: Seat, timeout: float) -> ShmComm:
    """The communicator of all ranks of a machine."""
    folder = seat.sockets
    if not seat.one_node or folder is None:
        raise UsageError("--transport shm is for ranks on one machine: use gloo or mpi")
    private_folder(Path(folder))
    links = Links(seat.rank, range(seat.size), Path(folder), seat.attempt, timeout)
    atexit.register(links.close)
    return ShmComm(links, list(range(seat.size)), "world", timeout)


def shm_generation(
    folder: Path, generation: Generation, worker: int, timeout: float, cancelled: Callable[[], str | None]
) -> ShmComm:
    """The communicator of a generation of an elastic run; `cancelled` may give a reason to stop waiting in it."""
    names = generation.members
    links = Links(names.index(worker), names, folder, generation.number, timeout, cancelled)
    return ShmComm(links, list(range(len(names))), f"generation {generation.number}", timeout, cancelled=cancelled)

"""A Comm that counts bytes, messages and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm.base import Comm, Part, SharedSum, Work

T = TypeVar("T")


@dataclass
class Meter:
    """Messages, bytes and seconds of one rank, including its groups.

    For a transport's own collectives only the payload is known: it is counted separately, once per call.
    """

    messages_sent: int = 0
    messages_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    opaque_calls: int = 0
    opaque_bytes: int = 0
    seconds: float = 0.0
    children: list[Meter] = field(default_factory=list)

    def total(self) -> Meter:
        """The sum of this meter and those of all groups created from it."""
        parts = [self, *(child.total() for child in self.children)]
        counts = [f.name for f in fields(self) if f.name != "children"]
        return Meter(**{name: sum(getattr(part, name) for part in parts) for name in counts})

    def plus(self, other: Meter, times: int = 1) -> Meter:
        """This meter plus `times` the other."""
        mine, theirs = self.total(), other.total()
        counts = [f.name for f in fields(self) if f.name != "children"]
        return Meter(**{name: getattr(mine, name) + times * getattr(theirs, name) for name in counts})


class MeteredComm(Comm):
    def __init__(self, inner: Comm) -> None:
        self.inner, self.meter = inner, Meter()
        self.transport, self.rank, self.size, self.timeout = inner.transport, inner.rank, inner.size, inner.timeout
        self.device, self.allows_threads, self.numbers = inner.device, inner.allows_threads, inner.numbers
        self.shares_memory = inner.shares_memory

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        work = self.inner.isend(tensor, to, tag)
        self.meter.messages_sent += 1
        self.meter.bytes_sent += tensor.nbytes
        return _Timed(work, self.meter)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        work = self.inner.irecv(tensor, source, tag)
        self.meter.messages_received += 1
        self.meter.bytes_received += tensor.nbytes
        return _Timed(work, self.meter)

    def allreduce(self, tensor: Tensor) -> None:
        start = time.perf_counter()
        self.inner.allreduce(tensor)
        self._collective(start, tensor.nbytes)

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        start = time.perf_counter()
        self.inner.broadcast(tensor, root)
        self._collective(start, tensor.nbytes)

    def barrier(self) -> None:
        start = time.perf_counter()
        self.inner.barrier()
        self._collective(start, 0)

    def shared_sum(self, lengths: Mapping[torch.dtype, int], *, squares: bool = False) -> SharedSum:
        return _MeteredSum(self.inner.shared_sum(lengths, squares=squares), self.meter)

    def shared_vector(self, dtype: torch.dtype, length: int) -> Tensor:
        return self.inner.shared_vector(dtype, length)

    def read_records(self, path: Path, offsets: Tensor, length: int) -> Tensor:
        return self.inner.read_records(path, offsets, length)  # from a disk, not from other ranks

    def _collective(self, start: float, payload: int) -> None:
        self.meter.seconds += time.perf_counter() - start
        if self.size > 1:
            self.meter.opaque_calls += 1
            self.meter.opaque_bytes += payload

    def group(self, ranks: list[int]) -> Comm:
        child = MeteredComm(self.inner.group(ranks))
        self.meter.children.append(child.meter)
        return child

    def abort(self, reason: str, code: int = 1) -> None:
        self.inner.abort(reason, code)

    def close(self) -> None:
        self.inner.close()


@dataclass
class _Timed:
    work: Work
    meter: Meter

    def wait(self) -> None:
        start = time.perf_counter()
        self.work.wait()
        self.meter.seconds += time.perf_counter() - start


class _MeteredSum:
    """Counts what a rank reads of other ranks' memory as received, and what they read of its own as sent."""

    def __init__(self, inner: SharedSum, meter: Meter) -> None:
        self.inner, self.meter, self.mine, self.total = inner, meter, inner.mine, inner.total

    @property
    def moved(self) -> int:
        return self.inner.moved

    def give(self, dtype: torch.dtype, start: int, stop: int, parts: Sequence[Part] = ()) -> None:
        self._count(lambda: self.inner.give(dtype, start, stop, parts))

    def wait(self) -> float:
        return self._count(self.inner.wait)

    def finish(self) -> None:
        self._count(self.inner.finish)

    def _count(self, action: Callable[[], T]) -> T:
        start, before = time.perf_counter(), self.moved
        result = action()
        self.meter.seconds += time.perf_counter() - start
        self.meter.bytes_received += self.moved - before
        self.meter.bytes_sent += self.moved - before
        return result

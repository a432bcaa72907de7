"""The Comm protocol: ranks exchange flat tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from paceline.errors import CommError


class Work(Protocol):
    """A send or receive in progress. The tensor belongs to the transport until `wait` returns."""

    def wait(self) -> None:
        """Return when it is done; raise CommTimeout, naming both ranks, after the communicator's timeout."""


@dataclass(frozen=True)
class Part:
    """Values of a rank's own vector, from `start` on, that are elsewhere and still have to be multiplied."""

    start: int
    values: Tensor
    factor: float


class SharedSum(Protocol):
    """Vectors of all ranks, one for each dtype, and their sum, in memory that the ranks share.

    A rank writes to `mine`, and gives spans of it, in the same order on all ranks. After `finish`, all ranks read the
    sums in `total`, which is one memory for all: nobody else may write to it.
    """

    @property
    def moved(self) -> int:
        """Bytes that this rank has read of other ranks' vectors and sums: as many as they have read of its own."""

    @property
    def mine(self) -> Mapping[torch.dtype, Tensor]: ...

    @property
    def total(self) -> Mapping[torch.dtype, Tensor]: ...

    def give(self, dtype: torch.dtype, start: int, stop: int, parts: Sequence[Part] = ()) -> None:
        """This span of `mine` is complete, and stays so until `finish`. Spans that all ranks have given are summed:
        each rank sums its own slice (`layout.share`). What it alone reads, in that slice, need not be in `mine`: it may
        be in `parts`, in their order.
        """

    def wait(self) -> float:
        """Return when this rank's slice of each span that was given is summed; then it may change `mine` again, as
        soon as all ranks have come so far. If squares were asked for: returns the sum of the squares of what it has
        summed since the last wait.
        """

    def finish(self) -> None:
        """Return when all spans that were given are summed."""


class Comm(ABC):
    """A group of ranks.

    Tensors are one-dimensional and contiguous. Messages between two ranks with the same tag arrive in the order they
    were sent; the receiver knows the length. A send may wait for its receive: post receives before waiting for sends.
    Every wait ends after `timeout` seconds with CommTimeout; the communicator cannot be used afterwards.
    Only one thread may use a communicator at a time; `dup` creates one for a second thread.
    """

    transport: str
    rank: int
    size: int
    timeout: float
    device = torch.device("cpu")
    numbers: tuple[int, ...] | None = None  # of a group: the world ranks of its ranks
    shares_memory = False  # has `shared_sum` and `shared_vector`
    allows_threads = True  # two threads may communicate at the same time, each with its own communicator
    # Called from another thread when a wait that cannot be interrupted exceeds its deadline; the rank must then exit.
    on_stuck: Callable[[CommError], object] | None = None

    @abstractmethod
    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def allreduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, with the transport's own algorithm."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> None: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def group(self, ranks: list[int]) -> Comm:
        """A communicator of these ranks, in this order. All of them must call it, with the same list."""

    @abstractmethod
    def abort(self, reason: str, code: int = 1) -> None:
        """Make every rank's waits fail, because this rank cannot continue; `code`: exit code of ended processes."""

    @abstractmethod
    def close(self) -> None:
        """Close sockets and stop threads; may be called twice."""

    def shared_sum(self, lengths: Mapping[torch.dtype, int], *, squares: bool = False) -> SharedSum:
        """Memory to sum vectors of these lengths in, without sending them. All ranks must call it. It uses this
        communicator, which does nothing else while there are spans that were given and are not summed. With `squares`,
        the sums are also squared.
        """
        raise CommError(f"ranks share no memory over {self.transport}")

    def shared_vector(self, dtype: torch.dtype, length: int) -> Tensor:
        """One vector in memory that all ranks share; all must call this."""
        raise CommError(f"ranks share no memory over {self.transport}")

    def read_records(self, path: Path, offsets: Tensor, length: int) -> Tensor:
        """Read `length` bytes at each of this rank's offsets in a file, [offsets, length]; all ranks must call it."""
        raise CommError(f"{self.transport} cannot read files collectively: only mpi can")

    def name(self, rank: int | None = None) -> int:
        """The world rank of a rank of this group (by default this one), for messages."""
        rank = self.rank if rank is None else rank
        return self.numbers[rank] if self.numbers else rank

    def named(self, ranks: list[int]) -> tuple[int, ...] | None:
        """The `numbers` of a group of these ranks; None if they equal the ranks."""
        return None if self.numbers is None and ranks == list(range(self.size)) else tuple(map(self.name, ranks))

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.irecv(tensor, source, tag).wait()

    def dup(self) -> Comm:
        """A communicator of the same ranks, whose messages are separate."""
        return self.group(list(range(self.size)))

    def split(self, color: int, key: int = 0) -> Comm:
        """One communicator per color, its ranks ordered by key, then by rank. All ranks must call it."""
        table = torch.zeros(self.size, 2, dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor([color, key])
        self.allreduce(table.view(-1))
        chosen = table.tolist()
        return self.group(sorted((r for r in range(self.size) if chosen[r][0] == color), key=lambda r: chosen[r][1]))

    def check(self, tensor: Tensor, peer: int | None = None) -> None:
        """Refuse calls that would hang or silently overwrite data."""
        assert tensor.dim() == 1, f"the tensor must be flat, not of shape {tuple(tensor.shape)}"
        assert tensor.is_contiguous(), "the tensor must be contiguous"
        if peer is not None and (peer == self.rank or not 0 <= peer < self.size):
            raise CommError(f"rank {self.rank} of {self.size} cannot exchange messages with rank {peer}", peer)

    def __deepcopy__(self, _memory: object) -> Self:
        """Copies of what uses a communicator use the same one."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def whoami(comm: Comm) -> str:
    """This rank, for messages."""
    return f"rank {comm.name()} {f'in a group of {comm.size}' if comm.numbers else f'of {comm.size}'}"


def lost(comm: Comm, peer: int | None) -> int | None:
    """The world rank of the peer that an error is about."""
    return None if peer is None else comm.name(peer)


def took_too_long(comm: Comm, what: str, peer: int | None = None, tag: int | None = None) -> str:
    """The message of a CommTimeout; messages have tags, collectives do not."""
    whom = "the other ranks" if peer is None else f"rank {comm.name(peer)}"
    whom += "" if peer is None or tag is None else f" (tag {tag})"
    return f"{whoami(comm)} waited {comm.timeout:g} s to {what} {whom} over {comm.transport}"

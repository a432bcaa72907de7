"""The Comm protocol: ranks that send flat tensors to each other."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import torch
from torch import Tensor

from paceline.errors import CommError


class Work(Protocol):
    """A send or receive under way. The tensor belongs to the transport until `wait` returns."""

    def wait(self) -> None:
        """Return when it is done; raise CommTimeout, naming both ranks, once the communicator's timeout has passed."""


class Comm(ABC):
    """A group of ranks.

    Tensors are one-dimensional and contiguous. Messages between two ranks with the same tag arrive in the order they
    were sent; the receiver knows the length. A send may wait for its receive: post receives before waiting for sends.
    Every wait ends after `timeout` seconds with CommTimeout, and the communicator is then of no more use.
    One thread uses a communicator at a time; `dup` gives a second thread its own.
    """

    transport: str
    rank: int
    size: int
    timeout: float
    device = torch.device("cpu")
    numbers: tuple[int, ...] | None = None  # of a group: what its ranks are called in the world
    allows_threads = True  # two threads may communicate at once, each over a communicator of its own
    # Called, from another thread, when a wait that cannot be interrupted outlives its deadline; the rank must end then.
    on_stuck: Callable[[CommError], object] | None = None

    @abstractmethod
    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work: ...

    @abstractmethod
    def allreduce(self, tensor: Tensor) -> None:
        """Sum over all ranks, in place, by the transport's own algorithm."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, root: int = 0) -> None: ...

    @abstractmethod
    def barrier(self) -> None: ...

    @abstractmethod
    def group(self, ranks: list[int]) -> Comm:
        """A communicator of these ranks of this one, in this order. All of them call it, with the same list."""

    @abstractmethod
    def abort(self, reason: str, code: int = 1) -> None:
        """End every rank's waits, now or soon: this rank cannot go on. Where that ends processes, `code` is theirs."""

    @abstractmethod
    def close(self) -> None:
        """Give back sockets and threads. Closing twice is fine."""

    def read_records(self, path: Path, offsets: Tensor, length: int) -> Tensor:
        """`length` bytes at each of this rank's offsets in a file, [offsets, length]; all ranks call it together."""
        raise CommError(f"{self.transport} cannot read files: only MPI's ranks can, together")

    def name(self, rank: int | None = None) -> int:
        """What a rank of this group, or this one, is called in the world: the number that people know."""
        rank = self.rank if rank is None else rank
        return self.numbers[rank] if self.numbers else rank

    def named(self, ranks: list[int]) -> tuple[int, ...] | None:
        """The `numbers` of a group of these ranks; none where all have their own."""
        return None if self.numbers is None and ranks == list(range(self.size)) else tuple(map(self.name, ranks))

    def send(self, tensor: Tensor, to: int, tag: int = 0) -> None:
        self.isend(tensor, to, tag).wait()

    def recv(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        self.irecv(tensor, source, tag).wait()

    def dup(self) -> Comm:
        """The same ranks again, with messages of their own."""
        return self.group(list(range(self.size)))

    def split(self, color: int, key: int = 0) -> Comm:
        """One communicator for each color, its ranks ordered by key, then by rank here. All ranks call it."""
        table = torch.zeros(self.size, 2, dtype=torch.int64, device=self.device)
        table[self.rank] = torch.tensor([color, key])
        self.allreduce(table.view(-1))
        chosen = table.tolist()
        return self.group(sorted((r for r in range(self.size) if chosen[r][0] == color), key=lambda r: chosen[r][1]))

    def check(self, tensor: Tensor, peer: int | None = None) -> None:
        """Refuse what would hang or overwrite silently."""
        assert tensor.dim() == 1, f"a flat tensor is expected, not one of shape {tuple(tensor.shape)}"
        assert tensor.is_contiguous(), "a contiguous tensor is expected"
        if peer is not None and (peer == self.rank or not 0 <= peer < self.size):
            raise CommError(f"rank {self.rank} of {self.size} cannot exchange messages with rank {peer}", peer)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def whoami(comm: Comm) -> str:
    """This rank, in words."""
    return f"rank {comm.name()} {f'in a group of {comm.size}' if comm.numbers else f'of {comm.size}'}"


def lost(comm: Comm, peer: int | None) -> int | None:
    """The peer that an error is about, as the world calls it."""
    return None if peer is None else comm.name(peer)


def took_too_long(comm: Comm, what: str, peer: int | None = None, tag: int = 0) -> str:
    """The message of a CommTimeout."""
    whom = "the other ranks" if peer is None else f"rank {comm.name(peer)} (tag {tag})"
    return f"{whoami(comm)} waited {comm.timeout:g} s to {what} {whom} over {comm.transport}"

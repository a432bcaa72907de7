"""MPI through mpi4py's buffer calls."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.comm.base import Comm, Work, took_too_long
from paceline.errors import CommError, CommTimeout

# How long a wait looks again at once before it sleeps between looks: a message of a few MB takes about this long.
SPIN_SECONDS = 0.002
NAP_SECONDS = 0.0001
_yield = getattr(os, "sched_yield", lambda: None)


class MpiComm(Comm):
    transport = "mpi"

    def __init__(self, comm: Any, timeout: float) -> None:
        from mpi4py import MPI

        self._comm = comm
        self._watchdog: Watchdog | None = None
        self.rank, self.size, self.timeout = comm.Get_rank(), comm.Get_size(), timeout
        self.allows_threads = MPI.Query_thread() == MPI.THREAD_MULTIPLE

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self.check(tensor, to)
        with self.guard("send to", to):
            request = self._comm.Isend(tensor.numpy(), to, tag)
        return _Transfer(self, request, tensor, "send to", to, tag)

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        self.check(tensor, source)
        with self.guard("receive from", source):
            request = self._comm.Irecv(tensor.numpy(), source, tag)
        return _Transfer(self, request, tensor, "receive from", source, tag)

    def allreduce(self, tensor: Tensor) -> None:
        """The blocking call, which is up to two and a half times as fast as the non-blocking one, but has no deadline.

        A barrier, which can be watched, comes first: that everyone has come is what may take for ever. A rank that
        stops in the middle of the sum is left to the watchdog.
        """
        from mpi4py import MPI

        self.check(tensor)
        self.barrier()
        self._watchdog = self._watchdog or Watchdog(self)
        with self.guard("sum with"), self._watchdog:
            self._comm.Allreduce(MPI.IN_PLACE, tensor.numpy())

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check(tensor)
        with self.guard("broadcast with"):
            request = self._comm.Ibcast(tensor.numpy(), root)
        self.until(request.Test, "broadcast with")

    def barrier(self) -> None:
        with self.guard("meet"):
            request = self._comm.Ibarrier()
        self.until(request.Test, "meet")

    def group(self, ranks: list[int]) -> Comm:
        everyone = self._comm.Get_group()
        chosen = everyone.Incl(ranks)
        made = self._comm.Create_group(chosen)
        chosen.Free()
        everyone.Free()
        child = MpiComm(made, self.timeout)
        child.on_stuck = self.on_stuck
        return child

    def abort(self, reason: str) -> None:
        from mpi4py import MPI

        print(f"rank {self.rank} aborts: {reason}", file=sys.stderr, flush=True)
        MPI.COMM_WORLD.Abort(1)

    def close(self) -> None:
        # Not Free(): that is collective, and a rank that closes because it failed would wait for the others.
        pass

    def until(self, done: Callable[[], bool], what: str, peer: int | None = None, tag: int = 0) -> None:
        start = time.monotonic()
        with self.guard(what, peer):
            while not done():
                waited = time.monotonic() - start
                if waited > self.timeout:
                    raise CommTimeout(took_too_long(self, what, peer, tag), peer)
                if waited > SPIN_SECONDS:
                    time.sleep(NAP_SECONDS)
                else:
                    _yield()

    @contextlib.contextmanager
    def guard(self, what: str, peer: int | None = None) -> Iterator[None]:
        """MPI's errors as ours."""
        from mpi4py import MPI

        try:
            yield
        except MPI.Exception as error:
            whom = "another rank" if peer is None else f"rank {peer}"
            raise CommError(f"rank {self.rank} of {self.size} could not {what} {whom}: {error}", peer) from error


class Watchdog:
    """Ends this rank when a blocking call, inside its `with`, outlives the deadline."""

    def __init__(self, comm: MpiComm) -> None:
        self._comm = weakref.ref(comm)
        self._since: float | None = None
        threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True).start()

    def __enter__(self) -> None:
        self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self._since = None

    def _watch(self) -> None:
        while comm := self._comm():
            since = self._since
            if since is not None and time.monotonic() - since > comm.timeout:
                error = CommTimeout(took_too_long(comm, "finish a sum with"))
                if comm.on_stuck:
                    comm.on_stuck(error)
                comm.abort(str(error))
            pause = min(1.0, comm.timeout / 4)
            del comm
            time.sleep(pause)


@dataclass
class _Transfer:
    comm: MpiComm
    request: Any
    tensor: Tensor  # kept alive until MPI is done with it
    what: str
    peer: int
    tag: int

    def wait(self) -> None:
        try:
            self.comm.until(self.request.Test, self.what, self.peer, self.tag)
        except CommTimeout:
            self.request.Cancel()  # so that nothing is written into the tensor after this
            raise


def mpi_world(timeout: float) -> MpiComm:
    """All ranks that mpiexec has started."""
    from mpi4py import MPI

    return MpiComm(MPI.COMM_WORLD.Dup(), timeout)

"""The MPI transport, with mpi4py's buffer calls."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.comm.base import Comm, Work, lost, took_too_long, whoami
from paceline.comm.seat import Seat
from paceline.errors import CommError, CommTimeout, DataError, UsageError
from paceline.messages import LOGGER

# How long a wait polls without sleeping: about the time of a message of a few MB.
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
        """Use the blocking call: it has no deadline, but is up to 2.5 times as fast as the non-blocking one."""
        from mpi4py import MPI

        self.check(tensor)
        with self.blocking("finish a sum with"):
            self._comm.Allreduce(MPI.IN_PLACE, tensor.numpy())

    def read_records(self, path: Path, offsets: Tensor, length: int) -> Tensor:
        """Read with MPI-IO: one collective read through a file view that has only this rank's records."""
        from mpi4py import MPI

        rising, order = offsets.sort()  # a file view must be in ascending order
        records = torch.empty(len(offsets), length, dtype=torch.uint8)
        record = MPI.BYTE.Create_contiguous(length).Commit()
        # An empty view is not allowed; a rank without records has a view of the first one, and reads none.
        view = record.Create_hindexed_block(1, rising.tolist() or [0]).Commit()
        try:
            with self.blocking(f"read {path} with"):
                file = MPI.File.Open(self._comm, str(path), MPI.MODE_RDONLY)
                size = file.Get_size()
                file.Set_view(0, MPI.BYTE, view)
                file.Read_all([records.numpy(), len(records), record])
                file.Close()
        finally:
            view.Free()
            record.Free()
        if len(rising) and (end := int(rising[-1]) + length) > size:  # Open MPI's status does not tell
            raise DataError(f"{path} is too short: rank {self.rank} needs {end} bytes, but it has {size}")
        out = torch.empty_like(records)
        out[order] = records
        return out

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
        child.on_stuck, child.numbers = self.on_stuck, self.named(ranks)
        return child

    def abort(self, reason: str, code: int = 1) -> None:
        from mpi4py import MPI

        LOGGER.error("rank %s aborts: %s", self.name(), reason)
        MPI.COMM_WORLD.Abort(code)

    def close(self) -> None:
        # Not Free(), which is collective: a failed rank would wait for the others.
        pass

    def until(self, done: Callable[[], bool], what: str, peer: int | None = None, tag: int = 0) -> None:
        start = time.monotonic()
        with self.guard(what, peer):
            while not done():
                waited = time.monotonic() - start
                if waited > self.timeout:
                    raise CommTimeout(took_too_long(self, what, peer, tag), lost(self, peer))
                if waited > SPIN_SECONDS:
                    time.sleep(NAP_SECONDS)
                else:
                    _yield()

    @contextlib.contextmanager
    def blocking(self, what: str) -> Iterator[None]:
        """Guards a collective call that has no deadline.

        A barrier with a deadline comes first, because waiting for all ranks to arrive can take forever. If a rank stops
        in the middle of the call, the watchdog ends the wait.
        """
        self.barrier()
        self._watchdog = self._watchdog or Watchdog(self)
        with self.guard(what), self._watchdog.over(what):
            yield

    @contextlib.contextmanager
    def guard(self, what: str, peer: int | None = None) -> Iterator[None]:
        """Turn MPI's errors into CommError."""
        from mpi4py import MPI

        try:
            yield
        except MPI.Exception as error:
            whom = "another rank" if peer is None else f"rank {self.name(peer)}"
            raise CommError(f"{whoami(self)} could not {what} {whom}: {error}", lost(self, peer)) from error


class Watchdog:
    """Ends this rank if a blocking call inside `over` exceeds the deadline."""

    def __init__(self, comm: MpiComm) -> None:
        self._comm = weakref.ref(comm)
        self._since: tuple[float, str] | None = None
        threading.Thread(target=self._watch, name="paceline-watchdog", daemon=True).start()

    @contextlib.contextmanager
    def over(self, what: str) -> Iterator[None]:
        self._since = (time.monotonic(), what)
        try:
            yield
        finally:
            self._since = None

    def _watch(self) -> None:
        while comm := self._comm():
            since = self._since
            if since is not None and time.monotonic() - since[0] > comm.timeout:
                error = CommTimeout(took_too_long(comm, since[1]))
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
            self.request.Cancel()  # so that nothing is written to the tensor later
            raise


def mpi_world(seat: Seat, timeout: float) -> MpiComm:
    """The communicator of all ranks that mpiexec has started."""
    from mpi4py import MPI

    atexit.register(_finalize)
    comm = MpiComm(MPI.COMM_WORLD.Dup(), timeout)
    if comm.size != seat.size:
        raise UsageError(
            f"{seat.launcher} has started {seat.size} ranks, but MPI has {comm.size}: "
            f"start them with mpiexec, or use --transport gloo"
        )
    return comm


def _finalize() -> None:
    """Finalize MPI, or mpiexec reports a failure; mpi4py does it too late for ranks that exit early."""
    from mpi4py import MPI

    if not MPI.Is_finalized():
        MPI.Finalize()

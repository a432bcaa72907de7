"""The gloo and nccl transports: a torch.distributed process group as a Comm, without torch's default group."""

from __future__ import annotations

import os
import stat
import weakref
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from paceline.comm.base import Comm, Work, lost, took_too_long, whoami
from paceline.comm.seat import Seat
from paceline.errors import CommError, CommTimeout, UsageError


@dataclass(frozen=True)
class Listen:
    """Where gloo's sockets listen: on a host's address, on an interface, or on the address of the host name."""

    host: str | None = None
    interface: str | None = None

    def device(self) -> Any:
        if self.host:
            return dist.ProcessGroupGloo.create_device(hostname=self.host)
        if self.interface:
            return dist.ProcessGroupGloo.create_device(interface=self.interface)
        return dist.ProcessGroupGloo.create_default_device()


LOOPBACK = Listen(host="127.0.0.1")


class ProcessGroupComm(Comm):
    def __init__(
        self, transport: str, store: Store, rank: int, size: int, timeout: float, listen: Listen, path: str
    ) -> None:
        self.transport, self.rank, self.size, self.timeout = transport, rank, size, timeout
        self._store, self._listen, self._path = store, listen, path
        self._groups: Counter[tuple[int, ...]] = Counter()
        self._children: weakref.WeakSet[ProcessGroupComm] = weakref.WeakSet()
        self._pg: Any = self._guard(self._make_group, "meet")
        if transport == "nccl":
            self.device = torch.device("cuda", torch.cuda.current_device())
        else:
            self.barrier()  # gloo fails on a rank that is still connecting while another one closes

    @property
    def _limit(self) -> timedelta:
        return timedelta(seconds=self.timeout)

    def _make_group(self) -> Any:
        store = PrefixStore(self._path, self._store)
        if self.transport == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._limit
            return dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = self._limit
        options._devices = [self._listen.device()]
        return dist.ProcessGroupGloo(store, self.rank, self.size, options)

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self.check(tensor, to)
        return _Transfer(self, self._guard(lambda: self._pg.send([tensor], to, tag), "send to", to, tag),
                         tensor, "send to", to, tag)  # fmt: skip

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        self.check(tensor, source)
        return _Transfer(self, self._guard(lambda: self._pg.recv([tensor], source, tag), "receive from", source, tag),
                         tensor, "receive from", source, tag)  # fmt: skip

    def allreduce(self, tensor: Tensor) -> None:
        self.check(tensor)
        options = dist.AllreduceOptions()
        options.timeout = self._limit
        self._guard(lambda: self._pg.allreduce([tensor], options).wait(), "sum with")

    def broadcast(self, tensor: Tensor, root: int = 0) -> None:
        self.check(tensor)
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = root, self._limit
        self._guard(lambda: self._pg.broadcast([tensor], options).wait(), "broadcast with")

    def barrier(self) -> None:
        options = dist.BarrierOptions()
        options.timeout = self._limit
        self._guard(lambda: self._pg.barrier(options).wait(), "meet")

    def group(self, ranks: list[int]) -> Comm:
        # The n-th call for these ranks matches the n-th call on the other ranks.
        self._groups[tuple(ranks)] += 1
        path = f"{self._path}/{self._groups[tuple(ranks)]}:{','.join(map(str, ranks))}"
        child = ProcessGroupComm(
            self.transport, self._store, ranks.index(self.rank), len(ranks), self.timeout, self._listen, path
        )
        child.numbers = self.named(ranks)
        self._children.add(child)
        return child

    def abort(self, reason: str, code: int = 1) -> None:
        # Peers see the connections close.
        for child in self._children:
            child.abort(reason)
        self.close()

    def close(self) -> None:
        self._pg = None

    def _guard(self, call: Any, what: str, peer: int | None = None, tag: int = 0) -> Any:
        """Run the call; only the text of torch's RuntimeError tells a timeout from a lost peer."""
        try:
            return call()
        except RuntimeError as error:
            text = str(error)
            if "timed out" in text.lower() or "timeout" in text.lower():
                raise CommTimeout(took_too_long(self, what, peer, tag), lost(self, peer)) from error
            whom = "another rank" if peer is None else f"rank {self.name(peer)}"
            raise CommError(
                f"{whoami(self)} lost {whom} while trying to {what} it over {self.transport}: {text.splitlines()[0]}",
                lost(self, peer),
            ) from error


@dataclass
class _Transfer:
    comm: ProcessGroupComm
    work: Any
    tensor: Tensor  # kept alive until the transport is done with it
    what: str
    peer: int
    tag: int

    def wait(self) -> None:
        self.comm._guard(lambda: self.work.wait(self.comm._limit), self.what, self.peer, self.tag)


def process_group_world(
    transport: str,
    store: Store,
    rank: int,
    size: int,
    timeout: float,
    listen: Listen = LOOPBACK,
    attempt: int = 0,
) -> ProcessGroupComm:
    """The communicator of all ranks that share the store, in this attempt."""
    store.set_timeout(timedelta(seconds=timeout))
    return ProcessGroupComm(transport, store, rank, size, timeout, listen, f"world-{attempt}")


def gloo_world(seat: Seat, timeout: float) -> Comm:
    return _world("gloo", seat, timeout)


def nccl_world(seat: Seat, timeout: float) -> Comm:
    return _world("nccl", seat, timeout)


def _world(transport: str, seat: Seat, timeout: float) -> Comm:
    listen = LOOPBACK if seat.one_node else Listen(interface=seat.interface)
    return process_group_world(transport, store_of(seat, timeout), seat.rank, seat.size, timeout, listen, seat.attempt)


def store_of(seat: Seat, timeout: float) -> Any:
    """The store through which ranks exchange their addresses."""
    if seat.store_file:
        private_folder(Path(seat.store_file).parent)
        return dist.FileStore(seat.store_file, seat.size)
    if seat.address is None:
        raise UsageError(
            f"{seat.launcher} has started ranks on several nodes, but there is no rendezvous address: "
            f"set MASTER_ADDR to the first node's name, or use --transport mpi"
        )
    try:
        return dist.TCPStore(*seat.address, seat.size, is_master=seat.hosts_store, timeout=timedelta(seconds=timeout),
                             multi_tenant=True)  # fmt: skip
    except dist.DistError as error:
        host, port = seat.address
        raise CommTimeout(
            f"rank {seat.rank} of {seat.size} waited {timeout:g} s for the rendezvous at {host}:{port}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def private_folder(folder: Path) -> None:
    """Create a folder that only this user can enter; refuse an existing one of another user."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{folder} is not a private folder of this user; remove it and start again")

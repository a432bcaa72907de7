"""From a seat to a communicator."""

from __future__ import annotations

import atexit
import os
import shutil
import stat
from datetime import timedelta
from pathlib import Path
from typing import Any

from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.errors import CommTimeout, UsageError, unknown
from paceline.launch.env import Seat, find_seat


def connect(transport: str = "auto", timeout: float = 120.0, seat: Seat | None = None) -> Comm:
    """The communicator of all ranks that torchrun, mpiexec, srun or paceline has started; a world of one otherwise."""
    seat = seat or find_seat()
    if seat is None or seat.size == 1:
        return SingleComm(timeout)
    atexit.register(leave, seat)
    if transport == "auto":
        transport = "mpi" if seat.launcher == "mpiexec" else "gloo"
    if transport == "mpi":
        from paceline.comm.mpi import mpi_world

        comm = mpi_world(timeout)
        if comm.size != seat.size:
            raise UsageError(
                f"{seat.launcher} has started {seat.size} ranks, but MPI knows of {comm.size}: "
                f"start them with mpiexec, or use --transport gloo"
            )
        return comm
    if transport not in ("gloo", "nccl"):
        raise unknown("transport", transport, ("auto", "gloo", "nccl", "mpi"))
    from paceline.comm.process_group import LOOPBACK, Listen, process_group_world

    listen = LOOPBACK if seat.one_node else Listen(interface=seat.interface)
    return process_group_world(transport, store_of(seat, timeout), seat.rank, seat.size, timeout, listen, seat.attempt)


def store_of(seat: Seat, timeout: float) -> Any:
    """Where the ranks find each other's addresses."""
    import torch.distributed as dist

    if seat.store_file:
        private_folder(Path(seat.store_file).parent)
        return dist.FileStore(seat.store_file, seat.size)
    if seat.address is None:
        raise UsageError(
            f"{seat.launcher} has started ranks on several nodes, and nothing says where they can meet: "
            f"set MASTER_ADDR to the first node's name, or use --transport mpi"
        )
    try:
        return dist.TCPStore(*seat.address, seat.size, is_master=seat.hosts_store, timeout=timedelta(seconds=timeout),
                             multi_tenant=True)  # fmt: skip
    except dist.DistError as error:
        host, port = seat.address
        raise CommTimeout(
            f"rank {seat.rank} of {seat.size} waited {timeout:g} s for the ranks' meeting point at {host}:{port}: "
            f"{str(error).splitlines()[0]}"
        ) from error


def private_folder(folder: Path) -> None:
    """A folder that only this user can enter; another user's of that name is not trusted."""
    folder.mkdir(mode=0o700, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(f"{folder} is not a private folder of this user; remove it and start again")


def leave(seat: Seat) -> None:
    """Remove the meeting point of ranks that no launcher of ours cleans up after."""
    if seat.sockets and seat.launcher != "paceline":
        shutil.rmtree(seat.sockets, ignore_errors=True)

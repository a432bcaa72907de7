"""Finds out which rank this process is; the only reader of the variables that launchers set."""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from paceline.comm.seat import Seat
from paceline.errors import UsageError
from paceline.lab.plan import LAB, LabPlan

# Set by Paceline's launcher for its ranks.
RANK, SIZE, STORE, LIVES = "PACELINE_RANK", "PACELINE_SIZE", "PACELINE_STORE", "PACELINE_LIVES"
LOG_LEVEL = "PACELINE_LOG_LEVEL"
# On several nodes also: the rank within its node, and the parameter servers' addresses and secret.
LOCAL, SERVERS, SECRET = "PACELINE_LOCAL", "PACELINE_SERVERS", "PACELINE_SECRET"


# Slurm gives batch scripts and interactive shells step numbers from here on.
FIRST_SPECIAL_STEP = 0xFFFF_FFF0


def find_seat(env: Mapping[str, str] = os.environ) -> Seat | None:
    """The seat that a launcher gave this process, or None in a plain shell. The innermost launcher counts."""
    for find in (_local, _torchrun, _open_mpi, _pmi, _slurm):
        seat = find(env)
        if seat:
            if not 0 <= seat.rank < seat.size:
                raise UsageError(f"{seat.launcher} set an impossible rank: {seat.rank} of {seat.size} ranks")
            return in_lab(seat, env)
    return None


def log_level(env: Mapping[str, str] = os.environ) -> int:
    """How much our launcher was asked to say, for the ranks that it starts."""
    return _number(env, LOG_LEVEL, logging.INFO)


def find_lab(env: Mapping[str, str] = os.environ) -> tuple[LabPlan, str] | None:
    """The lab that this process is in, and the name of its node."""
    about = describe_lab(env)
    return (LabPlan.from_json(env[LAB]), about["node"]) if about else None


def describe_lab(env: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The description that a lab gives to the programs on its nodes."""
    found: dict[str, Any] | None = json.loads(env[LAB]) if LAB in env else None
    return found


def in_lab(seat: Seat, env: Mapping[str, str] = os.environ) -> Seat:
    """The seat, with the speed and the noise of its node if it is in a lab."""
    lab = find_lab(env)
    if lab is None:
        return seat
    node = lab[0].node(lab[1])
    return replace(seat, in_lab=True, speed=node.speed, noise=node.noise)


def _local(env: Mapping[str, str]) -> Seat | None:
    if RANK not in env:
        return None
    rank, size, lives = _number(env, RANK), _number(env, SIZE), _number(env, LIVES, 0)
    store = env.get(STORE)
    if store is None or not store.startswith("tcp://"):
        return Seat(rank, size, rank, size, "paceline", store_file=store, sockets=store and os.path.dirname(store),
                    lives=lives)  # fmt: skip
    host, _, port = store.removeprefix("tcp://").rpartition(":")
    local_rank, local_size = (int(number) for number in env[LOCAL].split("/"))
    return Seat(rank, size, local_rank, local_size, "paceline", (host, int(port)), rank == 0, lives=lives,
                servers=tuple(env.get(SERVERS, "").split()), secret=env.get(SECRET))  # fmt: skip


def _torchrun(env: Mapping[str, str]) -> Seat | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "MASTER_ADDR" not in env:
        raise UsageError("RANK and WORLD_SIZE are set but MASTER_ADDR is not: start with torchrun, or unset them")
    here = env["MASTER_ADDR"] in ("localhost", "127.0.0.1", "::1")
    local_size = _number(env, "LOCAL_WORLD_SIZE", size if here else 1)
    local_rank = _number(env, "LOCAL_RANK", rank if here else 0)
    agent = env.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = env["MASTER_ADDR"], _number(env, "MASTER_PORT", 29500)
    attempt = _number(env, "TORCHELASTIC_RESTART_COUNT", 0)
    sockets = _private_name(f"torchrun-{address[1]}-{attempt}") if local_size == size else None
    return Seat(rank, size, local_rank, local_size, "torchrun", address, rank == 0 and not agent, attempt=attempt,
                interface=env.get("GLOO_SOCKET_IFNAME"), sockets=sockets)  # fmt: skip


def _open_mpi(env: Mapping[str, str]) -> Seat | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    rank, size = _number(env, "OMPI_COMM_WORLD_RANK"), _number(env, "OMPI_COMM_WORLD_SIZE")
    local_rank = _number(env, "OMPI_COMM_WORLD_LOCAL_RANK", rank)
    local_size = _number(env, "OMPI_COMM_WORLD_LOCAL_SIZE", size)
    job = env.get("PMIX_NAMESPACE", "")
    return _meeting(env, rank, size, local_rank, local_size, "mpiexec", f"ompi-{job}")


def _pmi(env: Mapping[str, str]) -> Seat | None:
    if "PMI_RANK" not in env or "PMI_SIZE" not in env:
        return None
    if "SLURM_STEP_ID" in env and "MPI_LOCALRANKID" not in env:
        return None  # set by srun itself; MPICH's mpiexec, which starts its helpers with srun, sets more
    rank, size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
    local_rank = _number(env, "MPI_LOCALRANKID", rank)
    local_size = _number(env, "MPI_LOCALNRANKS", size)
    return _meeting(env, rank, size, local_rank, local_size, "mpiexec", f"pmi-{os.getppid()}")


def _slurm(env: Mapping[str, str]) -> Seat | None:
    # Batch scripts and interactive shells have SLURM_PROCID, too, but no ordinary step number: only what srun started
    # is a rank. A single task (srun --pty bash) is a shell.
    if "SLURM_PROCID" not in env or _number(env, "SLURM_STEP_ID", FIRST_SPECIAL_STEP) >= FIRST_SPECIAL_STEP:
        return None
    rank = _number(env, "SLURM_PROCID")
    size = _number(env, "SLURM_STEP_NUM_TASKS", _number(env, "SLURM_NTASKS", 1))
    if size == 1:
        return None
    per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE", str(size)))
    node = _number(env, "SLURM_NODEID", 0)
    local_size = per_node[node] if node < len(per_node) else 1
    job = f"slurm-{env.get('SLURM_JOB_ID', '')}.{env['SLURM_STEP_ID']}.{env.get('SLURM_RESTART_COUNT', '0')}"
    return _meeting(env, rank, size, _number(env, "SLURM_LOCALID", rank), local_size, "srun", job)


def _meeting(
    env: Mapping[str, str], rank: int, size: int, local_rank: int, local_size: int, launcher: str, job: str
) -> Seat:
    """Ranks on one node rendezvous in a file named after the job; others at MASTER_ADDR, or on Slurm's first node."""
    if local_size == size:
        folder = _private_name(job)
        store = os.path.join(folder, "store")
        return Seat(rank, size, local_rank, local_size, launcher, store_file=store, sockets=folder)
    # Ranks of mpiexec run inside steps that mpiexec created, which differ from node to node.
    nodes = env.get("SLURM_STEP_NODELIST") if launcher == "srun" else None
    host = env.get("MASTER_ADDR") or _first_host(nodes or env.get("SLURM_JOB_NODELIST", ""))
    # Two jobs, or two steps of a job, need different ports; this range is below the ephemeral ports.
    step = _number(env, "SLURM_STEP_ID", 0) if launcher == "srun" else 0
    own_port = 15_000 + (_number(env, "SLURM_JOB_ID", 0) * 31 + step) % 10_000
    address = (host, _number(env, "MASTER_PORT", own_port)) if host else None
    return Seat(rank, size, local_rank, local_size, launcher, address, rank == 0,
                interface=env.get("GLOO_SOCKET_IFNAME"))  # fmt: skip


def _private_name(job: str) -> str:
    """The path of a folder of this user, the same for all ranks of a job on a node."""
    return os.path.join(tempfile.gettempdir(), f"paceline-{os.getuid()}-{re.sub(r'[^A-Za-z0-9.-]', '_', job)}")


def _tasks_per_node(text: str) -> list[int]:
    """Slurm's compressed list: 2(x3),1 gives 2, 2, 2, 1."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def _first_host(nodes: str) -> str | None:
    """The first of Slurm's compressed list: n[003-005,9],m1 gives n003."""
    match = re.match(r"([^\[,]+)(?:\[(\d+)[^\]]*\]([^,]*))?", nodes)
    return match and match.group(1) + (match.group(2) or "") + (match.group(3) or "")


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None and default is not None:
        return default
    if text is None or not (text.isascii() and text.isdigit()):
        raise UsageError(f"the launcher's variable {name} is {text!r}; it must be a number")
    return int(text)

"""What ranks agree on before they train: the same spec, the run folder, and who they are."""

from __future__ import annotations

import hashlib
import os
import platform
import socket
import sys
from pathlib import Path
from typing import Any

import torch

from paceline.comm.base import Comm
from paceline.comm.words import share_text
from paceline.errors import AgreedError
from paceline.launch.env import describe_lab
from paceline.run.records import SCHEMA
from paceline.spec import Resolved


def agree_on_spec(resolved: Resolved, comm: Comm) -> None:
    """Raise an error if a rank was started with other options than rank 0."""
    mine = hashlib.sha256(repr(resolved.spec).encode()).hexdigest()
    theirs = share_text(mine, comm)
    different = [rank for rank, digest in enumerate(theirs) if digest != theirs[0]]
    if different:
        raise AgreedError(
            f"rank {different[0]} was started with different options than rank 0: start all ranks with the same command"
        )


def describe_ranks(comm: Comm) -> dict[str, Any]:
    """The content of env.json: the ranks and their hardware."""
    rows = [row.rsplit(" ", 1) for row in share_text(f"{socket.gethostname()} {os.getpid()}", comm)]
    ranks = [{"rank": rank, "role": "worker", "host": host, "pid": int(pid)} for rank, (host, pid) in enumerate(rows)]
    return describe(ranks)


def describe(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of env.json for these ranks, each with its role, host and process."""
    return {
        "schema": SCHEMA,
        "ranks": ranks,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        "command": sys.argv,
        "lab": describe_lab(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")

"""A run with parameter servers whose ranks are threads of the test, over real sockets."""

from __future__ import annotations

import shutil
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from fitting import fitting
from safetensors.torch import load_file
from torch import Tensor

from paceline.comm.metered import MeteredComm
from paceline.comm.single import SingleComm
from paceline.launch.folder import begin_summary
from paceline.run.recorder import Recorder
from paceline.run.records import Summary
from paceline.server.roles import Meeting
from paceline.server.sockets import Listener
from paceline.spec import RunSpec, resolve
from paceline.strategies.parameter_server.engine import Membership
from paceline.strategies.setup import choose_place
from paceline.training.console import Console
from paceline.training.driver import Job, train

PATIENCE = 60.0
SECRET = bytes(range(32))
Meddle = Callable[[Meeting], AbstractContextManager[Meeting]]


class Killed(BaseException):
    """A rank ends here, and tells nobody."""


@contextmanager
def meeting(wire: str, servers: int) -> Iterator[Meeting]:
    """Sockets of files in a private folder, or on loopback with and without encryption."""
    folder = tempfile.mkdtemp(prefix="paceline-test-", dir="/dev/shm")
    if wire == "ipc":
        endpoints = tuple(f"ipc://{folder}/{i}" for i in range(servers))
    else:
        endpoints = tuple(f"tcp://127.0.0.1:{port}" for port in free_ports(servers))
    try:
        yield Meeting(endpoints, 7, wire, SECRET if wire == "curve" else None)
    finally:
        shutil.rmtree(folder)


def free_ports(count: int) -> list[int]:
    """Ports of loopback on which nobody listened a moment ago."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def train_served(
    values: dict[str, Any],
    folder: Path,
    wire: str = "ipc",
    meddle: Meddle = nullcontext,
    stop: Callable[[int], bool] = lambda rank: False,
    never: Collection[int] = (),
) -> tuple[Summary, dict[str, Tensor]]:
    """Train as the values say; the summary, and the weights, of which emulated compute saves none.

    `meddle` says where workers find what is at a meeting; `stop` whether a rank has been asked to stop, or raises
    Killed; workers of the ranks `never` are not started, and the leader knows it.
    """
    spec = resolve(("test", fitting(values))).spec
    summary, errors = begin_summary(spec), dict[int, str]()
    torch.set_num_threads(1)

    def body(rank: int, where: Meeting) -> None:
        try:
            _run_rank(spec, where, rank, folder, summary, partial(stop, rank), dict.fromkeys(never, "never started"))
        except Killed:
            pass
        except BaseException:  # noqa: BLE001  shown by the test
            errors[rank] = traceback.format_exc()

    def start(ranks: Iterable[int], where: Meeting) -> list[threading.Thread]:
        threads = [threading.Thread(target=body, args=(rank, where), daemon=True) for rank in ranks]
        for thread in threads:
            thread.start()
        return threads

    servers = spec.servers or 1
    with meeting(wire, servers) as where:
        threads = start(range(servers), where)
        with meddle(where) as theirs:
            threads += start((rank for rank in range(servers, spec.ranks) if rank not in never), theirs)
            deadline = time.monotonic() + PATIENCE
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    assert not stuck, f"ranks {stuck} did not end in {PATIENCE} s"
    if errors:
        pytest.fail("\n".join(f"--- rank {rank}:\n{text}" for rank, text in sorted(errors.items())))
    return summary, {} if spec.emulated else load_file(folder / "model.safetensors")


def _run_rank(
    spec: RunSpec,
    where: Meeting,
    rank: int,
    folder: Path,
    summary: Summary,
    stop: Callable[[], bool],
    gone: dict[int, str],
) -> None:
    about = {"host": "here", "pid": 0}
    leads, serves = rank == 0, rank < (spec.servers or 1)
    listener = Listener(where.endpoints[rank], where.secret) if serves else None

    def opened(told: dict[str, str]) -> Recorder | None:
        path = Path(told["folder"])
        return None if serves else Recorder(path, rank)

    member = Membership(where, listener, rank, 1000 + rank, about, opened, gone=lambda: gone, folder=folder)
    job = Job(spec, MeteredComm(SingleComm()), choose_place(spec, 0), Console(None), stop,
              summary if leads else begin_summary(spec), member)  # fmt: skip
    if not leads:
        train(job)
        return
    with closing(Recorder(folder, 0)) as recorder:
        train(job.opened(folder, recorder))

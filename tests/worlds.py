"""Worlds of real ranks that live for the whole test session and run cases that tests send them.

A case is a function `case(comm, **arguments)` that returns something JSON can hold. Ranks are threads, processes over
gloo, or processes that a real mpiexec started; a rank that does not answer in time fails the test by name.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from paceline.comm.single import SingleComm
from paceline.comm.threads import thread_world
from paceline.launch import env as names
from paceline.launch.spawn import Process, _mpi_variables, _mpiexec_command
from paceline.launch.zygote import Zygote

HERE = Path(__file__).parent
TRANSPORTS = ("threads", "shm", "gloo", "mpi")
PATIENCE = 60.0
COMM_TIMEOUT = 20.0

VARIABLES = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE)}
ZYGOTE = "from paceline.launch import zygote; zygote.main(['rank_process'], 'run')"

Case = Callable[..., Any]


class World(Protocol):
    transport: str
    size: int

    def run(self, case: Case, **arguments: Any) -> list[Any]:
        """Run the case on every rank; the results by rank."""

    def close(self) -> None: ...


class ThreadWorld:
    transport = "threads"

    def __init__(self, size: int) -> None:
        self.size = size

    def run(self, case: Case, **arguments: Any) -> list[Any]:
        comms = thread_world(self.size, COMM_TIMEOUT) if self.size > 1 else [SingleComm()]
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}

        def body(rank: int) -> None:
            try:
                results[rank] = case(comms[rank], **arguments)
            except BaseException:  # noqa: BLE001  shown by the test
                errors[rank] = traceback.format_exc()
                comms[rank].abort("the case failed")

        threads = [threading.Thread(target=body, args=(r,), daemon=True) for r in range(self.size)]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + PATIENCE
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        stuck = [r for r, thread in enumerate(threads) if thread.is_alive()]
        assert not stuck, f"ranks {stuck} of {self.size} (threads) did not answer in {PATIENCE} s"
        _raise(errors, "threads")
        return [results[r] for r in range(self.size)]

    def close(self) -> None:
        pass


class ProcessWorld:
    """Ranks that connect to a Unix socket of ours and wait there for cases."""

    def __init__(self, transport: str, size: int, zygote: Zygote | None = None) -> None:
        self.transport, self.size, self.zygote = transport, size, zygote
        self.folder = Path(tempfile.mkdtemp(prefix="paceline-test-", dir="/dev/shm"))
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.folder / "s"))
        listener.listen(size)
        listener.settimeout(PATIENCE)
        self.processes = self._start()
        self.lines: dict[int, Any] = {}
        for _ in range(size):
            connection, _ = listener.accept()
            stream = connection.makefile("rw")
            self.lines[int(stream.readline())] = (connection, stream)
        listener.close()

    def _start(self) -> list[Process]:
        arguments = [str(self.folder / "s"), self.transport]
        if self.zygote is None:
            command = [*_mpiexec_command(self.size), sys.executable, str(HERE / "rank_process.py"), *arguments]
            variables = _mpi_variables(self.folder, VARIABLES)
            return [subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, start_new_session=True)]
        seats: list[dict[str, str]] = [
            {names.RANK: str(r), names.SIZE: str(self.size), names.STORE: str(self.folder / "store" / "f")}
            for r in range(self.size)
        ]
        return [self.zygote.fork(f"rank-{r}", arguments, seat) for r, seat in enumerate(seats)]

    def run(self, case: Case, **arguments: Any) -> list[Any]:
        order = json.dumps({"case": f"{case.__module__}:{case.__name__}", "arguments": arguments})
        for _, stream in self.lines.values():
            stream.write(order + "\n")
            stream.flush()
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE
        while len(answers) < self.size:
            waiting = {connection: r for r, (connection, _) in self.lines.items() if r not in answers}
            ready, _, _ = select.select(list(waiting), [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                pytest.fail(f"ranks {sorted(waiting.values())} of {self.size} ({self.transport}) did not answer")
            for connection in ready:
                line = self.lines[waiting[connection]][1].readline()
                answers[waiting[connection]] = json.loads(line) if line else {"error": "the rank's process has gone"}
        errors = {r: answer["error"] for r, answer in answers.items() if "error" in answer}
        if errors:
            self.close()
        _raise(errors, self.transport)
        return [answers[r]["result"] for r in range(self.size)]

    def release(self) -> None:
        """Let the ranks end, without waiting for them."""
        for connection, stream in self.lines.values():
            with contextlib.suppress(OSError):
                stream.close()
            connection.close()

    def close(self) -> None:
        self.release()
        for process in self.processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            with contextlib.suppress(ProcessLookupError):
                assert process.pid is not None
                os.killpg(process.pid, signal.SIGTERM if self.transport == "mpi" else signal.SIGKILL)
            process.wait(10)
        self.processes = []
        shutil.rmtree(self.folder, ignore_errors=True)


def _raise(errors: dict[int, str], transport: str) -> None:
    if errors:
        pytest.fail("\n".join(f"--- rank {r} ({transport}):\n{text}" for r, text in sorted(errors.items())))


class Worlds:
    """The worlds that have been started, by transport and size."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], World] = {}
        self._zygote: Zygote | None = None  # of all worlds on gloo

    def get(self, transport: str, size: int) -> World:
        world = self._open.get((transport, size))
        if world is None or (isinstance(world, ProcessWorld) and not world.processes):
            world = self._open[transport, size] = self._start(transport, size)
        return world

    def _start(self, transport: str, size: int) -> World:
        if transport == "threads" or size == 1:
            return ThreadWorld(size)
        if transport == "mpi":
            return ProcessWorld(transport, size)
        self._zygote = self._zygote or Zygote([sys.executable, "-c", ZYGOTE], VARIABLES, None)
        return ProcessWorld(transport, size, self._zygote)

    def close(self) -> None:
        for world in self._open.values():
            if isinstance(world, ProcessWorld):
                world.release()
        for world in self._open.values():
            world.close()
        if self._zygote:
            self._zygote.kill()


def serve(comm: Any, path: str) -> None:
    """A rank's side: run the cases that come, until the socket closes."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    stream = connection.makefile("rw")
    stream.write(f"{comm.rank}\n")
    stream.flush()
    torch.set_num_threads(1)
    for line in stream:
        order = json.loads(line)
        module, name = order["case"].split(":")
        try:
            answer = {"result": getattr(importlib.import_module(module), name)(comm, **order["arguments"])}
        except BaseException:  # noqa: BLE001  shown by the test
            answer = {"error": traceback.format_exc()}
        stream.write(json.dumps(answer) + "\n")
        stream.flush()


@contextlib.contextmanager
def limited_to(comm: Any, seconds: float) -> Iterator[Any]:
    """The same ranks, with a communicator whose waits end after `seconds`."""
    short = comm.dup()
    short.timeout = seconds
    yield short
    short.close()

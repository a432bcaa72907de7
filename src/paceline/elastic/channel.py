"""How workers and the registrar talk on one machine: messages over Unix sockets, and numbers in a shared file.

    worker ── hello, ready, entered or left a generation ──► registrar
           ◄── a generation ──

All is in a private folder of the run. A worker's number grows with every step, and while it waits for others: if it
stands still, the worker computes, or is stopped. The thread that trains counts, so that a worker which hangs does not
look alive.
"""

from __future__ import annotations

import contextlib
import json
import math
import mmap
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.elastic.membership import Generation
from paceline.errors import CommError, PacelineError

REGISTRAR, COUNTERS = "registrar", "counters"
MOST = 1 << 16  # bytes of a message
NAP_SECONDS = 0.01
COUNTER = struct.Struct("=Q")
HELLO, READY, ENTERED, LEFT = "hello", "ready", "entered", "left"


class Counters:
    """The numbers of all workers, in a file that they and the registrar map."""

    def __init__(self, path: Path, create: int = 0) -> None:
        """`create`: for so many workers."""
        with path.open("x+b" if create else "r+b") as file:
            if create:
                file.truncate(create * COUNTER.size)
            self._memory = mmap.mmap(file.fileno(), 0)

    def __getitem__(self, worker: int) -> int:
        (value,) = COUNTER.unpack_from(self._memory, worker * COUNTER.size)
        return int(value)

    def add(self, worker: int) -> None:
        COUNTER.pack_into(self._memory, worker * COUNTER.size, self[worker] + 1)


class Desk:
    """The registrar's side; nothing that a worker does or leaves out can block it."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.counters = Counters(folder / COUNTERS, create=workers)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._listener.bind(str(folder / REGISTRAR))
        self._listener.listen(128)
        self._workers: dict[int, socket.socket] = {}
        self._strangers: list[socket.socket] = []  # have not said yet who they are

    def wait(self, seconds: float, others: Iterable[int] = ()) -> None:
        """Return when something can be read here or from `others`, descriptors; after some seconds at the latest."""
        sockets = [self._listener, *self._workers.values(), *self._strangers]
        select.select([*(each.fileno() for each in sockets), *others], [], [], seconds)

    def messages(self) -> Iterator[tuple[int, str, int]]:
        """What has arrived: the worker, what it says, and of which generation."""
        with contextlib.suppress(BlockingIOError):
            while True:
                connection, _ = self._listener.accept()
                connection.setblocking(False)
                self._strangers.append(connection)
        for connection in list(self._strangers):
            said = self._read(connection)
            if said is not None:
                self._strangers.remove(connection)
            if said:
                self._drop(said["worker"])  # of an earlier life
                self._workers[said["worker"]] = connection
        for worker, connection in list(self._workers.items()):
            while said := self._read(connection):
                yield worker, said["what"], said["number"]
            if said is not None:
                self._drop(worker)

    def _read(self, connection: socket.socket) -> dict[str, Any] | None:
        """A message; None if there is none, and nothing in it if the connection is closed."""
        try:
            data = connection.recv(MOST)
        except BlockingIOError:
            return None
        except ConnectionResetError:
            data = b""
        if not data:
            connection.close()
            return {}
        found: dict[str, Any] = json.loads(data)
        return found

    def _drop(self, worker: int) -> None:
        if worker in self._workers:
            self._workers.pop(worker).close()

    def announce(self, generation: Generation) -> None:
        """Tell its members. Who has just ended is not told."""
        message = json.dumps(asdict(generation)).encode()
        for worker in generation.members:
            with contextlib.suppress(OSError, KeyError):
                self._workers[worker].send(message)

    def close(self) -> None:
        for connection in (self._listener, *self._strangers, *self._workers.values()):
            connection.close()


class Member:
    """A worker's side. Any thread may ask for news."""

    def __init__(self, folder: Path, worker: int, timeout: float) -> None:
        self.worker, self._lock = worker, threading.Lock()
        self._newest: Generation | None = None
        self._urgent = 0  # the newest generation for which no step is to be completed
        self.fresh = False  # whether this worker was there when all began, with the same state
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._socket.connect(str(folder / REGISTRAR))
                break
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise CommError(f"worker {worker} waited {timeout:g} s for the launcher") from None
                time.sleep(NAP_SECONDS)
        self._socket.setblocking(False)
        self._counters = Counters(folder / COUNTERS)
        self._say(HELLO, 0)

    def _say(self, what: str, number: int) -> None:
        self._socket.send(json.dumps({"worker": self.worker, "what": what, "number": number}).encode())

    def ready(self) -> None:
        """This worker has all that it needs, but for the state of the training."""
        self._say(READY, 0)

    def entered(self, generation: Generation) -> None:
        self._say(ENTERED, generation.number)

    def left(self, generation: Generation) -> None:
        """This worker has lost others, and waits for another generation."""
        self._say(LEFT, generation.number)

    def alive(self) -> None:
        """This worker has made progress, or waits for others."""
        self._counters.add(self.worker)

    @property
    def newest(self) -> Generation | None:
        """The newest generation that this worker has been told of."""
        with self._lock, contextlib.suppress(BlockingIOError):
            while True:
                try:
                    data = self._socket.recv(MOST)
                except ConnectionResetError:
                    data = b""
                if not data:
                    raise PacelineError(f"worker {self.worker} lost the launcher, which decides who takes part")
                values = json.loads(data)
                self._newest = Generation(**values | {"members": tuple(values["members"])})
                self.fresh = self.fresh or self._newest.fresh
                if self._newest.at_once:
                    self._urgent = self._newest.number
        return self._newest

    def left_by(self, number: int) -> str | None:
        """Why the members of this generation must not wait for each other any more; None if they may."""
        self.alive()
        newest = self.newest
        if newest and self._urgent > number:
            return f"generation {newest.number} has begun ({newest.why})"
        return None

    def after(self, number: int, seconds: float = math.inf) -> Generation | None:
        """The newest generation, as soon as there is one after this number; None if there is none in time.

        A newcomer waits as long as the launcher lives, which ends it when it is not needed.
        """
        deadline = time.monotonic() + seconds
        while (newest := self.newest) is None or newest.number <= number:
            if time.monotonic() > deadline:
                return None
            self.alive()
            select.select([self._socket], [], [], NAP_SECONDS)
        return newest

    def close(self) -> None:
        self._socket.close()

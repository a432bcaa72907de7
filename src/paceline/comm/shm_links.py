"""Unix sockets between the ranks of a machine: they pass shared memory, and close when a rank's process ends."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path

from paceline.comm.shared_memory import SharedMemory
from paceline.errors import CommError, CommTimeout, UsageError

LONGEST = 107  # bytes of a Unix socket's path
LOOK_SECONDS = 0.05  # between two looks at whether to go on waiting
NAP_SECONDS = 0.002  # between attempts to connect to a rank that does not listen yet
GOODBYE = b"bye"
MOST = 4096  # bytes of a message


class Links:
    """A connection to each other rank of the world. `names` are the numbers by which messages call the ranks.

    `ended` has the ranks whose processes have closed theirs: whether they said goodbye, or died. While they connect,
    `cancelled` may give a reason to give up.
    """

    def __init__(
        self,
        rank: int,
        names: Sequence[int],
        folder: Path,
        attempt: int,
        timeout: float,
        cancelled: Callable[[], str | None] = lambda: None,
    ) -> None:
        self.rank, self.size, self.names, self.ended = rank, len(names), names, dict[int, bool]()
        self._timeout, self._cancelled = timeout, cancelled
        self._lock = threading.Lock()
        self._inbox: dict[tuple[int, bytes], SharedMemory] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._deadline = time.monotonic() + timeout
        own = _path(folder, attempt, rank)
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
                own.unlink(missing_ok=True)  # of a job that was killed
                listener.bind(str(own))
                listener.listen(self.size)
                for other in range(rank):
                    self._sockets[other] = self._dial(other, _path(folder, attempt, other))
                while len(self._sockets) < self.size - 1:
                    self._accept(listener)
        except BaseException:
            self.drop()
            raise
        finally:
            own.unlink(missing_ok=True)
        for connection in self._sockets.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        self._numbers = {connection.fileno(): other for other, connection in self._sockets.items()}
        _OPEN.add(self)

    def _check(self, other: int) -> None:
        """Raise an error if there is no more to wait for this rank."""
        who = f"rank {self.names[self.rank]} of {self.size}"
        if reason := self._cancelled():
            raise CommError(f"{who}: {reason}")
        if time.monotonic() > self._deadline:
            name = self.names[other]
            raise CommTimeout(f"{who} waited {self._timeout:g} s to meet rank {name} over shm", name)

    def _accept(self, listener: socket.socket) -> None:
        """Connect to a rank with a higher number, which dials."""
        listener.settimeout(LOOK_SECONDS)
        try:
            connection, _ = listener.accept()
            connection.settimeout(LOOK_SECONDS)
            other = int.from_bytes(connection.recv(8), "little")
        except TimeoutError:
            self._check(min(set(range(self.size)) - {self.rank, *self._sockets}))
            return
        if _user(connection) == os.getuid() and self.rank < other < self.size:
            self._sockets[other] = connection

    def _dial(self, other: int, path: Path) -> socket.socket:
        while True:
            self._check(other)
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(str(path))
                connection.send(self.rank.to_bytes(8, "little"))
            except (FileNotFoundError, ConnectionRefusedError, BrokenPipeError, ConnectionResetError):
                connection.close()
                time.sleep(NAP_SECONDS)
            else:
                if _user(connection) != os.getuid():
                    raise CommError(f"rank {self.names[self.rank]} of {self.size}: {path} belongs to another user")
                return connection

    def send(self, other: int, memory: SharedMemory, name: str) -> None:
        """Give another rank this memory. If that has ended, whoever waits for it will see that."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            memory.send(self._sockets[other], name.encode())

    def take(self, other: int, name: str) -> SharedMemory | None:
        """The memory that another rank has sent under this name, if it has arrived."""
        self.look()
        return self._inbox.pop((other, name.encode()), None)

    def look(self) -> None:
        """Read what has arrived."""
        with self._lock:
            for number, _ in self._poll.poll(0):
                other = self._numbers[number]
                try:
                    message, descriptors, _, _ = socket.recv_fds(self._sockets[other], MOST, 1)
                except BlockingIOError:
                    continue
                except ConnectionResetError:
                    message, descriptors = b"", []
                if descriptors:
                    self._inbox[other, message] = SharedMemory(descriptors[0])
                else:
                    self.ended[other] = message == GOODBYE
                    self._poll.unregister(number)

    def close(self) -> None:
        """Say goodbye, so that ranks that still wait for others do not take this one for dead."""
        if self in _OPEN:
            _OPEN.discard(self)
            for connection in self._sockets.values():
                with contextlib.suppress(OSError):
                    connection.send(GOODBYE)
            self.drop()

    def drop(self) -> None:
        for connection in self._sockets.values():
            connection.close()
        for memory in self._inbox.values():  # that nobody has taken
            memory.close()


_OPEN: weakref.WeakSet[Links] = weakref.WeakSet()


def _forget() -> None:
    """A process that a rank has forked, for input, must not keep its connections open."""
    for links in list(_OPEN):
        links.drop()
    _OPEN.clear()


os.register_at_fork(after_in_child=_forget)


def _path(folder: Path, attempt: int, rank: int) -> Path:
    path = folder / f"shm-{attempt}-{rank}"
    if len(os.fsencode(path)) > LONGEST:
        raise UsageError(f"the socket path {path} is longer than {LONGEST} bytes: set TMPDIR to a shorter path")
    return path


def _user(connection: socket.socket) -> int:
    """The user of the process on the other side."""
    found: tuple[int, int, int] = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return found[1]

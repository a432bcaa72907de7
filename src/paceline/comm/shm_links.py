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
from pathlib import Path

from paceline.comm.shared_memory import SharedMemory
from paceline.errors import CommError, CommTimeout, UsageError

LONGEST = 107  # bytes of a Unix socket's path
NAP_SECONDS = 0.002  # between attempts to connect to a rank that does not listen yet
GOODBYE = b"bye"
MOST = 4096  # bytes of a message


class Links:
    """A connection to each other rank of the world.

    `ended` has the ranks whose processes have closed theirs: whether they said goodbye, or died.
    """

    def __init__(self, rank: int, size: int, folder: Path, attempt: int, timeout: float) -> None:
        self.rank, self.size, self.ended = rank, size, dict[int, bool]()
        self._lock = threading.Lock()
        self._inbox: dict[tuple[int, bytes], SharedMemory] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._poll = select.poll()
        deadline = time.monotonic() + timeout
        own = _path(folder, attempt, rank)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            own.unlink(missing_ok=True)  # of a job that was killed
            listener.bind(str(own))
            listener.listen(size)
            for other in range(rank):
                self._sockets[other] = self._dial(other, size, _path(folder, attempt, other), deadline, timeout)
            while len(self._sockets) < size - 1:
                listener.settimeout(max(0.001, deadline - time.monotonic()))
                try:
                    connection, _ = listener.accept()
                    connection.settimeout(max(0.001, deadline - time.monotonic()))
                    other = int.from_bytes(connection.recv(8), "little")
                except TimeoutError:
                    missing = sorted(set(range(size)) - {rank, *self._sockets})
                    raise _late(rank, size, missing[0], timeout) from None
                if _user(connection) == os.getuid() and rank < other < size:
                    self._sockets[other] = connection
        own.unlink(missing_ok=True)
        for connection in self._sockets.values():
            connection.setblocking(False)
            self._poll.register(connection, select.POLLIN)
        self._numbers = {connection.fileno(): other for other, connection in self._sockets.items()}
        _OPEN.add(self)

    def _dial(self, other: int, size: int, path: Path, deadline: float, timeout: float) -> socket.socket:
        while time.monotonic() < deadline:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(str(path))
                connection.send(self.rank.to_bytes(8, "little"))
            except (FileNotFoundError, ConnectionRefusedError, BrokenPipeError, ConnectionResetError):
                connection.close()
                time.sleep(NAP_SECONDS)
            else:
                if _user(connection) != os.getuid():
                    raise CommError(f"rank {self.rank} of {size}: {path} belongs to another user", other)
                return connection
        raise _late(self.rank, size, other, timeout)

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


def _late(rank: int, size: int, other: int, timeout: float) -> CommTimeout:
    return CommTimeout(f"rank {rank} of {size} waited {timeout:g} s to meet rank {other} over shm", other)

"""Memory that processes of one machine share: it has no name, is passed over Unix sockets, and goes with its users."""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import time
from typing import Any

import torch
from torch import Tensor

# Bytes of a cache line, so that two ranks do not write to the same one; a POSIX semaphore needs at most 32.
LINE = 64


class SharedMemory:
    """Some bytes in all processes that have their descriptor. Pages take memory once they are written.

    It is not in /dev/shm, which containers keep small, and which keeps what killed processes leave behind.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor, self.size = descriptor, os.fstat(descriptor).st_size
        self.buffer = mmap.mmap(descriptor, self.size)

    @classmethod
    def create(cls, size: int) -> SharedMemory:
        descriptor = os.memfd_create("paceline", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, max(1, size))
        return cls(descriptor)

    def tensor(self, dtype: torch.dtype, start: int, length: int) -> Tensor:
        """`length` values from the byte `start` on. The memory stays mapped as long as a tensor uses it."""
        if not length:
            return torch.empty(0, dtype=dtype)
        return torch.frombuffer(self.buffer, dtype=dtype, count=length, offset=start)

    def semaphores(self, start: int, count: int) -> list[Semaphore]:
        place = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer, start))
        return [Semaphore(self, place + LINE * i) for i in range(count)]

    def send(self, connection: socket.socket, message: bytes) -> None:
        """Give the other side of a Unix socket this memory, with a message."""
        socket.send_fds(connection, [message], [self.descriptor])

    def close(self) -> None:
        """Close the descriptor, when nobody else needs it; the memory stays mapped."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_libc: Any = ctypes.CDLL(None)
_post, _try, _timed = _libc.sem_post, _libc.sem_trywait, _libc.sem_timedwait


class Semaphore:
    """A POSIX semaphore in shared memory.

    By POSIX, posting and taking one synchronise memory: whoever has taken it sees all that was written before it was
    posted, on processors with any order of reads and writes.
    """

    def __init__(self, memory: SharedMemory, place: int) -> None:
        self._memory = memory  # keeps it mapped
        self._place = ctypes.c_void_p(place)

    def initialise(self, value: int = 0) -> None:
        """Set its value; one process does, before the others use it."""
        if _libc.sem_init(self._place, 1, value):
            raise OSError("this system has no semaphores for several processes")

    def post(self) -> None:
        _post(self._place)

    def take(self) -> bool:
        """Take it if it was posted; does not wait."""
        return not _try(self._place)

    def wait(self, seconds: float) -> bool:
        """Take it; false if it was not posted in this time, or if a signal came."""
        until = time.time_ns() + int(seconds * 1e9)
        return not _timed(self._place, (ctypes.c_long * 2)(until // 1_000_000_000, until % 1_000_000_000))

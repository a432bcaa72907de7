"""Payloads in shared memory: on one machine gradients and weights stay where they are, and messages say where.

Beside each server's ipc endpoint is a Unix socket, over which a worker passes the memory of its gradients, and the
server that of its weights. A payload that lies in such memory is sent as a reference. Whoever created memory changes it
only when the other side has read what was sent:

- A worker keeps a gradient as it is until the server has answered it (`Client.memory`). If it gives up waiting, it
  never uses that memory again.
- A server keeps weights as they are while a view of them exists (`Chunk`). It keeps a view for each worker that they
  were sent to, until the worker confirms that it has copied them, or its connection closes: then it has ended, or has
  given up what it was sent.

Both sides learn this from messages through the kernel, which orders reads and writes of memory on any processor.
"""

from __future__ import annotations

import os
import random
import select
import socket
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from paceline.comm.shared_memory import LINE, SharedMemory
from paceline.server.wire import Buffer, WireError

AVAILABLE = hasattr(os, "memfd_create")
BACKLOG = 1024
# Bytes for the alignment of chunks.
SPARE = 2**16
# Number of the memory, first byte, length; and with weights their number, which confirms them and all before.
_REFERENCE = struct.Struct("<QQQQ")
_NUMBER = struct.Struct("<Q")
_LONGEST_MESSAGE = 256
_CREDENTIALS = struct.Struct("iII")


def path_beside(endpoint: str) -> str | None:
    """The Unix socket beside a server's endpoint; None if the endpoint can be on another machine."""
    scheme, _, path = endpoint.partition("://")
    return f"{path}.mem" if scheme == "ipc" and AVAILABLE else None


class Segment:
    """Shared memory as bytes; mapped as long as a view of it exists."""

    def __init__(self, memory: SharedMemory) -> None:
        self.memory, self._values = memory, memory.tensor(torch.uint8, 0, memory.size)
        self._bytes: memoryview = self._values.numpy().data

    def find(self, payload: Buffer) -> int | None:
        """The first byte of a payload that lies in this memory."""
        if not isinstance(payload, memoryview) or not payload.nbytes:
            return None
        start = np.frombuffer(payload, np.uint8).ctypes.data - self._values.data_ptr()
        return start if 0 <= start <= self.memory.size - payload.nbytes else None

    def view(self, start: int, length: int) -> memoryview:
        if start + length > self.memory.size:
            raise WireError(f"bytes {start} to {start + length} of a memory of {self.memory.size}")
        return self._bytes[start : start + length]


class Connection:
    """One end of a connection over which memory is passed."""

    def __init__(self, end: socket.socket) -> None:
        self.socket = end
        self._theirs: dict[int, Segment] = {}
        end.setblocking(False)

    def is_ours(self) -> bool:
        """Whether a process of the same user is at the other end."""
        found = self.socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, user, _ = _CREDENTIALS.unpack(found)
        return bool(user == os.getuid())

    def give(self, memory: SharedMemory) -> int | None:
        """Pass memory to the other side; return its number, or None if the other side is gone."""
        number = random.getrandbits(63)
        try:
            memory.send(self.socket, _NUMBER.pack(number))
        except OSError:
            return None
        return number

    def say(self, message: bytes) -> None:
        """Send if the other side is there and reads."""
        with suppress(OSError):
            self.socket.send(message)

    def messages(self) -> Iterator[bytes]:
        """Messages that have come; memory is kept. Ends with an empty message if the connection is closed."""
        while True:
            try:
                message, descriptors, _, _ = socket.recv_fds(self.socket, _LONGEST_MESSAGE, 1)
            except BlockingIOError:
                return
            except OSError:
                message, descriptors = b"", []
            for descriptor in descriptors:
                self._keep(message, descriptor)
            if not descriptors:
                yield message
                if not message:
                    return

    def _keep(self, message: bytes, descriptor: int) -> None:
        try:
            memory = SharedMemory(descriptor)
        except (OSError, ValueError):  # it cannot be mapped
            os.close(descriptor)
            return
        memory.close()
        if len(message) == _NUMBER.size:
            self._theirs[_NUMBER.unpack(message)[0]] = Segment(memory)

    def knows(self, reference: Buffer) -> bool:
        return len(reference) == _REFERENCE.size and _REFERENCE.unpack(reference)[0] in self._theirs

    def resolve(self, reference: Buffer) -> tuple[memoryview, int]:
        """The payload of a reference that is known, and its number."""
        number, start, length, ticket = _REFERENCE.unpack(reference)
        return self._theirs[number].view(start, length), ticket

    def close(self) -> None:
        self.socket.close()
        self._theirs = {}


class _Worker(Connection):
    """A server's end: the weights that the worker may still be reading, in the order in which they were sent."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__(end)
        self.name = b""
        self.number: int | None = None  # of the server's memory, if the worker has it
        self.reading: deque[tuple[int, memoryview]] = deque()
        self.sent = 0

    def confirmed(self, message: bytes) -> None:
        if len(message) == _NUMBER.size:
            while self.reading and self.reading[0][0] <= _NUMBER.unpack(message)[0]:
                self.reading.popleft()


class ServerMemory:
    """A server's memory of weights, and its workers' memory of gradients."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._path.unlink(missing_ok=True)  # of the process before this one
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.setblocking(False)
        self._socket.bind(path)
        self._socket.listen(BACKLOG)
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._connections: dict[int, _Worker] = {}  # by descriptor
        self._workers: dict[bytes, _Worker] = {}  # by address
        self._own: Segment | None = None
        self._used = 0

    def create(self, size: int, workers: int) -> None:
        """Create memory for weights of so many bytes, and for those that each worker may still be reading.

        Pages that are never written take no memory.
        """
        self._own = Segment(SharedMemory.create((2 + workers) * (size + SPARE)))

    def like(self, values: Tensor) -> Tensor:
        """Memory for such values; not shared if no shared memory is left."""
        start = -(-self._used // LINE) * LINE
        if self._own is None or start + values.nbytes > self._own.memory.size:
            return torch.empty_like(values)
        self._used = start + values.nbytes
        return self._own.memory.tensor(values.dtype, start, len(values))

    def resolve(self, sender: bytes, reference: Buffer) -> memoryview:
        """The payload that a worker has sent; WireError if it is not in its memory."""
        self._hear()
        worker = self._workers.get(sender)
        if worker is None or not worker.knows(reference):
            raise WireError("a reference to memory that is not known")
        return worker.resolve(reference)[0]

    def reference(self, to: bytes, payload: Buffer) -> bytes | None:
        """A reference to weights, which stay as they are until the worker has confirmed them; None: send the bytes."""
        start = self._own.find(payload) if self._own else None
        if start is None:
            return None
        self._hear()  # a worker that has connected again does not know the memory of its former connection
        worker = self._workers.get(to)
        if worker is None or worker.number is None:
            return None
        assert isinstance(payload, memoryview)
        worker.sent += 1
        worker.reading.append((worker.sent, payload))
        return _REFERENCE.pack(worker.number, start, payload.nbytes, worker.sent)

    def _hear(self) -> None:
        """Accept workers, and read what they have sent; a worker passes memory before it sends references to it."""
        for descriptor, _ in self._poll.poll(0):
            if descriptor != self._socket.fileno():
                if descriptor in self._connections:  # it may just have connected again
                    self._read(self._connections[descriptor])
                continue
            while True:
                try:
                    worker = _Worker(self._socket.accept()[0])
                except OSError:
                    break
                if not worker.is_ours():
                    worker.close()
                    continue
                self._connections[worker.socket.fileno()] = worker
                self._poll.register(worker.socket, select.POLLIN)
                self._read(worker)

    def _read(self, worker: _Worker) -> None:
        for message in worker.messages():
            if not message:
                self._drop(worker)
            elif worker.name:
                worker.confirmed(message)
            else:
                if message in self._workers:
                    self._drop(self._workers[message])  # it has connected again, and given up what it was sent before
                worker.name = message
                worker.number = worker.give(self._own.memory) if self._own else None
                self._workers[message] = worker

    def _drop(self, worker: _Worker) -> None:
        self._poll.unregister(worker.socket)
        del self._connections[worker.socket.fileno()]
        if self._workers.get(worker.name) is worker:
            del self._workers[worker.name]
        worker.close()
        worker.reading.clear()

    def close(self) -> None:
        for worker in list(self._connections.values()):
            self._drop(worker)
        self._socket.close()
        self._path.unlink(missing_ok=True)
        if self._own:
            self._own.memory.close()


class WorkerMemory:
    """A worker's memory of gradients, and its connections to the servers, by their number."""

    def __init__(self, paths: Sequence[str], name: str) -> None:
        self._own: list[Segment] = []
        self.links = [MemoryLink(path, name, self._own) for path in paths]

    def like(self, values: Tensor) -> Tensor:
        """New memory for such values."""
        self._own.append(Segment(SharedMemory.create(values.nbytes)))
        return self._own[-1].memory.tensor(values.dtype, 0, len(values))

    def forget(self) -> None:
        """Send no more references to this memory; servers refuse those that are on their way."""
        for link in self.links:
            link.close()
        for segment in self._own:
            segment.memory.close()
        self._own.clear()


class MemoryLink:
    """A worker's connection to one server, opened again with the next reference if the server was restarted."""

    def __init__(self, path: str, name: str, own: list[Segment]) -> None:
        self._path, self._name, self._own = path, name, own
        self._connection: Connection | None = None
        self._given: dict[int, int] = {}  # numbers of own segments, by their place in the list
        self._lost = False
        self._received = self._confirmed = 0  # weights

    def reference(self, payload: Buffer) -> bytes | None:
        """A reference to a payload in own memory; None: send the bytes."""
        if not self.connect():
            return None
        for i, segment in enumerate(self._own):
            start = segment.find(payload)
            if start is not None:
                return self._reference(i, start, memoryview(payload).nbytes)
        return None

    def _reference(self, i: int, start: int, length: int) -> bytes | None:
        assert self._connection is not None
        if i not in self._given:
            number = self._connection.give(self._own[i].memory)
            if number is None:
                return None
            self._given[i] = number
        return _REFERENCE.pack(self._given[i], start, length, 0)

    def connect(self) -> bool:
        """Connect, if a server listens."""
        if self._connection is None:
            end = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            connection = Connection(end)
            try:
                end.connect(self._path)
            except OSError:
                end.close()
                return False
            if not connection.is_ours():
                end.close()
                return False
            connection.say(self._name.encode())
            self._connection, self._given, self._received, self._confirmed = connection, {}, 0, 0
        return True

    def resolve(self, reference: Buffer) -> memoryview | None:
        """The weights that a server has sent; None if they are from before this connection."""
        self._hear()
        if self._connection is None or not self._connection.knows(reference):
            return None
        view, self._received = self._connection.resolve(reference)
        return view

    def confirm(self) -> None:
        """Tell the server that nothing that it has sent so far will be read again."""
        if self._connection and self._received > self._confirmed:
            self._confirmed = self._received
            self._connection.say(_NUMBER.pack(self._confirmed))

    def lost(self) -> bool:
        """Whether the server has gone since the last call: it has not read what was sent just before."""
        self._hear()
        lost, self._lost = self._lost, False
        return lost

    def _hear(self) -> None:
        for message in self._connection.messages() if self._connection else ():
            if not message:
                self._lost = True
                self.close()

    def close(self) -> None:
        if self._connection:
            self._connection.close()
            self._connection = None

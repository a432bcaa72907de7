"""ZeroMQ sockets of servers and workers, encrypted between machines; the only file that imports zmq."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import zmq
from torch import Tensor
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from paceline.errors import UsageError
from paceline.server.segments import MemoryLink, ServerMemory, WorkerMemory, path_beside
from paceline.server.shard import MakeMemory
from paceline.server.wire import LENT, Buffer, Message, WireError

# ZeroMQ closes a connection that sends a larger frame than any of ours.
MOST_BYTES = 64 * 2**20
LINGER_MS = 2000
# A connection is reopened if nothing arrives for this long.
HEARTBEAT_MS = 2000
BURST = 64
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def key_pair(secret: bytes, who: str) -> tuple[bytes, bytes]:
    """The public and private CURVE key of the `server` or the `worker`s of the run with this secret."""
    private = z85.encode(hashlib.sha256(b"paceline " + who.encode() + secret).digest())
    return zmq.curve_public(private), private


class _OnlyWorkers:
    def __init__(self, secret: bytes) -> None:
        self.allowed = key_pair(secret, "worker")[0]

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self.allowed


class Listener:
    """A server's socket; messages come with a reply address. With a secret, only ranks that share it can connect."""

    def __init__(self, endpoint: str, secret: bytes | None = None) -> None:
        self._context = zmq.Context()
        self._gate: ThreadAuthenticator | None = None
        self.memory: ServerMemory | None = None
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        _set_up(self._socket, endpoint)
        if secret is not None:
            self._gate = ThreadAuthenticator(self._context)
            self._gate.start()
            self._gate.configure_curve_callback("*", _OnlyWorkers(secret))
            self._socket.curve_server = True
            self._socket.curve_publickey, self._socket.curve_secretkey = key_pair(secret, "server")
        self._monitor = self._socket.get_monitor_socket(FAILED_HANDSHAKES)
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise UsageError(f"cannot listen at {endpoint}: {error.strerror or error}") from error
        self.endpoint = self._socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._dialled: dict[Any, Dialler] = {}
        if path := path_beside(endpoint):
            self.memory = ServerMemory(path)

    def watch(self, dialler: Dialler) -> None:
        """Let `wait` also return for messages of this dialler."""
        self._dialled[dialler.socket] = dialler
        self._poller.register(dialler.socket, zmq.POLLIN)

    def memory_of_weights(self, size: int, workers: int) -> MakeMemory:
        """Memory for weights of so many bytes, from which they are sent to workers on this machine without a copy."""
        if self.memory is None:
            return torch.empty_like
        self.memory.create(size, workers)
        return self.memory.like

    def wait(self, seconds: float) -> None:
        """Wait until a message arrives, or until the time has passed."""
        self._poller.poll(max(0, int(seconds * 1000)))

    def messages(self) -> Iterator[tuple[bytes, list[Buffer]]]:
        """Some of the messages that have arrived."""
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            sender, header, *rest = frames[0].bytes, *(frame.buffer for frame in frames[1:])
            yield sender, [header, *(rest if len(rest) == 1 else self._resolved(sender, rest))]

    def _resolved(self, sender: bytes, frames: Sequence[Buffer]) -> list[Buffer]:
        """The payload in place of a reference to it; nothing, which makes the message invalid, if there is none."""
        if self.memory is None or len(frames) != 2:
            return []
        try:
            return [self.memory.resolve(sender, frames[0]), frames[1]]
        except WireError:
            return []

    def send(self, to: bytes, message: Message) -> None:
        """Send without waiting; messages to a peer that is gone are dropped."""
        header, payload = message.frames()
        reference = self.memory.reference(to, payload) if self.memory else None
        body = [payload] if reference is None else [reference, LENT]
        try:
            self._socket.send_multipart([to, header, *body], zmq.NOBLOCK, copy=len(body[0]) < 65536)
        except zmq.Again:
            return

    def denied(self) -> int:
        """How many connections without the right key were refused since the last call."""
        found = 0
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            found += 1
        return found

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(LINGER_MS)
        if self.memory:
            self.memory.close()
        if self._gate:
            self._gate.stop()
        _end(self._context)


class Dialler:
    """A socket to one server. Messages wait while there is no connection; they are lost if a connection breaks."""

    def __init__(
        self,
        context: zmq.Context[Any],
        endpoint: str,
        name: str,
        secret: bytes | None = None,
        memory: MemoryLink | None = None,
    ) -> None:
        self.endpoint, self._memory = endpoint, memory
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.IDENTITY, name.encode())
        self.socket.setsockopt(zmq.MAXMSGSIZE, MOST_BYTES)
        _set_up(self.socket, endpoint)
        if secret is not None:
            self.socket.curve_publickey, self.socket.curve_secretkey = key_pair(secret, "worker")
            self.socket.curve_serverkey = key_pair(secret, "server")[0]
        self._monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self.socket.connect(endpoint)

    def send(self, message: Message, track: bool = False) -> Any:
        """Send a message; with `track`, its payload's memory is in use until the tracker is done.

        A payload in shared memory is in use until the message is answered, and has no tracker.
        """
        header, payload = message.frames()
        reference = self._memory.reference(payload) if self._memory else None
        if reference is not None:
            return self.socket.send_multipart([header, reference, LENT])
        self.socket.send(header, zmq.SNDMORE)
        return self.socket.send(payload, copy=not track, track=track)

    def messages(self) -> Iterator[Sequence[Buffer]]:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            header, *rest = (frame.buffer for frame in frames)
            if len(rest) == 2 and self._memory:
                payload = self._memory.resolve(rest[0])
                if payload is None:
                    continue  # from before the connection broke, and what it answers has been sent again
                rest[0] = payload
            yield [header, *rest]

    def confirm(self) -> None:
        """Nothing that has been received will be read again."""
        if self._memory:
            self._memory.confirm()

    def broken(self) -> bool:
        """Whether the connection has been lost since the last call: payloads that were received are not to be read."""
        found = self._memory is not None and self._memory.lost()
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            found = True
        if found and self._memory:
            self._memory.close()
        return found

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(LINGER_MS)


class Diallers:
    """The sockets of one thread, to all servers; `shares` memory with them, if they are on this machine."""

    def __init__(
        self, endpoints: Sequence[str], name: str, secret: bytes | None = None, *, shares: bool = False
    ) -> None:
        self._context = zmq.Context()
        paths = [path for endpoint in endpoints if shares and (path := path_beside(endpoint))]
        self._memory = WorkerMemory(paths, name) if paths else None
        links: Sequence[MemoryLink | None] = self._memory.links if self._memory else [None] * len(endpoints)
        self.all = [
            Dialler(self._context, endpoint, name, secret, link)
            for endpoint, link in zip(endpoints, links, strict=True)
        ]
        self._poller = zmq.Poller()
        for dialler in self.all:
            self._poller.register(dialler.socket, zmq.POLLIN)

    def wait(self, seconds: float) -> list[int]:
        """The servers from which messages have arrived."""
        ready = dict(self._poller.poll(max(0, int(seconds * 1000))))
        return [i for i, dialler in enumerate(self.all) if dialler.socket in ready]

    def memory(self, like: Tensor) -> Tensor:
        """New memory for such values, which are sent without a copy."""
        return self._memory.like(like) if self._memory else torch.empty_like(like).zero_()

    def forget_memory(self) -> None:
        """Servers do not read this memory again."""
        if self._memory:
            self._memory.forget()

    def close(self) -> None:
        self.forget_memory()
        for dialler in self.all:
            dialler.close()
        _end(self._context)


def _end(context: zmq.Context[Any]) -> None:
    """End a context whose sockets are closed, within their linger time.

    libzmq sometimes never returns from this if a socket was monitored (its issues 1279 and 2330). Then two idle threads
    are left, in a process that is about to end.
    """
    ending = threading.Thread(target=context.term, name="zmq-end", daemon=True)
    ending.start()
    ending.join(2 * LINGER_MS / 1000)


def _set_up(socket: zmq.Socket[Any], endpoint: str) -> None:
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.RECONNECT_IVL, 50)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
    if endpoint.startswith("tcp:"):
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4 * HEARTBEAT_MS)
        socket.setsockopt(zmq.IPV6, "[" in endpoint)

"""ZeroMQ sockets of servers and workers, encrypted between machines; the only file that imports zmq."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from paceline.errors import UsageError
from paceline.server.wire import Buffer, Message

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

    def watch(self, dialler: Dialler) -> None:
        """Let `wait` also return for messages of this dialler."""
        self._dialled[dialler.socket] = dialler
        self._poller.register(dialler.socket, zmq.POLLIN)

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
            yield frames[0].bytes, [frame.buffer for frame in frames[1:]]

    def send(self, to: bytes, message: Message) -> None:
        """Send without waiting; messages to a peer that is gone are dropped."""
        header, payload = message.frames()
        try:
            self._socket.send_multipart([to, header, payload], zmq.NOBLOCK, copy=len(payload) < 65536)
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
        if self._gate:
            self._gate.stop()
        _end(self._context)


class Dialler:
    """A socket to one server. Messages wait while there is no connection; they are lost if a connection breaks."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, name: str, secret: bytes | None = None) -> None:
        self.endpoint = endpoint
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
        """Send a message; with `track`, its payload's memory is in use until the tracker is done."""
        header, payload = message.frames()
        self.socket.send(header, zmq.SNDMORE)
        return self.socket.send(payload, copy=not track, track=track)

    def messages(self) -> Iterator[Sequence[Buffer]]:
        while True:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield [frame.buffer for frame in frames]

    def broken(self) -> bool:
        """Whether the connection has been lost since the last call."""
        found = False
        while self._monitor.poll(0):
            self._monitor.recv_multipart()
            found = True
        return found

    def close(self) -> None:
        self.socket.disable_monitor()
        self._monitor.close(0)
        self.socket.close(LINGER_MS)


class Diallers:
    """The sockets of one thread, to all servers."""

    def __init__(self, endpoints: Sequence[str], name: str, secret: bytes | None = None) -> None:
        self._context = zmq.Context()
        self.all = [Dialler(self._context, endpoint, name, secret) for endpoint in endpoints]
        self._poller = zmq.Poller()
        for dialler in self.all:
            self._poller.register(dialler.socket, zmq.POLLIN)

    def wait(self, seconds: float) -> list[int]:
        """The servers from which messages have arrived."""
        ready = dict(self._poller.poll(max(0, int(seconds * 1000))))
        return [i for i, dialler in enumerate(self.all) if dialler.socket in ready]

    def close(self) -> None:
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

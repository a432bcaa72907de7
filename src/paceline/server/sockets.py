"""ZeroMQ: listening and dialling, with keys where machines are between; the only file that imports zmq."""

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

# A frame that is larger than any of ours is not read: the connection is closed.
MOST_BYTES = 64 * 2**20
LINGER_MS = 2000
# A connection over which nothing comes for so long is made anew.
HEARTBEAT_MS = 2000
BURST = 64
FAILED_HANDSHAKES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


def key_pair(secret: bytes, who: str) -> tuple[bytes, bytes]:
    """The public and private CURVE key of the `server` or the `worker`s of the run that has this secret."""
    private = z85.encode(hashlib.sha256(b"paceline " + who.encode() + secret).digest())
    return zmq.curve_public(private), private


class _OnlyWorkers:
    def __init__(self, secret: bytes) -> None:
        self.allowed = key_pair(secret, "worker")[0]

    def callback(self, _domain: str, key: bytes) -> bool:
        return key == self.allowed


class Listener:
    """A server's socket: messages come with the address to answer to. With a secret, only those who share it get in."""

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
        """Wake up for what comes there, too."""
        self._dialled[dialler.socket] = dialler
        self._poller.register(dialler.socket, zmq.POLLIN)

    def wait(self, seconds: float) -> None:
        """Until something has come, or the time has passed."""
        self._poller.poll(max(0, int(seconds * 1000)))

    def messages(self) -> Iterator[tuple[bytes, list[Buffer]]]:
        """What has come, some of it."""
        for _ in range(BURST):
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            yield frames[0].bytes, [frame.buffer for frame in frames[1:]]

    def send(self, to: bytes, message: Message) -> None:
        """Never waits: what a peer that is gone does not take is dropped."""
        header, payload = message.frames()
        try:
            self._socket.send_multipart([to, header, payload], zmq.NOBLOCK, copy=len(payload) < 65536)
        except zmq.Again:
            return

    def denied(self) -> int:
        """How often somebody has tried to get in without the key, since this was last asked."""
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
    """A socket to one server. What is sent while there is no connection waits; it is lost when one breaks."""

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
        """With `track`, the payload's memory is in use until the tracker is done."""
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
        """Whether the connection has been lost since the last time this was asked."""
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
        """The servers from which something has come."""
        ready = dict(self._poller.poll(max(0, int(seconds * 1000))))
        return [i for i, dialler in enumerate(self.all) if dialler.socket in ready]

    def close(self) -> None:
        for dialler in self.all:
            dialler.close()
        _end(self._context)


def _end(context: zmq.Context[Any]) -> None:
    """End a context whose sockets are closed, in the time that they were given for their last messages.

    libzmq sometimes never returns from this where a socket was monitored (its issues 1279 and 2330). What is left then
    are two idle threads, of a process that is about to end.
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

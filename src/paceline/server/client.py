"""A worker's connection to the servers: pushes gradients, receives weights, asks for work, sends heartbeats."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from paceline.comm.metered import Meter
from paceline.errors import CommTimeout, PacelineError, UsageError
from paceline.server.core import as_values
from paceline.server.layout import Layout
from paceline.server.ledger import TRAIN, Part
from paceline.server.sockets import Diallers
from paceline.server.wire import Buffer, Header, Kind, Message, OtherProtocol, WireError, read, say
from paceline.tasks.base import NOTHING, Sums

HELLO_SECONDS = 0.1
POLL_SECONDS = 0.25


@dataclass
class Gradient:
    """Memory of a gradient: of which part, and what tells when its messages are sent."""

    values: Tensor
    part: Part | None = None
    trackers: list[Any] = field(default_factory=list)


@dataclass
class Client:
    """One worker's connection to all servers.

    Received weights are held back until all outstanding answers have arrived, and then written to `weights` together;
    until then the model has the versions in `versions`, by chunk.
    """

    rank: int
    run: int
    life: int
    layout: Layout
    weights: Tensor  # flat; the model's parameters are views of it
    endpoints: Sequence[str]
    secret: bytes | None = None
    timeout: float = 120.0
    staleness: int | None = 0  # None: no bound
    beat_seconds: float = 1.0
    meter: Meter = field(default_factory=Meter)

    def __post_init__(self) -> None:
        self.versions: dict[int, int] = {}
        self.seen = 0  # the newest version of weights that any server has sent
        self.leases: dict[int, Part] = {}
        self.target = 0  # the number of leases that this worker wants to hold
        self.about: Callable[[], dict[str, Any]] = dict  # the worker's counts, for the leader
        self.finish = self.stopping = self.estranged = False
        self.error: str | None = None
        self.generation = 0
        self._sequence = 0
        self._done: dict[int, Sums] = {}  # completed leases that the leader has not acknowledged
        self._due: dict[tuple[int, int, int], Message] = {}  # (chunk, update, slot) of messages without an answer
        self._staged: dict[int, tuple[int, Buffer]] = {}
        self._missed: dict[tuple[int, int], int] = {}  # by (update, slot): the staleness, as reported by servers
        self._gradients: list[Gradient] = []
        self._servers = [self.layout.server_of(chunk) for chunk in range(self.layout.chunks)]
        self._links = Diallers(self.endpoints, f"{self.rank}.{self.life:x}", self.secret, shares=True)
        self._pulse = Pulse(self)
        self._reported = 0.0

    # Joining.

    def join(
        self, fingerprint: dict[str, str], about: dict[str, Any], stop: Callable[[], bool]
    ) -> dict[str, Any] | None:
        """Send HELLO until the leader answers; return its answer, or None if this worker is asked to stop first."""
        self._forget()
        deadline, words = (
            time.monotonic() + self.timeout,
            {"fingerprint": fingerprint, "about": about, "seen": self.seen},
        )
        while time.monotonic() < deadline:
            if stop():
                return None
            self._send(0, say(Kind.HELLO, words))
            until = time.monotonic() + HELLO_SECONDS
            while (left := until - time.monotonic()) > 0:
                for message in self._receive(left):
                    if message.kind == Kind.REFUSED:
                        raise UsageError(str(message.words().get("why")))
                    if message.kind == Kind.WELCOME:
                        self.generation, self.estranged = message.header.generation, False
                        self._pulse.start()
                        return message.words()
        raise Unanswered(f"rank {self.rank} waited {self.timeout:g} s for rank 0, the server at {self.endpoints[0]}", 0)

    def _forget(self) -> None:
        """Discard all leases and outstanding messages.

        Servers may still read gradients that they have not answered, so their memory is not used again.
        """
        if any(message.kind == Kind.PUSH for message in self._due.values()):
            self._gradients = []
            self._links.forget_memory()
        self.leases, self._done, self._due, self._staged, self._missed = {}, {}, {}, {}, {}
        self.versions = {}

    # Work.

    def report(self) -> None:
        """Tell the leader what is done, and how many leases this worker wants to hold."""
        done = [[lease, *sums] for lease, sums in self._done.items()]
        self._send(0, say(Kind.REPORT, {"done": done, "target": self.target, "about": self.about()}))
        self._reported = time.monotonic()

    def done(self, lease: int, sums: Sums = NOTHING) -> None:
        """A lease is complete; if it is a training lease, all servers have its gradient."""
        self._done[lease] = sums
        self.leases.pop(lease, None)

    def computing(self, lease: int | None) -> None:
        self._pulse.computing = lease

    # Gradients and weights.

    def memory(self) -> Tensor:
        """Memory for the next gradient: new, or that of an earlier one which all servers have and have answered.

        A server may read a gradient until it answers, and a connection that breaks before makes it be sent again.
        """
        found = next((gradient for gradient in self._gradients if self._is_free(gradient)), None)
        if found is None:
            found = Gradient(self._links.memory(self.weights))
            self._gradients.append(found)
        return found.values

    def _is_free(self, gradient: Gradient) -> bool:
        answered = gradient.part is None or not self.is_due(gradient.part)
        return answered and all(tracker.done for tracker in gradient.trackers)

    def push(self, part: Part, gradient: Tensor, sums: Sums, nominal: float, nonfinite: int = 0) -> None:
        """Send a gradient that was computed in `memory`. `nominal`, `nonfinite`: see `Header`."""
        assert part.kind == TRAIN
        memory = next(known for known in self._gradients if known.values is gradient)
        memory.part, memory.trackers = part, []
        want = max(0, part.update + 1 - self.staleness) if self.staleness is not None else 0
        for chunk in range(self.layout.chunks):
            span = self.layout.span(chunk)
            header = Header(Kind.PUSH, chunk=chunk, update=part.update, slot=part.slot, slots=part.slots, want=want,
                            version=self.versions[chunk], loss=sums.loss, weight=sums.weight, metric=sums.metric,
                            nominal=nominal, nonfinite=nonfinite)  # fmt: skip
            payload = gradient[span.start : span.stop].numpy().data.cast("B")
            tracker = self._ask(chunk, Message(header, payload), track=True)
            if tracker is not None:
                memory.trackers.append(tracker)
            self.meter.messages_sent += 1
            self.meter.bytes_sent += len(payload)

    def pull(self, want: int, *, anew: bool = False) -> None:
        """Ask for weights of at least this version where this worker has older ones, or (`anew`) for all of them.

        Earlier pulls are discarded.
        """
        self._due = {key: message for key, message in self._due.items() if message.kind != Kind.PULL}
        for chunk in range(self.layout.chunks):
            if anew or self.versions.get(chunk, -1) < want:
                self._ask(chunk, Message(Header(Kind.PULL, chunk=chunk, want=want)))

    def has(self, version: int) -> bool:
        return len(self.versions) == self.layout.chunks and min(self.versions.values()) >= version

    def is_due(self, part: Part | None = None) -> bool:
        """Whether answers are outstanding, for this part's gradient or for anything."""
        return any(part is None or key[1:] == (part.update, part.slot) for key in self._due)

    def awaited(self) -> int:
        """The update before which all updates must be made until the outstanding answers can arrive."""
        return max(message.header.want for message in self._due.values())

    def missed(self, part: Part) -> int:
        """The staleness of this part's gradient."""
        return self._missed.pop((part.update, part.slot), 0)

    def install(self) -> bool:
        """Write the received weights into the model; false if there are none."""
        found = bool(self._staged)
        for chunk, (version, payload) in self._staged.items():
            span = self.layout.span(chunk)
            self.weights[span.start : span.stop].copy_(as_values(payload, self.weights.dtype))
            self.versions[chunk] = version
        self._staged = {}
        for link in self._links.all:
            link.confirm()
        return found

    def _ask(self, chunk: int, message: Message, track: bool = False) -> Any:
        self._due[chunk, message.header.update, message.header.slot] = message
        return self._send(self._servers[chunk], message, track)

    # Messages.

    def poll(self, seconds: float = POLL_SECONDS) -> None:
        """Handle messages, waiting up to `seconds` for them; raises CommTimeout if a server is gone."""
        for message in self._receive(seconds):
            self._take(message)
        for server, link in enumerate(self._links.all):
            if link.broken():
                self._staged = {c: staged for c, staged in self._staged.items() if self._servers[c] != server}
                for (chunk, _, _), message in self._due.items():
                    if self._servers[chunk] == server:
                        self._send(server, message)
        if time.monotonic() - self._reported > self.beat_seconds:
            self.report()

    def _take(self, message: Message) -> None:
        header = message.header
        if header.kind == Kind.AGAIN:
            self.estranged = True
        elif header.kind == Kind.REFUSED:
            raise UsageError(str(message.words().get("why")))
        elif header.kind == Kind.LEASES:
            words = message.words()
            told = {int(number): Part(**part) for number, part in words["leases"].items()}
            self._done = {lease: result for lease, result in self._done.items() if lease in told}
            self.leases |= {number: part for number, part in told.items() if number not in self._done}
            self.finish, self.stopping, self.error = words["finish"], words["stopping"], words["error"]
        elif header.kind == Kind.WEIGHTS and header.generation == self.generation:
            self._weights(message)

    def _weights(self, message: Message) -> None:
        header = message.header
        key = header.chunk, header.update, header.slot
        asked = self._due.get(key)
        if asked is None or asked.header.sequence != header.sequence:
            return  # an answer to an earlier pull, which has been repeated
        del self._due[key]
        span = self.layout.span(header.chunk)
        if header.length != len(span) * self.weights.element_size():
            raise WireError(f"{header.length} bytes of weights instead of {len(span)} values")
        if asked.kind == Kind.PUSH:
            self.meter.messages_received += 1
            self.meter.bytes_received += header.length
            part = header.update, header.slot
            self._missed[part] = max(self._missed.get(part, 0), header.staleness)
        self.seen = max(self.seen, header.version)
        if header.version >= self._staged.get(header.chunk, (0, b""))[0]:
            self._staged[header.chunk] = header.version, message.payload

    def _receive(self, seconds: float) -> list[Message]:
        found = []
        for server in self._links.wait(seconds):
            for frames in self._links.all[server].messages():
                try:
                    message = read(frames)
                except OtherProtocol as error:
                    raise UsageError(
                        f"rank {server}, a server, uses {error}: install the same version of paceline everywhere"
                    ) from error
                if message.header.run == self.run or message.kind == Kind.REFUSED:
                    found.append(message)
                    self._pulse.heard[server] = time.monotonic()
        self._pulse.check()
        return found

    def _send(self, server: int, message: Message, track: bool = False) -> Any:
        self._sequence += 1
        header = message.header
        header.run, header.rank, header.life = self.run, self.rank, self.life
        header.generation, header.sequence = self.generation, self._sequence
        return self._links.all[server].send(message, track)

    def leave(self, why: str | None = None) -> None:
        """Leave the run, or report an error."""
        self._send(0, say(Kind.LEAVE, {"about": self.about(), "why": why}))

    def close(self) -> None:
        self._pulse.stop()
        self._links.close()


class Unanswered(CommTimeout):
    """No server has answered."""


class Pulse:
    """Sends heartbeats to the servers from its own thread, also while the worker computes, and checks theirs."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.computing: int | None = None
        self.heard = [time.monotonic()] * len(client.endpoints)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-pulse", daemon=True)
        self._started, self._error = False, ""

    def start(self) -> None:
        if not self._started:
            self._started, self.heard = True, [time.monotonic()] * len(self.heard)
            self._thread.start()

    def _run(self) -> None:
        try:
            self._beat()
        except Exception as error:  # noqa: BLE001  raised by the next check, in the worker's own thread
            self._error = f"{type(error).__name__}: {error}"

    def _beat(self) -> None:
        client = self._client
        links = Diallers(client.endpoints, f"{client.rank}.{client.life:x}.beat", client.secret)
        while not self._stop.is_set():
            at = 0 if self.computing is None else self.computing + 1
            for link in links.all:
                link.send(Message(Header(Kind.BEAT, run=client.run, rank=client.rank, life=client.life, update=at)))
            until = time.monotonic() + client.beat_seconds
            while (left := until - time.monotonic()) > 0 and not self._stop.is_set():
                for server in links.wait(min(left, POLL_SECONDS)):
                    for _ in links.all[server].messages():
                        self.heard[server] = time.monotonic()
        links.close()

    def check(self) -> None:
        if not self._started:
            return
        now, client = time.monotonic(), self._client
        if self._error:
            raise PacelineError(f"rank {client.rank} can no longer send heartbeats to its servers ({self._error})")
        for server, heard in enumerate(self.heard):
            if now - heard > client.timeout:
                raise CommTimeout(
                    f"rank {client.rank} has received nothing from rank {server}, a server, for {client.timeout:g} s",
                    server,
                )

    def stop(self) -> None:
        self._stop.set()
        if self._started:
            self._thread.join()

"""How a server handles each message; no sockets and no clock, so that tests can simulate any order of arrival."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from paceline.server.shard import Lent, Refused, Shard
from paceline.server.wire import Buffer, Header, Kind, Message, OtherProtocol, WireError, read, say

Address = bytes
Reply = tuple[Address, Message]
# No worker may wait for weights that are further ahead than this plus the staleness; such requests must not pile up.
FARTHEST = 16
ORDERS = (Kind.ATTACH, Kind.RESTORE, Kind.KEEP, Kind.RECALL, Kind.SAVE, Kind.FINISH)


class Store(Protocol):
    """Where a server's part of checkpoints is kept, by the number of updates.

    `save` copies what it is given: tensors of chunks by number and name. What it saves may be there only later, when
    all servers' parts are: `busy` until then, unless parts that are missing are given up with `abandon`. Parts with the
    same `mark` belong together.
    """

    @property
    def busy(self) -> bool: ...

    def save(self, number: int, mark: str, tensors: dict[int, dict[str, Tensor]], facts: dict[str, Any]) -> None: ...

    def abandon(self) -> None: ...

    def load(self, number: int) -> tuple[dict[int, dict[str, Tensor]], dict[str, Any]]: ...

    def numbers(self) -> list[int]: ...

    def forget_after(self, number: int) -> None: ...


@dataclass
class Traffic:
    """A server's traffic: bytes of gradients received and weights sent, and messages dropped."""

    bytes_received: int = 0
    bytes_sent: int = 0
    messages_received: int = 0
    messages_sent: int = 0
    cpu_seconds: float = 0.0  # of the whole process, while it served
    peak_rss_bytes: int = 0
    dropped: Counter[str] = field(default_factory=Counter)


class Core:
    """A server's data side: receives gradients, answers with weights, saves its part of checkpoints."""

    def __init__(self, rank: int, run: int, life: int, shard: Shard, store: Store | None = None) -> None:
        self.rank, self.run, self.life, self.shard = rank, run, life, shard
        self.generation = 0  # no gradient has it: gradients are refused until the leader has sent a generation
        self.about: dict[str, Any] = {}
        self.traffic = Traffic()
        self._waiting: dict[int, dict[tuple[Address, int, int], Header]] = {}  # by chunk: requests for newer weights
        self.store = store
        self.leader: Address | None = None  # where its last order came from
        self._out: list[Reply] = []
        self.finished = self.stopping = False
        self.refusal: str | None = None
        # Called with the leader's welcome; returns why this server cannot take part, or None.
        self.on_attach: Callable[[dict[str, Any]], str | None] = lambda words: None
        shard.after = self.updated
        if shard.staleness is None:  # servers are independent of each other, also after a restart
            self.generation = run
            self.restore(max(self.checkpoints()))

    def handle(self, sender: Address, frames: Sequence[Buffer], now: float) -> list[Reply]:
        """Handle a message; return the replies. Messages of other programs or runs are dropped and counted."""
        try:
            message = read(frames)
            if message.header.run == self.run:
                self.take(sender, message, now)
            else:
                self.traffic.dropped["of another run"] += 1
                if message.kind == Kind.HELLO:
                    self.send(sender, say(Kind.REFUSED, {"why": "the server at this address belongs to another run"}))
        except OtherProtocol as error:
            self.traffic.dropped["of another version"] += 1
            why = f"this rank uses {error}; install the same version of paceline everywhere"
            self.send(sender, say(Kind.REFUSED, {"why": why}))
        except (WireError, Refused):
            self.traffic.dropped["malformed"] += 1
        return self.flush()

    def tick(self, now: float) -> list[Reply]:
        """Do what is due at this time."""
        if self.shard.clip:
            self.tell_squares()  # again, in case a message was lost
        return self.flush()

    def send(self, to: Address, message: Message) -> None:
        message.header.run, message.header.rank = self.run, self.rank
        message.header.generation, message.header.life = self.generation, self.life
        self._out.append((to, message))

    def flush(self) -> list[Reply]:
        """The messages to send."""
        out, self._out = self._out, []
        return out

    def take(self, sender: Address, message: Message, now: float) -> None:
        """Handle a message of this run, or of a rank that wants to join it."""
        header = message.header
        if header.kind in (Kind.PUSH, Kind.PULL):
            if header.generation != self.generation:
                self.traffic.dropped["of an older generation"] += 1
                self.send(sender, say(Kind.AGAIN, sequence=header.sequence))
            elif header.kind == Kind.PUSH:
                self._push(sender, message)
            else:
                self._answer_when_ready(sender, header)
        elif header.kind == Kind.BEAT:
            self.send(sender, say(Kind.ALIVE, sequence=header.sequence))
        elif header.kind in ORDERS:
            self._obey(sender, message)
        elif header.kind == Kind.SQUARES and header.rank == 0 and self.rank:
            if header.generation == self.generation:
                self.take_squares(header.update, header.loss)
        elif header.kind in (Kind.HELLO, Kind.REPORT, Kind.LEAVE):
            self.send(sender, say(Kind.REFUSED, {"why": f"rank {self.rank} is not the leader of this run: ask rank 0"}))
        else:
            raise WireError(f"a server does not accept {Kind(header.kind).name}")

    def _obey(self, sender: Address, message: Message) -> None:
        """Carry out an order of the leader."""
        header = message.header
        if header.rank != 0 or self.rank == 0:
            raise WireError(f"{Kind(header.kind).name} that is not from the leader")
        self.leader = sender
        if header.kind == Kind.ATTACH:
            self.refusal = self.refusal or self.on_attach(message.words())
        elif header.kind == Kind.RESTORE:
            if header.update not in self.checkpoints():
                raise WireError(f"no checkpoint {header.update} here")
            self.restore(header.update)
            self.generation = header.generation
        elif header.kind != Kind.FINISH and header.generation != self.generation:
            pass  # it was for the process before this one, or before training went back
        elif header.kind == Kind.KEEP:
            self.shard.keep()
        elif header.kind == Kind.RECALL:
            self.shard.recall()
        elif header.kind == Kind.SAVE:
            self.save(header.update, f"{header.generation:x}.{header.life:x}")
        else:
            self.finished = True
        self._state(sender, header)

    def _push(self, sender: Address, message: Message) -> None:
        header = message.header
        chunk = self.shard.chunks.get(header.chunk)
        if chunk is None or header.length != chunk.values.nbytes:
            raise WireError(f"{header.length} bytes for chunk {header.chunk}")
        missed = self.shard.check(header.chunk, header.update, header.slot, header.slots, header.version,
                                  len(chunk.values))  # fmt: skip
        if missed is None:
            self.traffic.dropped["duplicate"] += 1
        else:
            self.traffic.bytes_received += header.length
            self.traffic.messages_received += 1
            self.gradient(header, missed)
            values = as_values(message.payload, chunk.values.dtype)
            finite = not header.nonfinite and math.isfinite(header.loss)
            # A worker changes a gradient when it is answered, with weights of version `want`.
            lent = (Lent.UNTIL_MADE if header.want > header.update else Lent.BRIEFLY) if message.lent else None
            self.shard.add(header.chunk, header.update, header.slot, header.slots, missed, values, finite=finite,
                           weight=header.weight, nominal=header.nominal, lent=lent)  # fmt: skip
            header.staleness = missed
        self._answer_when_ready(sender, header)
        if self.shard.clip:
            self.tell_squares()
        self._answer_waiting([header.chunk])

    def _answer_waiting(self, chunks: Iterable[int]) -> None:
        for number in chunks:
            for key, waiting in list(self._waiting.get(number, {}).items()):
                if self.shard.chunks[number].version >= waiting.want:
                    del self._waiting[number][key]
                    self._answer(key[0], waiting)

    def tell_squares(self) -> None:
        """Tell the leader the squares of this server's part of a gradient that is complete."""
        if self.shard.own and self.leader:
            update, squares = self.shard.own
            self.send(self.leader, Message(Header(Kind.SQUARES, update=update, loss=squares)))

    def take_squares(self, update: int, squares: float) -> None:
        """The squares of the whole gradient: make the update. A repeated message is ignored."""
        if self.shard.own and self.shard.own[0] == update:
            self.shard.whole[update] = squares
            self.shard.make_clipped()
            self._answer_waiting(self.shard.chunks)
            self.tell_squares()

    def gradient(self, header: Header, missed: int) -> None:
        """Called when a gradient is accepted; the leader counts it."""

    def updated(self, number: int) -> None:
        """Called when a chunk has been updated; the leader counts it."""

    def _answer_when_ready(self, sender: Address, header: Header) -> None:
        chunk = self.shard.chunks.get(header.chunk)
        if chunk is None:
            raise WireError(f"no chunk {header.chunk} here")
        if chunk.version >= header.want:
            self._answer(sender, header)
        elif header.want > chunk.version + (self.shard.staleness or 0) + FARTHEST:
            raise WireError(f"version {header.want} of chunk {header.chunk}, which has version {chunk.version}")
        else:
            self._waiting.setdefault(header.chunk, {})[sender, header.update, header.slot] = header

    def _answer(self, sender: Address, asked: Header) -> None:
        chunk = self.shard.chunks[asked.chunk]
        weights = chunk.published()
        if asked.kind == Kind.PUSH:
            self.traffic.bytes_sent += len(weights)
            self.traffic.messages_sent += 1
        answer = Header(Kind.WEIGHTS, sequence=asked.sequence, chunk=asked.chunk, update=asked.update,
                        slot=asked.slot, version=chunk.version, staleness=asked.staleness)  # fmt: skip
        self.send(sender, Message(answer, weights))

    # Checkpoints are saved when no gradient is on its way: then all chunks of all servers have the same updates.

    def save(self, number: int, mark: str, facts: dict[str, Any] | None = None) -> None:
        """Save this server's part of a checkpoint."""
        if self.store:
            self.store.save(number, mark, {n: self.shard.tensors(n) for n in self.shard.chunks}, facts or {})

    def restore(self, number: int) -> dict[str, Any]:
        """Restore a checkpoint (0: the initial state); return its facts."""
        self._waiting = {}
        if self.store:
            self.store.forget_after(number)
        if number == 0:
            for n, chunk in self.shard.chunks.items():
                self.shard.load(n, {"values": chunk.first}, 0)
            return {}
        assert self.store is not None
        tensors, facts = self.store.load(number)
        for n in self.shard.chunks:
            self.shard.load(n, tensors[n], number)
        return facts

    def checkpoints(self) -> list[int]:
        return [0, *(self.store.numbers() if self.store else [])]

    def _state(self, sender: Address, asked: Header) -> None:
        words = {
            "checkpoints": self.checkpoints(),
            "saves": self.store is not None,
            "traffic": vars(self.traffic),
            "finished": self.finished,
            "stopping": self.stopping,
            "refusal": self.refusal,
            "about": self.about,
        }
        self.send(sender, say(Kind.STATE, words, sequence=asked.sequence))


def as_values(payload: Buffer, dtype: torch.dtype) -> Tensor:
    """The payload as a tensor, without a copy unless it is not aligned to the size of a value."""
    values = torch.frombuffer(payload, dtype=dtype)
    return values if values.data_ptr() % dtype.itemsize == 0 else values.clone()

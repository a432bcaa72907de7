"""What goes over the wire: a fixed binary header, then raw values or a few words of JSON; never a pickle."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum
from operator import attrgetter
from typing import Any

from paceline.errors import PacelineError

MAGIC, PROTOCOL = b"PLPS", 3
# Words are few: more than this is not from a rank.
MOST_WORDS = 2**20

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Who says it: w a worker, s a server, 0 the server that leads; what an answer answers."""

    HELLO = 1  # w→0: who I am, and what I was started to do
    WELCOME = 2  # 0→w: HELLO
    REFUSED = 3  # s→w: you cannot take part, and why
    AGAIN = 4  # s→w: I do not know you (any more): say HELLO again
    REPORT = 5  # w→0: what I have done, how many leases I want to hold
    LEASES = 6  # 0→w: REPORT
    BEAT = 7  # w→s: I live
    ALIVE = 8  # s→w: BEAT
    LEAVE = 9  # w→0: I go, and this is what I did
    PUSH = 10  # w→s: a chunk of a gradient; answered by WEIGHTS
    PULL = 11  # w→s: answered by WEIGHTS
    WEIGHTS = 12  # s→w: a chunk of the weights
    ATTACH = 13  # 0→s: I lead; where are you?
    RESTORE = 14  # 0→s: go back to this snapshot
    KEEP = 15  # 0→s: remember these weights, they are the best so far
    RECALL = 16  # 0→s: go back to the weights you were told to remember
    FINISH = 17  # 0→s: the training is over
    STATE = 18  # s→0: ATTACH, RESTORE, KEEP, RECALL, FINISH
    RECORDS = 19  # a rank that does not see the run folder → rank 0: a part of one of its files
    RECORDED = 20  # 0→ the rank: RECORDS


class WireError(PacelineError):
    """A message that no rank of ours has sent."""


@dataclass(slots=True)
class Header:
    """What every message begins with; a kind uses the fields it needs, the others are 0."""

    kind: int
    run: int = 0  # of this training
    generation: int = 0  # changes when training goes back to a snapshot: older messages are void
    rank: int = 0  # the sender
    life: int = 0  # the sender's process: another one after a restart
    sequence: int = 0
    chunk: int = 0
    update: int = 0  # a gradient's part: number `slot` of `slots` of this update
    slot: int = 0
    slots: int = 0
    version: int = 0  # of the weights: sent, or that a gradient was computed with
    want: int = 0  # answer when the weights have at least this version
    staleness: int = 0
    loss: float = 0.0  # summed over the part's samples
    correct: int = 0
    spoiled: int = 0  # of a gradient that is not finite: the place of its first such value in the whole, from 1
    length: int = 0  # of what follows, in bytes


_LAYOUT = struct.Struct("<4sHHQQIQQIQIIQQQdQQQ")
_VALUES = attrgetter(*(field.name for field in fields(Header)))
_START, _CHECK = struct.Struct("<4sH"), struct.Struct("<I")
SIZE = _LAYOUT.size + _CHECK.size


@dataclass(slots=True)
class Message:
    header: Header
    payload: Buffer = b""

    @property
    def kind(self) -> int:
        return self.header.kind

    def frames(self) -> list[Buffer]:
        self.header.length = memoryview(self.payload).nbytes
        header = _LAYOUT.pack(MAGIC, PROTOCOL, *_VALUES(self.header))
        return [header + _CHECK.pack(zlib.crc32(header)), self.payload]

    def words(self) -> dict[str, Any]:
        """The payload of a message of words."""
        if self.header.length > MOST_WORDS:
            raise WireError(f"{self.header.length} bytes of words")
        try:
            words = json.loads(bytes(self.payload))
        except (ValueError, RecursionError) as error:
            raise WireError(f"not JSON: {error}") from error
        if not isinstance(words, dict):
            raise WireError("not an object")
        return words


def say(kind: Kind, words: dict[str, Any] | None = None, /, **header: Any) -> Message:
    """A message of words."""
    return Message(Header(kind, **header), json.dumps(words or {}).encode())


def read(frames: Sequence[Buffer]) -> Message:
    """The message in these frames, or WireError. Its payload is the frame itself, not a copy."""
    if len(frames) != 2 or len(frames[0]) < _START.size:
        raise WireError(f"frames of {[len(frame) for frame in frames][:4]} bytes")
    magic, protocol = _START.unpack_from(frames[0])
    if magic != MAGIC:
        raise WireError("no message of ours")
    if protocol != PROTOCOL:
        raise OtherProtocol(protocol)
    if len(frames[0]) != SIZE:
        raise WireError(f"a header of {len(frames[0])} bytes")
    header = Header(*_LAYOUT.unpack_from(frames[0])[2:])
    if _CHECK.unpack_from(frames[0], _LAYOUT.size)[0] != zlib.crc32(memoryview(frames[0])[: _LAYOUT.size]):
        raise WireError("a header that was changed on its way")
    if header.kind not in Kind._value2member_map_:
        raise WireError(f"unknown kind {header.kind}")
    if header.length != len(frames[1]):
        raise WireError(f"{len(frames[1])} bytes where {header.length} were announced")
    return Message(header, frames[1])


class OtherProtocol(WireError):
    """A rank of another version of ours: it gets an answer."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"protocol {protocol}, and this is protocol {PROTOCOL}")
        self.protocol = protocol


def take(words: dict[str, Any], **kinds: type) -> list[Any]:
    """The values of these names, each of the type given; WireError for what is missing or of another type."""
    for name, kind in kinds.items():
        if type(words.get(name)) is not kind:
            raise WireError(f"{name} is {words.get(name)!r:.60}, and {kind.__name__} is expected")
    return [words[name] for name in kinds]


def numbers(values: Sequence[Any]) -> list[int]:
    """Whole numbers of a list that came as words."""
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise WireError("a list of whole numbers is expected")
    return list(values)

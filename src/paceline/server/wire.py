"""The message format: a fixed binary header, then raw values or a little JSON; never a pickle."""

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

MAGIC, PROTOCOL = b"PLPS", 5
# The largest JSON payload that a rank sends.
MOST_WORDS = 2**20
LENT = b"lent"

Buffer = bytes | bytearray | memoryview


class Kind(IntEnum):
    """Kinds of messages. Sender and receiver: w a worker, s a server, 0 the leader."""

    HELLO = 1  # w→0: a worker wants to join, with its fingerprint
    WELCOME = 2  # 0→w: answer to HELLO
    REFUSED = 3  # s→w: the worker cannot join, and why
    AGAIN = 4  # s→w: the worker is unknown, or not known any more: it must send HELLO again
    REPORT = 5  # w→0: completed leases, and how many leases the worker wants to hold
    LEASES = 6  # 0→w: answer to REPORT
    BEAT = 7  # w→s: heartbeat
    ALIVE = 8  # s→w: answer to BEAT
    LEAVE = 9  # w→0: the worker leaves, with its counts
    PUSH = 10  # w→s: a chunk of a gradient; answered by WEIGHTS
    PULL = 11  # w→s: answered by WEIGHTS
    WEIGHTS = 12  # s→w: a chunk of the weights
    ATTACH = 13  # 0→s: the leader asks for the server's state
    RESTORE = 14  # 0→s: restore this checkpoint
    KEEP = 15  # 0→s: keep a copy of these weights, the best so far
    RECALL = 16  # 0→s: restore the weights that were kept
    FINISH = 17  # 0→s: the training is over
    STATE = 18  # s→0: answer to ATTACH, RESTORE, KEEP, RECALL, FINISH, SAVE
    RECORDS = 19  # a rank that does not see the run folder → rank 0: a part of one of its files
    RECORDED = 20  # 0→ the rank: answer to RECORDS
    SAVE = 21  # 0→s: save this server's part of a checkpoint; no gradient is on its way
    SQUARES = 22  # s→0: the sum of the squares of this server's part of an update's gradient; 0→s: of the whole


class WireError(PacelineError):
    """An invalid message, which no rank of this run has sent."""


@dataclass(slots=True)
class Header:
    """The header of every message; fields that a kind does not use are 0."""

    kind: int
    run: int = 0  # the run's number
    generation: int = 0  # grows when training goes back to a checkpoint; messages of older generations are refused
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
    loss: float = 0.0  # summed over the part's samples; so are the weight and the metric; or the SQUARES
    weight: float = 0.0
    metric: float = 0.0
    nominal: float = 0.0  # what the gradient was divided by, instead of the weight of the whole update
    nonfinite: int = 0  # position, from 1, of the first value of the whole gradient that is not finite; 0: none
    length: int = 0  # of what follows, in bytes


_LAYOUT = struct.Struct("<4sHHQQIQQIQIIQQQddddQQ")
_VALUES = attrgetter(*(field.name for field in fields(Header)))
_START, _CHECK = struct.Struct("<4sH"), struct.Struct("<I")
SIZE = _LAYOUT.size + _CHECK.size


@dataclass(slots=True)
class Message:
    header: Header
    payload: Buffer = b""
    lent: bool = False  # the payload lies in the sender's memory: it must not be changed, and not be kept for long

    @property
    def kind(self) -> int:
        return self.header.kind

    def frames(self) -> list[Buffer]:
        self.header.length = memoryview(self.payload).nbytes
        header = _LAYOUT.pack(MAGIC, PROTOCOL, *_VALUES(self.header))
        return [header + _CHECK.pack(zlib.crc32(header)), self.payload]

    def words(self) -> dict[str, Any]:
        """The payload of a JSON message."""
        if self.header.length > MOST_WORDS:
            raise WireError(f"{self.header.length} bytes of JSON")
        try:
            words = json.loads(bytes(self.payload))
        except (ValueError, RecursionError) as error:
            raise WireError(f"not JSON: {error}") from error
        if not isinstance(words, dict):
            raise WireError("not an object")
        return words


def say(kind: Kind, words: dict[str, Any] | None = None, /, **header: Any) -> Message:
    """A JSON message."""
    return Message(Header(kind, **header), json.dumps(words or {}).encode())


def read(frames: Sequence[Buffer]) -> Message:
    """The message in these frames, or WireError. Its payload is the frame itself, not a copy.

    A third frame, LENT, says that the payload is lent. (On its way, the second one is then a reference to it.)
    """
    lent = len(frames) == 3 and frames[2] == LENT
    if len(frames) != 2 + lent or len(frames[0]) < _START.size:
        raise WireError(f"frames of {[len(frame) for frame in frames][:4]} bytes")
    magic, protocol = _START.unpack_from(frames[0])
    if magic != MAGIC:
        raise WireError("not a message of paceline")
    if protocol != PROTOCOL:
        raise OtherProtocol(protocol)
    if len(frames[0]) != SIZE:
        raise WireError(f"a header of {len(frames[0])} bytes")
    header = Header(*_LAYOUT.unpack_from(frames[0])[2:])
    if _CHECK.unpack_from(frames[0], _LAYOUT.size)[0] != zlib.crc32(memoryview(frames[0])[: _LAYOUT.size]):
        raise WireError("a header with a wrong checksum")
    if header.kind not in Kind._value2member_map_:
        raise WireError(f"unknown kind {header.kind}")
    if header.length != len(frames[1]):
        raise WireError(f"{len(frames[1])} bytes instead of {header.length}")
    return Message(header, frames[1], lent=lent)


class OtherProtocol(WireError):
    """A message of another version of paceline; it gets an answer."""

    def __init__(self, protocol: int) -> None:
        super().__init__(f"protocol {protocol} instead of protocol {PROTOCOL}")
        self.protocol = protocol


def take(words: dict[str, Any], **kinds: type) -> list[Any]:
    """The values of these names; WireError if one is missing or has another type than the one given."""
    for name, kind in kinds.items():
        if type(words.get(name)) is not kind:
            raise WireError(f"{name} is {words.get(name)!r:.60} instead of {kind.__name__}")
    return [words[name] for name in kinds]


def numbers(values: Sequence[Any]) -> list[int]:
    """The list as integers; WireError if it has anything else."""
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise WireError("not a list of integers")
    return list(values)

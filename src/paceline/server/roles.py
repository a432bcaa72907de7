"""Who is who to the server that leads: what it goes by, what it knows of the others, whom it tells."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from paceline.server.core import Address
from paceline.server.ledger import Part
from paceline.server.tally import Result

# Why a worker leaves that was asked to stop.
WAS_INTERRUPTED = "it was interrupted"


@dataclass(frozen=True)
class Meeting:
    """Where the servers are reached, the secret that only ranks of the run share, and the run's number.

    `security` says it in a word: ipc (sockets in a private folder), curve (encrypted) or plain (neither, as asked for).
    """

    endpoints: tuple[str, ...]
    run: int
    security: str
    secret: bytes | None = None
    store: Any = field(default=None, repr=False, compare=False)  # where ranks still find all this: open while held


@dataclass(frozen=True)
class Rules:
    """How long to wait for whom, what to evaluate, who must come."""

    workers: tuple[int, ...]  # ranks
    servers: int = 1
    silent: float = 5.0  # a worker that has said nothing for so long is lost
    patience: float = 120.0  # for all to come, for one gradient, for anyone at all
    validation: int = 0  # samples
    test: int = 0
    evaluation_batch: int = 512


class Watcher(Protocol):
    """Is told what happens, as it happens."""

    def begun(self, ranks: dict[int, dict[str, Any]]) -> None: ...

    def updated(self, update: int, epoch: int, result: Result) -> None: ...

    def epoch_ended(self, epoch: int, result: Result) -> None: ...

    def evaluated(self, name: str, epoch: int, result: Result) -> None: ...

    def joined(self, rank: int, about: dict[str, Any], *, back: bool) -> None: ...

    def lost(self, rank: int, why: str, parts: list[Part]) -> None: ...

    def went_back(self, number: int, why: str) -> None: ...


@dataclass
class Return:
    """Training went back to a snapshot: to after how many updates, how many were lost, why."""

    number: int
    lost: int
    why: str


@dataclass
class ServerState:
    """What another server has said of itself, when, and in answer to which order."""

    life: int
    heard: float
    sequence: int
    snapshots: list[int]
    traffic: dict[str, Any]
    about: dict[str, Any]


@dataclass
class Member:
    """A worker that has said HELLO: where it is reached, which process it is, how many leases it wants to hold."""

    address: Address
    life: int
    about: dict[str, Any]
    heard: int = 0  # the number of its latest report
    target: int = 0
    told: set[int] | None = field(default_factory=set)  # leases; None: it has asked, and must be told


def mismatch(rank: int, theirs: dict[str, Any], mine: dict[str, str]) -> str | None:
    """What a rank has otherwise than the server that leads, for people; nothing where all is alike."""
    for name, value in mine.items():
        if theirs.get(name) != value:
            return (
                f"rank {rank} has another {name} than the server ({theirs.get(name)!s:.80}, not {value!s:.80}): start "
                f"all ranks with the same command, in the same version"
            )
    return None

"""The leader's rules, its view of servers and workers, and the interface of its observer."""

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
    """The servers' endpoints, the secret that the ranks of the run share, and the run's number.

    `security` is ipc (sockets in a private folder), curve (encrypted) or plain (not encrypted, on request).
    """

    endpoints: tuple[str, ...]
    run: int
    security: str
    secret: bytes | None = None
    store: Any = field(default=None, repr=False, compare=False)  # kept open for ranks that still read all this


@dataclass(frozen=True)
class Rules:
    """Timeouts, evaluation, and the ranks of servers and workers."""

    workers: tuple[int, ...]  # ranks
    servers: int = 1
    silent: float = 5.0  # a worker that has sent nothing for this many seconds is lost
    patience: float = 120.0  # timeout for all ranks to join, for one gradient, and for any worker at all
    validation: int = 0  # samples
    test: int = 0
    evaluation_batch: int = 512
    save_every: int = 0  # updates; 0: never
    save_seconds: float = 0.0
    skips: int = 0  # how many updates in a row may be skipped because a gradient is not finite


class Watcher(Protocol):
    """Is called on every event of the run."""

    def begun(self, ranks: dict[int, dict[str, Any]]) -> None: ...

    def updated(self, update: int, epoch: int, result: Result) -> None: ...

    def skipped(self, update: int) -> None: ...

    def epoch_ended(self, epoch: int, result: Result) -> None: ...

    def evaluated(self, name: str, epoch: int, update: int, result: Result) -> None: ...

    def joined(self, rank: int, about: dict[str, Any], *, back: bool) -> None: ...

    def lost(self, rank: int, why: str, parts: list[Part]) -> None: ...

    def went_back(self, number: int, why: str) -> None: ...


@dataclass
class Return:
    """A return to a checkpoint: after how many updates it was taken, how many updates were lost, why."""

    number: int
    lost: int
    why: str


@dataclass
class ServerState:
    """The last state that another server reported, when, and in answer to which order."""

    life: int
    heard: float
    sequence: int
    checkpoints: list[int]
    saves: bool  # whether it can save its part of checkpoints
    traffic: dict[str, Any]
    about: dict[str, Any]


@dataclass
class Member:
    """A worker that has joined: its address, its process, how many leases it wants to hold."""

    address: Address
    life: int
    about: dict[str, Any]
    heard: int = 0  # the number of its latest report
    target: int = 0
    told: set[int] | None = field(default_factory=set)  # leases sent to it; None: its report must be answered


def mismatch(rank: int, theirs: dict[str, Any], mine: dict[str, str]) -> str | None:
    """A message about the first difference between a rank and the leader; None if there is none."""
    for name, value in mine.items():
        if theirs.get(name) != value:
            return (
                f"rank {rank} has a different {name} than the server ({theirs.get(name)!s:.80}, not {value!s:.80}): "
                f"start all ranks with the same command and the same version"
            )
    return None

"""One rank's side of a run folder: finds it, describes the ranks, samples the node, and records how the rank ended.

A rank of `paceline train` and one of a user's own loop (`paceline.record`) use the same code.
"""

from __future__ import annotations

import errno
import json
import secrets
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from paceline import own_code
from paceline.comm.base import Comm
from paceline.comm.seat import Seat
from paceline.comm.words import all_or_none, share_text, tell
from paceline.errors import (
    EXIT_FAILED,
    AgreedError,
    CommError,
    CommTimeout,
    DivergedError,
    PacelineError,
    ReplicaError,
    UsageError,
)
from paceline.export.trackers import track_live
from paceline.launch.agree import describe_ranks
from paceline.launch.clocks import measure_clock
from paceline.launch.diagnose import Ending, diagnose, failed_before, find_stopped, wait_for_blame
from paceline.launch.memory_kills import MemoryKills
from paceline.launch.usage import NodeUsage, boot_id
from paceline.messages import LOGGER
from paceline.run.folder import LOGS, give_space, rank_file, rank_log, write_environment
from paceline.run.lines import LineWriter
from paceline.run.liveness import is_here, owner_text
from paceline.run.recorder import Recorder
from paceline.run.records import Clock, Error, Line

if TYPE_CHECKING:
    from paceline.launch.collect import Collector, Forwarder

# How long a rank that lost its peer waits to learn from the run folder which rank failed first. (Paceline's launcher
# does that for its own ranks; mpiexec ends all ranks as soon as one aborts.)
BLAME_SECONDS = 10.0
# What gloo says in a plain RuntimeError when a peer is gone or does not answer.
LOST_BY_GLOO = ("gloo/transport", "Connection closed by peer", "Connection reset by peer", "Timed out waiting")


class RecordedRank:
    """A rank that records itself in the run folder. `folder` is given if Paceline's launcher has made it."""

    def __init__(self, seat: Seat, folder: Path | None = None) -> None:
        self.seat, self.folder = seat, folder
        self.launched = folder is not None
        self.kills = MemoryKills()
        self.remote: list[int] = []  # ranks that do not see the run folder
        self.watch: NodeUsage | None = None
        self.watching = ExitStack()
        self.collector: Collector | None = None  # rank 0's, if other ranks do not see the run folder
        self.forwarder: Forwarder | None = None  # of such a rank
        self._clock: Clock | None = None

    def open(self, comm: Comm, make: Callable[[], None]) -> None:
        """Find the run folder, which `make` sets on rank 0; record the ranks, and begin to sample the node."""
        all_or_none(lambda: make() if comm.rank == 0 and self.folder is None else None, comm)
        ranks = describe_ranks(comm)
        self._find_folder(comm, [row["host"] for row in ranks["ranks"]])
        assert self.folder is not None
        if comm.rank == 0 or self.forwarder:
            write_environment(self.folder, ranks)
            for row in ranks["ranks"]:
                LOGGER.debug("rank %d: process %d on %s", row["rank"], row["pid"], row["host"])
        comm.barrier()
        self.watch_node()
        self._clock = measure_clock(comm, boot_id())

    def make_recorder(self, tracked: Mapping[str, Any] | None = None) -> Recorder:
        """What this rank records with from now on; first, how its clock differs from that of rank 0.

        With the options of the run as `tracked`, TensorBoard follows it as it trains.
        """
        assert self.folder is not None
        follower = None if tracked is None else track_live(self.folder, self.seat.rank, tracked)
        recorder = Recorder(self.folder, self.seat.rank, follower)
        if self._clock:
            recorder.write(self._clock)
        return recorder

    def _find_folder(self, comm: Comm, hosts: list[str]) -> None:
        """Use the folder that rank 0 has created; a rank that does not see it sends its records to rank 0."""
        mine = {"folder": str(self.folder), "owner": owner_text(self.folder)} if comm.rank == 0 and self.folder else {}
        told: dict[str, str] = json.loads(tell(json.dumps(mine), comm))
        here = comm.rank == 0 or is_here(Path(told["folder"]), told["owner"])
        self.remote = remote = [rank for rank, said in enumerate(share_text("" if here else "remote", comm)) if said]
        secret = secrets.token_bytes(32)
        if remote:
            if comm.rank == 0:
                self.collect(self.seat.address or (hosts[remote[0]], 1), secret)
                told = {"collector": self.collector.endpoint if self.collector else "", "secret": secret.hex()}
            told |= json.loads(tell(json.dumps(told), comm))
        if comm.rank:
            self.use_folder(Path(told["folder"]), here=here, collector=told.get("collector", ""),
                            secret=bytes.fromhex(told.get("secret", "")))  # fmt: skip

    def collect(self, towards: tuple[str, int], secret: bytes | None) -> None:
        """Let ranks that do not see the run folder send their records here."""
        from paceline.launch.collect import Collector
        from paceline.launch.meeting import own_address

        assert self.folder is not None
        try:
            self.collector = Collector(self.folder, own_address(towards), secret)
        except (UsageError, OSError) as error:
            LOGGER.warning("ranks on other machines keep their records there: %s", error)

    def use_folder(self, folder: Path, *, here: bool, collector: str, secret: bytes | None) -> None:
        """The run folder where it can be seen; else a private one whose content is sent to rank 0, if that collects."""
        self.folder = folder
        if not here and collector:
            from paceline.launch.collect import Forwarder

            self.forwarder = Forwarder(collector, self.seat.rank, secret)
            self.folder = self.forwarder.folder
        (self.folder / LOGS).mkdir(parents=True, exist_ok=True)

    def hand_in(self, *, failed: bool = False) -> None:
        """Send or collect the records that are not in the run folder yet."""
        wait = (2.0,) if failed else ()
        if self.forwarder and not self.forwarder.close(*wait):
            LOGGER.warning("rank %d: not all of its records have reached rank 0; they are in %s on %s",
                           self.seat.rank, self.folder, socket.gethostname())  # fmt: skip
        if self.collector and (missing := self.collector.close(*wait)):
            LOGGER.warning("records of ranks %s are not complete", ", ".join(map(str, missing)))

    def watch_node(self) -> None:
        """Start sampling the node, on its first rank, as soon as the run folder is known."""
        if self.seat.local_rank == 0 and self.watch is None:
            assert self.folder is not None
            usage = NodeUsage(self.folder, self.add_to_log, own_processes=self.seat.in_lab)
            self.watch = self.watching.enter_context(usage)

    def add_to_log(self, text: str) -> None:
        with suppress(OSError), self.log().open("a") as log:
            log.write(text + "\n")

    def log(self) -> Path:
        assert self.folder is not None
        log = rank_log(self.folder, self.seat.rank)
        log.parent.mkdir(exist_ok=True)
        return log

    def record(self, line: Line) -> None:
        """Append a line to the rank's file; ignore errors, because recording the end must not fail."""
        assert self.folder is not None
        with suppress(OSError), closing(LineWriter(rank_file(self.folder, self.seat.rank))) as lines:
            lines.write(line)

    def diagnose(self, *, interrupted: bool) -> Ending:
        assert self.folder is not None
        return diagnose(self.folder, memory_kill=lambda _: self.kills.describe(), interrupted=interrupted)

    def end_with(self, error: BaseException, *, interrupted: bool = False) -> Ending | None:
        """Record the error, and find out how the run ended: None if Paceline's launcher does that."""
        assert self.folder is not None
        self.write_down(error)
        if self.forwarder:
            self.forwarder.flush()  # rank 0 finds out who failed first from all ranks' records
        if not is_own(error, self.seat.rank) and self.seat.launcher != "paceline":
            wait_for_blame(self.folder, self.seat.rank, BLAME_SECONDS)
        return None if self.launched else self.diagnose(interrupted=interrupted)

    def write_down(self, error: BaseException) -> int:
        """Write the error to the rank's log and records; return its exit code."""
        rank = self.seat.rank
        code, text = code_of(error), text_of(error)
        assert self.folder is not None
        if is_full(error):
            give_space(self.folder)
            text = f"{text}: there is no space left in {self.folder}; free some, or choose another folder"
        with suppress(OSError), self.log().open("a") as log:
            traceback.print_exception(error, file=log)
        peer = error.peer if isinstance(error, CommError) else None
        stopped = find_stopped(self.folder, self.seat.size) if isinstance(error, CommTimeout) else None
        if stopped is not None:
            peer, text = stopped, f"{text}; the process of rank {stopped} is stopped"
        # All ranks detect this at the same time, and know which rank caused it.
        blames = error.rank if isinstance(error, DivergedError) else None
        self.record(
            Error(
                text,
                time.time(),
                own=is_own(error, rank),
                after=failed_before(self.folder, rank, self.seat.size),
                exit_code=code,
                everyone=isinstance(error, DivergedError | AgreedError) and blames is None,
                peer=peer,
                stopped=stopped is not None,
                timeout=isinstance(error, CommTimeout),
                blames=blames,
            )
        )
        return code


def code_of(error: BaseException) -> int:
    return error.exit_code if isinstance(error, PacelineError) else EXIT_FAILED


def text_of(error: BaseException) -> str:
    return str(error) if isinstance(error, PacelineError) else own_code.reason(error)


def is_full(error: BaseException | None) -> bool:
    """Whether this error, or one that caused it, says that a disk or a quota is full."""
    while error is not None and not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        error = error.__cause__ or error.__context__
    return error is not None


def is_own(error: BaseException, rank: int) -> bool:
    """Whether the error originated on this rank, not on another one that this rank has lost."""
    by_gloo = isinstance(error, RuntimeError) and any(words in str(error) for words in LOST_BY_GLOO)
    lost = isinstance(error, CommError | dist.DistError) or by_gloo
    return not lost and not (isinstance(error, ReplicaError) and error.rank != rank)

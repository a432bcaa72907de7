"""One rank of a run without parameter servers: it connects, trains, and reports how it ended."""

from __future__ import annotations

import errno
import json
import secrets
import socket
import time
import traceback
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from paceline import own_code
from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import read_manifest
from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.seat import Seat
from paceline.comm.words import all_or_none, share_text, tell
from paceline.errors import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_OK,
    AgreedError,
    CommError,
    CommTimeout,
    DivergedError,
    PacelineError,
    ReplicaError,
    UsageError,
)
from paceline.launch.agree import agree_on_spec, describe_ranks
from paceline.launch.connect import connect, leave
from paceline.launch.diagnose import Ending, diagnose, failed_before, find_stopped, wait_for_blame
from paceline.launch.folder import begin_summary, remove_failed_start
from paceline.launch.memory_kills import MemoryKills
from paceline.launch.resume import AUTO, NEVER, Continued, open_folder
from paceline.launch.signals import StopSignals
from paceline.launch.usage import NodeUsage
from paceline.layout import crowded
from paceline.messages import LOGGER
from paceline.run.folder import LOGS, give_space, rank_file, rank_log, read_summary, write_environment
from paceline.run.lines import LineWriter
from paceline.run.liveness import is_here, owner_text
from paceline.run.recorder import Recorder
from paceline.run.records import INTERRUPTED, Error, Line, Signal, Summary
from paceline.spec import Resolved
from paceline.strategies.setup import choose_place
from paceline.training.console import Console
from paceline.training.driver import Job, train

if TYPE_CHECKING:
    from paceline.launch.collect import Collector, Forwarder

# How long a rank that lost its peer waits to learn from the run folder which rank failed first. (Paceline's launcher
# does that for its own ranks; mpiexec ends all ranks as soon as one aborts.)
BLAME_SECONDS = 10.0
# Launchers that may bind each rank to its own cores.
BINDING = ("mpiexec", "srun")


class Rank:
    """One rank of a run: connects, agrees with the others on the run folder, trains, and reports how it ended."""

    def __init__(self, resolved: Resolved, seat: Seat, folder: Path | None, stream: TextIO | None) -> None:
        self.resolved, self.spec, self.seat, self.folder = resolved, resolved.spec, seat, folder
        self.stream = stream if seat.rank == 0 else None
        self.launched = folder is not None
        self.kills = MemoryKills()
        self.stop: StopSignals | None = None
        self.stops_run = True  # whether a signal to this rank stops the whole run
        self.remote: list[int] = []  # ranks that do not see the run folder
        self.found: Continued | None = None  # the run that is continued, on a rank 0 that looked for it
        self.summary: Summary | None = None
        self.watch: NodeUsage | None = None
        self.watching = ExitStack()
        self.collector: Collector | None = None  # rank 0's, if other ranks do not see the run folder
        self.forwarder: Forwarder | None = None  # of such a rank

    def run(self, comm: Comm | None = None) -> int:
        """Train and return the exit code. `comm` is given if ranks are threads."""
        metered: MeteredComm | None = None
        try:
            found = comm or connect(self.spec.transport, self.spec.timeout, self.seat)
            found.on_stuck = self._fail
            metered = MeteredComm(found)
            with self.watching:
                self._train(metered)
            self._hand_in()
        except Exception as error:  # noqa: BLE001  recorded, printed and turned into an exit code
            code = self._fail(error)
            self._hand_in(failed=True)
            if metered:
                metered.abort(str(error), code)
            return code
        finally:
            leave(self.seat)
        metered.close()
        assert self.summary is not None
        return EXIT_INTERRUPTED if self.summary.status == INTERRUPTED else EXIT_OK

    def on_signal(self, number: int) -> None:
        """Record the signal. mpiexec kills its ranks soon after it, so there the summary is written at once."""
        if self.folder is None:
            return
        self._record(Signal(number, time.time()))
        if self.seat.launcher == "mpiexec" and not self.launched and self.stops_run:
            self._diagnose(interrupted=True)

    def _diagnose(self, *, interrupted: bool) -> Ending:
        assert self.folder is not None
        return diagnose(self.folder, memory_kill=lambda _: self.kills.describe(), interrupted=interrupted)

    def _train(self, comm: MeteredComm) -> None:
        seat = self.seat
        # Paceline's launcher has prepared the data before it started the ranks.
        first = seat.local_rank == 0 and not self.launched
        place = choose_place(self.spec, seat.local_rank, first=first, speed=seat.speed)
        agree_on_spec(self.resolved, comm)
        all_or_none(lambda: self._open_folder() if comm.rank == 0 and self.folder is None else None, comm)
        ranks = describe_ranks(comm)
        self._find_folder(comm, [row["host"] for row in ranks["ranks"]])
        assert self.folder is not None
        if comm.rank == 0 or self.forwarder:
            write_environment(self.folder, ranks)
            for row in ranks["ranks"]:
                LOGGER.debug("rank %d: process %d on %s", row["rank"], row["pid"], row["host"])
        comm.barrier()
        self._watch_node()
        recorder = Recorder(self.folder, comm.rank)
        console = Console(self.stream, self._log() if comm.rank == 0 else None)
        try:
            self._introduce(console)
            stop_requested = self.stop.requested if self.stop else lambda: False
            self.summary = self._begin_summary()
            job = Job(self.spec, comm, place, console, stop_requested, self.summary, resume=self._checkpoint(comm))
            job.remote = self.remote
            train(job.opened(self.folder, recorder))
            console.line(f"Run folder: {self.folder}")
        finally:
            console.close()
            recorder.close()

    def _open_folder(self) -> None:
        """Make the run folder, or find the run that is continued: reading its checkpoint may take a while."""
        self.folder, self.resolved, self.found = open_folder(self.resolved)
        self.spec = self.resolved.spec

    def _begin_summary(self) -> Summary:
        """The summary at the start; of a run that is continued, with what it says about that."""
        assert self.folder is not None
        summary, before = begin_summary(self.spec), read_summary(self.folder)
        summary.resumed = before.resumed if before else []
        return summary

    def _checkpoint(self, comm: Comm) -> Checkpoint | None:
        """The checkpoint to start from, as rank 0 or the launcher has found it."""
        path = tell(self.spec.resume if comm.rank == 0 else "", comm)
        if path in (AUTO, NEVER):
            return None
        return all_or_none(lambda: Checkpoint(Path(path), read_manifest(Path(path))), comm)

    def _find_folder(self, comm: Comm, hosts: list[str]) -> None:
        """Use the folder that rank 0 has created; a rank that does not see it sends its records to rank 0."""
        mine = {"folder": str(self.folder), "owner": owner_text(self.folder)} if comm.rank == 0 and self.folder else {}
        told: dict[str, str] = json.loads(tell(json.dumps(mine), comm))
        here = comm.rank == 0 or is_here(Path(told["folder"]), told["owner"])
        self.remote = remote = [rank for rank, said in enumerate(share_text("" if here else "remote", comm)) if said]
        secret = secrets.token_bytes(32)
        if remote:
            if comm.rank == 0:
                self._collect(self.seat.address or (hosts[remote[0]], 1), secret)
                told = {"collector": self.collector.endpoint if self.collector else "", "secret": secret.hex()}
            told |= json.loads(tell(json.dumps(told), comm))
        if comm.rank:
            self._use_folder(Path(told["folder"]), here=here, collector=told.get("collector", ""),
                             secret=bytes.fromhex(told.get("secret", "")))  # fmt: skip

    def _collect(self, towards: tuple[str, int], secret: bytes | None) -> None:
        """Let ranks that do not see the run folder send their records here."""
        from paceline.launch.collect import Collector
        from paceline.launch.meeting import own_address

        assert self.folder is not None
        try:
            self.collector = Collector(self.folder, own_address(towards), secret)
        except (UsageError, OSError) as error:
            LOGGER.warning("ranks on other machines keep their records there: %s", error)

    def _use_folder(self, folder: Path, *, here: bool, collector: str, secret: bytes | None) -> None:
        """The run folder where it can be seen; else a private one whose content is sent to rank 0, if that collects."""
        self.folder = folder
        if not here and collector:
            from paceline.launch.collect import Forwarder

            self.forwarder = Forwarder(collector, self.seat.rank, secret)
            self.folder = self.forwarder.folder
        (self.folder / LOGS).mkdir(parents=True, exist_ok=True)

    def _hand_in(self, *, failed: bool = False) -> None:
        """Send or collect the records that are not in the run folder yet."""
        wait = (2.0,) if failed else ()
        if self.forwarder and not self.forwarder.close(*wait):
            LOGGER.warning("rank %d: not all of its records have reached rank 0; they are in %s on %s",
                           self.seat.rank, self.folder, socket.gethostname())  # fmt: skip
        if self.collector and (missing := self.collector.close(*wait)):
            LOGGER.warning("records of ranks %s are not complete", ", ".join(map(str, missing)))

    def _introduce(self, console: Console) -> None:
        """Print what Paceline's launcher prints before it starts the ranks."""
        if self.launched:
            return
        for line in (*self.resolved.introduction(), *(self.found.notes if self.found else ())):
            console.line(line)
        seat, spec = self.seat, self.spec
        workers, bound = max(1, seat.local_size - (spec.servers or 0)), seat.launcher in BINDING
        if seat.rank == 0 and (turns := crowded(workers, spec.threads, bound=bound)) and not spec.emulated:
            LOGGER.warning(turns)

    def _watch_node(self) -> None:
        """Start sampling the node, on its first rank, as soon as the run folder is known."""
        if self.seat.local_rank == 0 and self.watch is None:
            assert self.folder is not None
            usage = NodeUsage(self.folder, self._add_to_log, own_processes=self.seat.in_lab)
            self.watch = self.watching.enter_context(usage)

    def _add_to_log(self, text: str) -> None:
        with suppress(OSError), self._log().open("a") as log:
            log.write(text + "\n")

    def _log(self) -> Path:
        assert self.folder is not None
        log = rank_log(self.folder, self.seat.rank)
        log.parent.mkdir(exist_ok=True)
        return log

    def _fail(self, error: Exception) -> int:
        """Record the error; without Paceline's launcher, also decide how the run ended and print it."""
        rank = self.seat.rank
        code = error.exit_code if isinstance(error, PacelineError) else EXIT_FAILED
        text = str(error) if isinstance(error, PacelineError) else own_code.reason(error)
        if self.folder is None or not self.folder.is_dir():
            LOGGER.error("rank %d: %s", rank, text)
            if not isinstance(error, PacelineError):
                traceback.print_exception(error)
            return code
        self._write_down(error)
        if self.forwarder:
            self.forwarder.flush()  # rank 0 finds out who failed first from all ranks' records
        if not _own(error, rank) and self.seat.launcher != "paceline":
            wait_for_blame(self.folder, rank, BLAME_SECONDS)
        if not self.launched:
            ending = self._diagnose(interrupted=bool(self.stop and self.stop.requested()))
            who = f"rank {rank}: " if self.seat.size > 1 else ""
            LOGGER.error("%s%s", who, ending.message if ending.summary else text)
            if rank == 0:
                remove_failed_start(self.folder, ending)
            return ending.exit_code if ending.summary else code
        return code

    def _write_down(self, error: Exception) -> int:
        """Write the error to the rank's log and records; return its exit code."""
        rank = self.seat.rank
        code = error.exit_code if isinstance(error, PacelineError) else EXIT_FAILED
        text = str(error) if isinstance(error, PacelineError) else own_code.reason(error)
        assert self.folder is not None
        if is_full(error):
            give_space(self.folder)
            text = f"{text}: there is no space left in {self.folder}; free some, or choose another --output-dir"
        with suppress(OSError), self._log().open("a") as log:
            traceback.print_exception(error, file=log)
        peer = error.peer if isinstance(error, CommError) else None
        stopped = find_stopped(self.folder, self.seat.size) if isinstance(error, CommTimeout) else None
        if stopped is not None:
            peer, text = stopped, f"{text}; the process of rank {stopped} is stopped"
        # All ranks detect this at the same time, and know which rank caused it.
        blames = error.rank if isinstance(error, DivergedError) else None
        self._record(
            Error(
                text,
                time.time(),
                own=_own(error, rank),
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

    def _record(self, line: Line) -> None:
        """Append a line to the rank's file; ignore errors, because recording the end must not fail."""
        assert self.folder is not None
        with suppress(OSError), closing(LineWriter(rank_file(self.folder, self.seat.rank))) as lines:
            lines.write(line)


def is_full(error: BaseException | None) -> bool:
    """Whether this error, or one that caused it, says that a disk or a quota is full."""
    while error is not None and not (isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)):
        error = error.__cause__ or error.__context__
    return error is not None


def _own(error: Exception, rank: int) -> bool:
    """Whether the error originated on this rank, not on another one."""
    return not isinstance(error, CommError) and not (isinstance(error, ReplicaError) and error.rank != rank)

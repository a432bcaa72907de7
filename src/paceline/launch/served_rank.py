"""One rank of a run with parameter servers: it joins, serves or trains, and reports how it ended."""

from __future__ import annotations

import os
import random
import socket
import traceback
from pathlib import Path
from typing import Any, TextIO

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.data.course import Position
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, CommTimeout, PacelineError, UsageError
from paceline.launch.agree import describe
from paceline.launch.cluster import Cluster, forget_key, split_address
from paceline.launch.connect import leave
from paceline.launch.folder import begin_summary
from paceline.launch.meeting import accepts_connections, meet
from paceline.launch.rank import Rank
from paceline.launch.recorded_rank import text_of
from paceline.launch.resume import open_folder
from paceline.messages import LOGGER
from paceline.run.folder import gone_mark, rank_file, write_environment
from paceline.run.lines import read_sound_lines
from paceline.run.liveness import is_here, owner_text
from paceline.run.recorder import Recorder
from paceline.run.records import INTERRUPTED, Resumed
from paceline.server.client import Unanswered
from paceline.server.roles import Meeting
from paceline.spec import Resolved
from paceline.strategies.parameter_server.engine import Membership
from paceline.strategies.setup import Place, choose_place
from paceline.training.console import Console
from paceline.training.driver import Job, train


class ServedRank(Rank):
    """A server or a worker. Servers are the first ranks, and rank 0 is the leader."""

    def __init__(
        self,
        resolved: Resolved,
        seat: Seat,
        folder: Path | None,
        stream: TextIO | None,
        cluster: Cluster | None = None,
    ) -> None:
        super().__init__(resolved, seat, folder, stream)
        self.cluster = cluster
        self.servers = self.spec.servers or 0
        self.stops_run = seat.rank < self.servers  # a worker only leaves
        self.meeting: Meeting | None = None
        self.begun = self.left = False

    def run(self, comm: Comm | None = None) -> int:
        try:
            with self.watching:
                self._serve()
            self.hand_in()
        except Exception as error:  # noqa: BLE001  recorded, printed and turned into an exit code
            code = self._fail(self._explained(error))
            self.hand_in(failed=True)
            return code
        finally:
            if self.meeting and self.seat.rank == 0:
                leave(self.seat)
                if self.cluster:
                    forget_key(self.cluster)
        if self.seat.rank and not self.launched and not self.cluster:
            return EXIT_OK  # with another code, torchrun and mpiexec would kill all ranks, even the leader
        interrupted = self.left or (self.summary is not None and self.summary.status == INTERRUPTED)
        return EXIT_INTERRUPTED if interrupted else EXIT_OK

    def _serve(self) -> None:
        seat, spec = self.seat, self.spec
        self.meeting, listener = meet(spec, seat, self.cluster)
        LOGGER.debug("rank %d: servers listen at %s", seat.rank, ", ".join(self.meeting.endpoints))
        first = not self.launched
        place = choose_place(spec, seat.local_rank, first=first, speed=seat.speed, noise=seat.noise)
        about = {"host": socket.gethostname(), "pid": os.getpid()}
        opened = self._open_recorder if seat.rank >= self.servers else self._open
        member = Membership(self.meeting, listener, seat.rank, random.getrandbits(63), about, opened, gone=self._gone,
                            folder=self.folder, restarted=seat.lives > 0)  # fmt: skip
        if seat.rank == 0:
            self._lead(member, place)
        else:
            train(self._job(member, place, Console(None)))
            self.left = member.left

    def _job(self, member: Membership, place: Place, console: Console) -> Job:
        stop_requested = self.stop.requested if self.stop else lambda: False
        comm = MeteredComm(SingleComm(self.spec.timeout))  # servers and workers use their own sockets
        summary = self._begin_summary() if self.folder else begin_summary(self.spec)
        job = Job(self.spec, comm, place, console, stop_requested, summary, member)
        if self.seat.rank == 0 and self.folder:  # it tells the others
            for line in read_sound_lines(rank_file(self.folder, 0), Resumed):
                job.start = Position(line.step, line.epoch, line.used)
            if not member.restarted:
                job.resume = self._checkpoint(comm)
        return job

    def _gone(self) -> dict[int, str]:
        """The workers that ended before they could join, as Paceline's launcher has seen, and why."""
        marks = {rank: gone_mark(self.folder, rank) for rank in range(self.spec.ranks)} if self.folder else {}
        return {rank: mark.read_text() for rank, mark in marks.items() if self.launched and mark.exists()}

    def _lead(self, member: Membership, place: Place) -> None:
        if self.folder is None:
            self.folder, self.resolved, self.found = open_folder(self.resolved)
            self.spec = self.resolved.spec
        folder = self.folder
        member.where = {"owner": owner_text(folder), "collector": self._listen()}
        self.watch_node()
        rows = {0: {"rank": 0, "role": "server", **member.about}}

        def ranks_up(known: dict[int, dict[str, Any]]) -> None:
            self.begun = True
            for rank, row in known.items():
                role = "server" if rank < self.servers else "worker"
                rows[rank] = {"rank": rank, "role": role, "host": row["host"], "pid": row["pid"]}
            ranks = [rows[rank] for rank in sorted(rows)]
            write_environment(folder, describe(ranks))

        member.ranks_up = ranks_up
        recorder = self.make_recorder(self.tracked)
        console = Console(self.stream, self.log())
        job = self._job(member, place, console).opened(folder, recorder)
        self.summary = job.summary
        try:
            self._introduce(console)
            train(job)
            console.line(f"Run folder: {folder}")
        finally:
            console.close()
            recorder.close()

    def _listen(self) -> str:
        """Where workers and servers on other machines can send their records; nowhere, if all are on this one."""
        assert self.meeting is not None
        scheme, _, address = self.meeting.endpoints[0].partition("://")
        if self.launched or scheme != "tcp":
            return ""
        self.collect(split_address(address), self.meeting.secret)
        return self.collector.endpoint if self.collector else ""

    def _open(self, told: dict[str, str]) -> None:
        """Use the leader's run folder, unless the launcher gave this rank another path to it."""
        if self.folder is None:
            assert self.meeting is not None
            folder = Path(told["folder"])
            here = is_here(folder, told.get("owner", ""))
            self.use_folder(folder, here=here, collector=told.get("collector", ""), secret=self.meeting.secret)
        self.watch_node()

    def _open_recorder(self, told: dict[str, str]) -> Recorder:
        self._open(told)
        self.begun = True
        return self.make_recorder()

    def _explained(self, error: Exception) -> Exception:
        """With a cluster file: if a rank never connected, its address is wrong, or it was not started."""
        peer = error.peer if isinstance(error, CommTimeout) else None
        if self.cluster is None or peer is None or self.begun:
            return error
        address = (*self.cluster.ps, *self.cluster.worker)[peer]
        what = f"no server listens at {address}" if peer < self.servers else f"no worker connected from {address}"
        todo = "start it, or correct the address"
        assert self.meeting is not None
        if isinstance(error, Unanswered) and accepts_connections(self.meeting.endpoints[0]):
            what = f"a program listens at {address}, but does not answer"
            todo = f"is it a server of this run, with the same key ({self.cluster.key}), or also with --no-encrypt?"
        return UsageError(f"{self.cluster.path} line {self.cluster.line_of(address)}: {what} ({error}): {todo}")

    def _fail(self, error: Exception) -> int:
        """Only the leader decides how the run ended; other ranks record and print their error."""
        if self.seat.rank == 0 or self.folder is None or not self.folder.is_dir():
            return super()._fail(error)
        code = self.write_down(error)
        if not self.launched:
            LOGGER.error("rank %d: %s", self.seat.rank, text_of(error))
            if not isinstance(error, PacelineError):
                traceback.print_exception(error)
        return code

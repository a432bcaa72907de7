"""One rank of a run with parameter servers, from its seat to its exit code."""

from __future__ import annotations

import os
import random
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, TextIO

from paceline import own_code
from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, CommTimeout, PacelineError, UsageError
from paceline.launch.agree import describe
from paceline.launch.cluster import Cluster, forget_key
from paceline.launch.connect import leave
from paceline.launch.folder import begin_summary, make_folder, open_run
from paceline.launch.meeting import meet, somebody_listens
from paceline.launch.rank import Rank
from paceline.run.folder import LOGS, gone_mark, write_environment
from paceline.run.recorder import Recorder
from paceline.run.records import INTERRUPTED
from paceline.server.client import Unanswered
from paceline.server.roles import Meeting
from paceline.spec import Resolved
from paceline.strategies.parameter_server.engine import Membership
from paceline.strategies.setup import Place, choose_place
from paceline.training.console import Console
from paceline.training.driver import Job, train


class ServedRank(Rank):
    """A server or a worker: servers are the first ranks, and rank 0 leads."""

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
        except Exception as error:  # noqa: BLE001  written down, told and turned into an exit code
            return self._fail(self._explained(error))
        finally:
            if self.meeting and self.seat.rank == 0:
                leave(self.seat)
                if self.cluster:
                    forget_key(self.cluster)
        if self.seat.rank and not self.launched and not self.cluster:
            return EXIT_OK  # torchrun and mpiexec end all ranks, the leader too, when one has another code
        interrupted = self.left or (self.summary is not None and self.summary.status == INTERRUPTED)
        return EXIT_INTERRUPTED if interrupted else EXIT_OK

    def _serve(self) -> None:
        seat, spec = self.seat, self.spec
        self.meeting, listener = meet(spec, seat, self.cluster)
        place = choose_place(spec, seat.local_rank, first=not self.launched, speed=seat.speed)
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
        wish = self.stop.requested if self.stop else lambda: False
        comm = MeteredComm(SingleComm(self.spec.timeout))  # servers and workers speak by sockets of their own
        return Job(self.spec, comm, place, console, wish, begin_summary(self.spec), member)

    def _gone(self) -> dict[int, str]:
        """The workers that our launcher has seen end before they could join, and why."""
        marks = {rank: gone_mark(self.folder, rank) for rank in range(self.spec.ranks)} if self.folder else {}
        return {rank: mark.read_text() for rank, mark in marks.items() if self.launched and mark.exists()}

    def _lead(self, member: Membership, place: Place) -> None:
        if self.folder is None:
            self.folder = make_folder(self.spec).absolute()
            open_run(self.folder, self.resolved)
        folder = self.folder
        self._watch_node()
        rows = {0: {"rank": 0, "role": "server", **member.about}}

        def ranks_up(known: dict[int, dict[str, Any]]) -> None:
            self.begun = True
            for rank, row in known.items():
                role = "server" if rank < self.servers else "worker"
                rows[rank] = {"rank": rank, "role": role, "host": row["host"], "pid": row["pid"]}
            ranks = [rows[rank] for rank in sorted(rows)]
            write_environment(folder, describe(ranks))

        member.ranks_up = ranks_up
        recorder = Recorder(folder, 0)
        console = Console(self.stream, self._log())
        job = self._job(member, place, console).opened(folder, recorder)
        self.summary = job.summary
        try:
            self._introduce(console)
            train(job)
            console.line(f"Run folder: {folder}")
        finally:
            console.close()
            recorder.close()

    def _open(self, folder: Path) -> None:
        """The leader has said where the run folder is; on this rank's file system it may be another."""
        self.folder = self.folder or folder
        (self.folder / LOGS).mkdir(parents=True, exist_ok=True)
        self._watch_node()

    def _open_recorder(self, folder: Path) -> Recorder:
        self._open(folder)
        self.begun = True
        assert self.folder is not None
        return Recorder(self.folder, self.seat.rank)

    def _explained(self, error: Exception) -> Exception:
        """With a cluster file, a rank that never came is a wrong address in it, or has not been started."""
        peer = error.peer if isinstance(error, CommTimeout) else None
        if self.cluster is None or peer is None or self.begun:
            return error
        address = (*self.cluster.ps, *self.cluster.worker)[peer]
        what = f"nobody listens at {address}" if peer < self.servers else f"no worker came from {address}"
        todo = "start it, or correct the address"
        assert self.meeting is not None
        if isinstance(error, Unanswered) and somebody_listens(self.meeting.endpoints[0]):
            what = f"whoever listens at {address} does not answer"
            todo = f"is it a server of this run, with the same key ({self.cluster.key}), or none, as with --no-encrypt?"
        return UsageError(f"{self.cluster.path} line {self.cluster.line_of(address)}: {what} ({error}): {todo}")

    def _fail(self, error: Exception) -> int:
        """A worker, or a server that does not lead, does not decide how the run ends."""
        if self.seat.rank == 0 or self.folder is None or not self.folder.is_dir():
            return super()._fail(error)
        code = self._write_down(error)
        if not self.launched:
            known = isinstance(error, PacelineError)
            text = str(error) if known else own_code.reason(error)
            print(f"paceline: rank {self.seat.rank}: {text}", file=sys.stderr, flush=True)
            if not known:
                traceback.print_exception(error)
        return code

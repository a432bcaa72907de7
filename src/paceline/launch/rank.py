"""One rank of a run without parameter servers: it connects, trains, and reports how it ended."""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import read_manifest
from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.comm.words import all_or_none, tell
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, PacelineError
from paceline.launch.agree import agree_on_spec, describe
from paceline.launch.connect import connect, leave
from paceline.launch.folder import begin_summary, remove_failed_start, watch_hint
from paceline.launch.joining import start_to_join
from paceline.launch.recorded_rank import RecordedRank, code_of, text_of
from paceline.launch.resume import AUTO, NEVER, Continued, open_folder
from paceline.launch.signals import StopSignals
from paceline.layout import crowded
from paceline.messages import LOGGER
from paceline.run.folder import read_ranks, read_summary, write_environment
from paceline.run.records import INTERRUPTED, Signal, Summary
from paceline.spec import Resolved
from paceline.strategies.setup import choose_place
from paceline.training.console import Console
from paceline.training.driver import Job, train
from paceline.training.elastic import Elastic

# Launchers that may bind each rank to its own cores.
BINDING = ("mpiexec", "srun")


class Rank(RecordedRank):
    """One rank of a run: connects, agrees with the others on the run folder, trains, and reports how it ended."""

    def __init__(self, resolved: Resolved, seat: Seat, folder: Path | None, stream: TextIO | None) -> None:
        super().__init__(seat, folder)
        self.resolved, self.spec = resolved, resolved.spec
        self.stream = stream if seat.rank == 0 or self.spec.elastic else None
        self.stop: StopSignals | None = None
        self.stops_run = True  # whether a signal to this rank stops the whole run
        self.found: Continued | None = None  # the run that is continued, on a rank 0 that looked for it
        self.summary: Summary | None = None

    def run(self, comm: Comm | None = None) -> int:
        """Train and return the exit code. `comm` is given if ranks are threads."""
        metered: MeteredComm | None = None
        try:
            alone = SingleComm(self.spec.timeout) if self.spec.elastic else None
            found = comm or alone or connect(self.spec.transport, self.spec.timeout, self.seat)
            found.on_stuck = self._fail
            metered = MeteredComm(found)
            with self.watching:
                self._train(metered)
            self.hand_in()
        except Exception as error:  # noqa: BLE001  recorded, printed and turned into an exit code
            code = self._fail(error)
            self.hand_in(failed=True)
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
        self.record(Signal(number, time.time()))
        if self.seat.launcher == "mpiexec" and not self.launched and self.stops_run:
            self.diagnose(interrupted=True)

    def _train(self, comm: MeteredComm) -> None:
        seat = self.seat
        # Paceline's launcher has prepared the data before it started the ranks.
        first = seat.local_rank == 0 and not self.launched
        place = choose_place(self.spec, seat.local_rank, first=first, speed=seat.speed, noise=seat.noise)
        agree_on_spec(self.resolved, comm)
        if self.spec.elastic:
            self.watch_node()
        else:
            self.open(comm, self._open_folder)
        assert self.folder is not None
        recorder = self.make_recorder(self.tracked)
        console = Console(self.stream, self.log() if comm.rank == 0 else None)
        try:
            self._introduce(console)
            stop_requested = self.stop.requested if self.stop else lambda: False
            self.summary = self._begin_summary()
            start = start_to_join(Path(seat.sockets)) if self.spec.elastic and seat.sockets else None
            resume = None if start else self._checkpoint(comm)
            job = Job(self.spec, comm, place, console, stop_requested, self.summary, resume=resume)
            job.start = start or job.start
            job.remote = self.remote
            if self.spec.elastic:
                self._join(job)
            train(job.opened(self.folder, recorder))
            console.line(f"Run folder: {self.folder}")
        finally:
            console.close()
            recorder.close()

    def _join(self, job: Job) -> None:
        """Become a worker of an elastic run, whose registrar is Paceline's launcher."""
        spec, seat, folder = self.spec, self.seat, self.folder
        assert seat.sockets is not None
        assert folder is not None
        host = socket.gethostname()

        def ranks_up(pids: Mapping[int, int]) -> None:
            known = {row.rank: row.pid for row in read_ranks(folder)} | dict(pids)  # also those that are away
            rows = [
                {"rank": worker, "role": "worker", "host": host, "pid": pid} for worker, pid in sorted(known.items())
            ]
            write_environment(folder, describe(rows))

        elastic = job.elastic = Elastic(Path(seat.sockets), seat.rank, spec.carrier, spec.timeout, ranks_up)
        asked = job.stop
        job.stop = lambda: asked() or elastic.last
        job.console.leads = seat.rank == 0

    @property
    def tracked(self) -> dict[str, Any] | None:
        """The options, if TensorBoard follows the run as it trains."""
        return self.spec.values() if self.spec.tensorboard else None

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

    def _introduce(self, console: Console) -> None:
        """Print what Paceline's launcher prints before it starts the ranks."""
        if self.launched:
            return
        assert self.folder is not None
        notes = self.found.notes if self.found else ()
        for line in (*self.resolved.introduction(), watch_hint(self.folder), *notes):
            console.line(line)
        seat, spec = self.seat, self.spec
        workers, bound = max(1, seat.local_size - (spec.servers or 0)), seat.launcher in BINDING
        if seat.rank == 0 and (turns := crowded(workers, spec.threads, bound=bound)) and not spec.emulated:
            LOGGER.warning(turns)

    def _fail(self, error: Exception) -> int:
        """Record the error; without Paceline's launcher, also decide how the run ended and print it."""
        rank = self.seat.rank
        code, text = code_of(error), text_of(error)
        if self.folder is None or not self.folder.is_dir():
            LOGGER.error("rank %d: %s", rank, text)
            if not isinstance(error, PacelineError):
                traceback.print_exception(error)
            return code
        ending = self.end_with(error, interrupted=bool(self.stop and self.stop.requested()))
        if ending is None:
            return code
        who = f"rank {rank}: " if self.seat.size > 1 else ""
        LOGGER.error("%s%s", who, ending.message if ending.summary else text)
        if rank == 0:
            remove_failed_start(self.folder, ending)
        return ending.exit_code if ending.summary else code

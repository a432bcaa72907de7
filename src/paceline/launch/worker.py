"""One rank, from its seat to its exit code; also what our launcher starts: python -m paceline.launch.worker."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

import torch

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.threads import thread_world
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
)
from paceline.launch.agree import agree_on_folder, agree_on_spec, describe_ranks
from paceline.launch.connect import connect, leave
from paceline.launch.env import Seat, find_seat
from paceline.launch.folder import begin_summary, make_folder, open_run
from paceline.launch.memory import keep_freed_memory
from paceline.launch.settle import find_stopped, settle, wait_for_blame
from paceline.launch.signals import StopSignals
from paceline.layout import threads_per_rank
from paceline.records import INTERRUPTED, LineWriter, Summary, read_summary, write_whole
from paceline.spec import Resolved, read_config, resolve
from paceline.training.console import Console
from paceline.training.loop import Job, train
from paceline.training.setup import choose_place
from paceline.training.trace import Trace

# How long a rank that lost another waits to learn from the run folder who failed first. (Our own launcher does
# that for ranks that are its children; mpiexec ends them all as soon as one aborts.)
BLAME_SECONDS = 2.0


class Rank:
    """One rank of a run: connects, agrees with the others on the run folder, trains, and tells how it ended."""

    def __init__(self, resolved: Resolved, seat: Seat, folder: Path | None, stream: TextIO | None) -> None:
        self.resolved, self.spec, self.seat, self.folder = resolved, resolved.spec, seat, folder
        self.stream = stream if seat.rank == 0 else None
        self.launched = folder is not None
        self.stop: StopSignals | None = None
        self.summary: Summary | None = None

    def run(self, comm: Comm | None = None) -> int:
        """Train; the exit code says how it went. A communicator is given where ranks are threads."""
        metered: MeteredComm | None = None
        try:
            found = comm or connect(self.spec.transport, self.spec.timeout, self.seat)
            found.on_stuck = self._fail
            metered = MeteredComm(found)
            self._train(metered)
        except Exception as error:  # noqa: BLE001  written down, told and turned into an exit code
            code = self._fail(error)
            if metered:
                metered.abort(str(error), code)
            return code
        finally:
            leave(self.seat)
        metered.close()
        assert self.summary is not None
        return EXIT_INTERRUPTED if self.summary.status == INTERRUPTED else EXIT_OK

    def on_signal(self, number: int) -> None:
        """Write down that somebody ended us; under a launcher that kills its ranks soon, the summary cannot wait."""
        if self.folder is None:
            return
        lines = LineWriter(self.folder / f"rank_{self.seat.rank}.jsonl")
        lines.write("signal", signal=number, time=time.time())
        lines.close()
        if self.seat.launcher == "mpiexec" and not self.launched:
            settle(self.folder, interrupted=True)

    def _train(self, comm: MeteredComm) -> None:
        # Our own launcher has seen to the data before it started the ranks.
        place = choose_place(self.spec, self.seat.local_rank, first=self.seat.local_rank == 0 and not self.launched)
        agree_on_spec(self.resolved, comm)
        self.folder = agree_on_folder(self.folder or (make_folder(self.spec) if comm.rank == 0 else None), comm)
        ranks = describe_ranks(comm)
        if comm.rank == 0:
            if not self.launched:
                open_run(self.folder, self.resolved)
            write_whole(self.folder / "env.json", json.dumps(ranks, indent=1) + "\n")
        comm.barrier()
        trace = Trace(self.folder / f"rank_{comm.rank}.jsonl", comm.rank)
        console = Console(self.stream, self._log() if comm.rank == 0 else None)
        try:
            if not self.launched:
                for line in self.resolved.introduction():
                    console.line(line)
            wish = self.stop.requested if self.stop else lambda: False
            self.summary = begin_summary(self.spec)
            train(Job(self.spec, comm, place, self.folder, console, trace, wish, self.summary))
            console.line(f"Run folder: {self.folder}")
        finally:
            console.close()
            trace.close()

    def _log(self) -> Path:
        assert self.folder is not None
        logs = self.folder / "logs"
        logs.mkdir(exist_ok=True)
        return logs / f"rank_{self.seat.rank}.log"

    def _fail(self, error: Exception) -> int:
        """Write the error into the rank's files; without a launcher of ours, settle the run and say what happened."""
        rank = self.seat.rank
        code = error.exit_code if isinstance(error, PacelineError) else EXIT_FAILED
        text = str(error) if isinstance(error, PacelineError) else f"{type(error).__name__}: {error}"
        if self.folder is None or not self.folder.is_dir():
            print(f"paceline: rank {rank}: {text}", file=sys.stderr, flush=True)
            if not isinstance(error, PacelineError):
                traceback.print_exception(error)
            return code
        with self._log().open("a") as log:
            traceback.print_exception(error, file=log)
        own = not isinstance(error, CommError) and not (isinstance(error, ReplicaError) and error.rank != rank)
        peer = error.peer if isinstance(error, CommError) else None
        stopped = find_stopped(self.folder, self.seat.size) if isinstance(error, CommTimeout) else None
        if stopped is not None:
            peer, text = stopped, f"{text}; the process of rank {stopped} is stopped"
        lines = LineWriter(self.folder / f"rank_{rank}.jsonl")
        lines.write("error", error=text, time=time.time(), own=own, exit_code=code,
                    everyone=isinstance(error, DivergedError | AgreedError), peer=peer, stopped=stopped is not None,
                    timeout=isinstance(error, CommTimeout))  # fmt: skip
        lines.close()
        if not own and self.seat.launcher != "paceline":
            wait_for_blame(self.folder, rank, BLAME_SECONDS)
        if not self.launched:
            ending = settle(self.folder, interrupted=bool(self.stop and self.stop.requested()))
            print(f"paceline: rank {rank}: {ending.message}", file=sys.stderr, flush=True)
            return ending.exit_code
        return code


def run_seat(resolved: Resolved, seat: Seat, folder: Path | None = None, *, as_json: bool = False) -> int:
    """Run the rank of this process, or all ranks as its threads; returns the exit code."""
    spec = resolved.spec
    keep_freed_memory()
    torch.set_num_threads(spec.threads or threads_per_rank(seat.local_size))
    stream = sys.stderr if as_json else sys.stdout
    if spec.transport == "threads" and spec.workers and spec.workers > 1:
        return _run_threads(resolved, folder, stream)
    rank = Rank(resolved, seat, folder, stream)
    rank.stop = StopSignals(rank.on_signal)
    code = rank.run()
    summary = read_summary(rank.folder) if rank.folder else None
    if as_json and seat.rank == 0 and summary:
        print(json.dumps(asdict(summary)), flush=True)
    return code


def _run_threads(resolved: Resolved, folder: Path | None, stream: TextIO) -> int:
    size = resolved.spec.workers or 1
    comms = thread_world(size, resolved.spec.timeout)
    ranks = [Rank(resolved, Seat(r, size, r, size, "paceline"), folder, stream) for r in range(size)]
    stop = StopSignals(ranks[0].on_signal)
    codes = [EXIT_FAILED] * size

    def body(i: int) -> None:
        ranks[i].stop = stop
        codes[i] = ranks[i].run(comms[i])

    threads = [threading.Thread(target=body, args=(i,), name=f"rank-{i}", daemon=True) for i in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return max(codes)


def main() -> None:
    """python -m paceline.launch.worker FOLDER: a rank of a run whose folder has been made."""
    folder = Path(sys.argv[1])
    seat = find_seat()
    assert seat is not None, "this program is started by paceline's launcher"
    if seat.rank:
        _redirect(folder / "logs" / f"rank_{seat.rank}.log")
    resolved = resolve((f"{folder}/spec.toml", read_config(str(folder / "spec.toml"))))
    sys.exit(finish(run_seat(resolved, seat, folder)))


def _redirect(log: Path) -> None:
    """Let everything that this process says go to its log, what libraries print included."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def finish(code: int) -> int:
    """The exit code; but a rank that failed leaves at once, so that the others see its sockets close."""
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (EXIT_OK, EXIT_INTERRUPTED):
        os._exit(code)
    return code


if __name__ == "__main__":
    main()

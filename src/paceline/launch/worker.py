"""Runs the rank of this process, or all ranks as its threads."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn, TextIO

import torch

from paceline.comm.seat import Seat
from paceline.comm.threads import thread_world
from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK
from paceline.launch.cluster import Cluster
from paceline.launch.env import find_seat, in_lab, log_level
from paceline.launch.memory import keep_freed_memory
from paceline.launch.rank import Rank
from paceline.launch.signals import StopSignals
from paceline.layout import threads_per_rank
from paceline.messages import LOGGER, configure
from paceline.run.folder import SPEC, rank_log, read_summary
from paceline.spec import FIELDS, Resolved, RunSpec, read_config
from paceline.strict_json import dump


def run_seat(
    resolved: Resolved,
    seat: Seat,
    folder: Path | None = None,
    *,
    as_json: bool = False,
    cluster: Cluster | None = None,
    stream: TextIO | None = None,
) -> int:
    """Run the rank of this process, or all ranks as its threads; returns the exit code."""
    spec = resolved.spec
    keep_freed_memory(one_arena=bool(spec.servers))
    # Servers mostly wait, so only workers share the cores.
    local_workers = max(1, seat.local_size - (spec.servers or 0)) if seat.one_node else seat.local_size
    torch.set_num_threads(spec.threads or threads_per_rank(local_workers))
    where = ":".join(map(str, seat.address)) if seat.address else seat.store_file or "nowhere: it is alone"
    LOGGER.debug("rank %d of %d is process %d, started by %s; %d threads; ranks meet at %s", seat.rank, seat.size,
                 os.getpid(), seat.launcher, torch.get_num_threads(), where)  # fmt: skip
    stream = stream or (sys.stderr if as_json else sys.stdout)
    if spec.carrier.in_one_process and spec.workers and spec.workers > 1:
        return _run_threads(resolved, folder, stream)
    rank = make_rank(resolved, seat, folder, stream, cluster)
    rank.stop = StopSignals(rank.on_signal)
    code = rank.run()
    summary = read_summary(rank.folder) if rank.folder else None
    if as_json and seat.rank == 0 and summary:
        print(dump(summary.as_dict()), flush=True)
    return code


def make_rank(resolved: Resolved, seat: Seat, folder: Path | None, stream: TextIO, cluster: Cluster | None) -> Rank:
    """A rank with or without parameter servers; ZeroMQ is imported only if it is used."""
    if not resolved.spec.servers:
        return Rank(resolved, seat, folder, stream)
    from paceline.launch.served_rank import ServedRank

    return ServedRank(resolved, seat, folder, stream, cluster)


def _run_threads(resolved: Resolved, folder: Path | None, stream: TextIO) -> int:
    size = resolved.spec.workers or 1
    comms = thread_world(size, resolved.spec.timeout)
    ranks = [Rank(resolved, in_lab(Seat(r, size, r, size, "paceline")), folder, stream) for r in range(size)]
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


def run_rank(run_folder: str) -> NoReturn:
    """Run one rank that Paceline's launcher started, and exit."""
    folder, seat = Path(run_folder), find_seat()
    assert seat is not None, "the launcher sets the rank's variables"
    configure(log_level())
    # The launcher has resolved and checked the options, and written where each came from.
    # (Not as analysis reads them: it refuses numbers so large that sums of them would not be finite.)
    values = read_config(str(folder / SPEC))
    spec = RunSpec(**{name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    resolved = Resolved(spec, dict.fromkeys(FIELDS, SPEC))
    stream = None
    if seat.rank:
        stream = os.fdopen(os.dup(1), "w") if spec.elastic else None  # any worker may come to speak for the run
        _redirect(rank_log(folder, seat.rank))
    finish(run_seat(resolved, seat, folder, stream=stream))


def _redirect(log: Path) -> None:
    """Redirect standard output and error to the log, including what libraries print."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)


def finish(code: int) -> NoReturn:
    """Exit without tearing the interpreter down, which takes a second with torch.

    A failed rank also skips its exit handlers, so that the other ranks see its sockets close.
    """
    if code in (EXIT_OK, EXIT_INTERRUPTED):
        atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

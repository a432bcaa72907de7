"""Supervise the processes of a run until all have ended."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from paceline.checkpoint.manifest import remove_unfinished
from paceline.data.course import START, Position
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK
from paceline.launch.diagnose import Ending, diagnose, how_it_ended
from paceline.launch.elastic import ElasticCrew
from paceline.launch.signals import stopping
from paceline.launch.spawn import Crew
from paceline.messages import LOGGER, end_line
from paceline.run.atomic import write_whole
from paceline.run.folder import CHECKPOINTS, gone_mark, read_ranks
from paceline.spec import RunSpec

# After a rank has failed, the others get this long to notice it and to record what they saw.
GRACE_SECONDS = 3.0
GOOD_EXITS = (EXIT_OK, EXIT_INTERRUPTED)
LOOK_SECONDS = 0.03
# How often a killed server is restarted.
SERVER_RESTARTS = 3


def supervise(
    crew: Crew,
    folder: Path,
    signals: list[int],
    spec: RunSpec,
    start: Position = START,
    go_back: Callable[[], Position | None] = lambda: None,
) -> Ending:
    """Wait for the end. A failed rank ends the others; Ctrl-C asks them to stop, a second Ctrl-C kills them.

    With parameter servers, the run continues without lost workers, and a killed server is restarted; for elastic runs,
    see `ElasticCrew`.
    """
    elastic = ElasticCrew(crew, folder, spec, start, go_back) if spec.elastic else None
    asked = 0
    ended_at: float | None = None
    exits: dict[int, int] | None = None
    lost: str | None = None
    try:
        while crew.running() or (elastic and ended_at is None):
            if len(signals) > asked:
                asked += 1
                # A scheduler repeats SIGTERM; a person who repeats Ctrl-C does not want to wait.
                if signals[asked - 1] == signal.SIGINT if asked > 1 else not _ask_to_stop(crew, folder):
                    break
            # A run with servers is over when its leader has ended, even if a lost worker still runs.
            led = bool(spec.servers) and crew.exits.get(0) in GOOD_EXITS
            if ended_at is None and elastic:
                ended_at = time.monotonic() if elastic.look(stopping=asked > 0) else None
            elif ended_at is None and (led or _has_failed(crew, folder, spec, asked > 0)):
                ended_at = time.monotonic()
            if ended_at is not None and time.monotonic() - ended_at > GRACE_SECONDS:
                break
            crew.memory.look()
            if elastic and ended_at is None:
                elastic.wait(LOOK_SECONDS)
            else:
                time.sleep(LOOK_SECONDS)
    finally:
        if elastic:
            elastic.close()
        lost = crew.lost_zygote()
        exits = crew.end(_rank_pids(folder, here=True))
        crew.dismiss()
        remove_unfinished(folder / CHECKPOINTS)
    if not crew.are_ranks:
        exits = {} if asked else None
    return diagnose(folder, exits, memory_kill=crew.memory.describe, interrupted=asked > 0, lost=lost)


def _has_failed(crew: Crew, folder: Path, spec: RunSpec, stopping: bool) -> bool:
    """Whether the run has failed. Ranks that it can do without, or that are restarted here, do not fail it."""
    bad = {rank: code for rank, code in crew.exits.items() if code not in GOOD_EXITS}
    if not crew.exits or not spec.servers or crew.lost_zygote():
        return bool(bad)
    _warn_of_memory_kills(crew)
    begun = bool(_rank_pids(folder))
    if not begun and any(rank < spec.servers or code > 0 for rank, code in bad.items()):
        return True
    for rank, code in bad.items():
        allowed = SERVER_RESTARTS if rank < spec.servers else spec.restarts
        if (rank >= spec.servers or code < 0) and crew.lives[rank] < allowed and not stopping:
            crew.start_again(rank)
        elif rank < spec.servers:
            return True
    for rank in range(spec.servers, spec.ranks):
        if not begun and rank in crew.exits:  # tell the leader, which would wait for it
            how = how_it_ended(crew.exits[rank], rank, crew.memory.describe)
            write_whole(gone_mark(folder, rank), how if rank in bad else "it was interrupted")
    return all(rank in crew.exits and rank in bad for rank in range(spec.servers, spec.ranks))


def _warn_of_memory_kills(crew: Crew) -> None:
    """Say which ranks the kernel has killed for lack of memory, because the run may continue without them."""
    new = {(rank, crew.lives[rank]) for rank in crew.exits} - crew.examined
    crew.examined |= new
    for rank in sorted(rank for rank, _ in new if crew.exits[rank] == -signal.SIGKILL):
        if how := crew.memory.describe(rank):
            LOGGER.warning("rank %d: its process %s", rank, how)


def _ask_to_stop(crew: Crew, folder: Path) -> bool:
    """Let the ranks finish their step; false if they are not up yet and have no step to finish."""
    pids = _rank_pids(folder)
    if not pids:
        return False
    end_line()
    LOGGER.info("stopping after this step (Ctrl-C again to stop at once)")
    if crew.are_ranks:
        crew.signal(signal.SIGTERM)  # not SIGINT: a rank that has already had a signal would exit at once
        return True
    if not pids <= _rank_pids(folder, here=True):
        return False  # on other nodes, where only mpiexec can reach them
    # To the ranks themselves: mpiexec would end them before their step is done.
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    return True


def _rank_pids(folder: Path, *, here: bool = False) -> set[int]:
    """The process ids of the ranks, once they are up; all, or only those on this host."""
    return {row.pid for row in read_ranks(folder) if not here or row.host == socket.gethostname()}


@contextlib.contextmanager
def counting_signals() -> Iterator[list[int]]:
    """Collect signals that ask to stop in a list; works only in the main thread.

    Ranks that are started inside have these signals unblocked, even if a shell told this process to ignore them.
    """
    caught: list[int] = []
    try:
        old = {number: signal.signal(number, lambda n, _: caught.append(n)) for number in stopping()}
    except ValueError:
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)

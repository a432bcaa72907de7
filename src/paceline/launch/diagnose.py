"""Finds out how a run ended, from what its ranks wrote to the run folder."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.checkpoint.manifest import remove_unfinished
from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from paceline.run.folder import (
    CHECKPOINTS,
    LOGS,
    rank_file,
    rank_log,
    read_ranks,
    read_summary,
    sole_writer,
    write_summary,
)
from paceline.run.lines import read_sound_lines
from paceline.run.liveness import owner_text
from paceline.run.records import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    RUNNING,
    End,
    Epoch,
    Error,
    Signal,
    Start,
    Step,
    Summary,
)

# How a rank was killed, if the kernel did it for lack of memory; otherwise None.
MemoryKill = Callable[[int], str | None]
# A rank that is asked to stop before it has installed its handlers dies of the signal.
ENDED_ON_REQUEST = (EXIT_OK, EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Ending:
    """How a run ended: its summary, the exit code, and a message for the user."""

    summary: Summary | None
    exit_code: int
    message: str = ""


def diagnose(
    folder: Path,
    exits: Mapping[int, int] | None = None,
    *,
    memory_kill: MemoryKill | None = None,
    interrupted: bool = False,
    lost: str | None = None,
) -> Ending:
    """Find out which rank failed, and write it to the summary. `exits` are the ranks' exit codes, if known.

    `lost` says what ended all ranks at once, if that was not a rank.
    The outcome is decided once: if several ranks call this, as under mpiexec, the first one decides.
    """
    with sole_writer(folder):
        summary = read_summary(folder)
        if summary is None:
            return Ending(None, EXIT_FAILED, f"the run ended before it started; its logs are in {folder / LOGS}")
        if summary.status == COMPLETED:
            return Ending(summary, EXIT_OK)
        if summary.status == INTERRUPTED:
            return Ending(summary, EXIT_INTERRUPTED)
        ranks = summary.ranks
        errors = {rank: error for rank in range(ranks) if (error := _error(folder, rank))}
        not_written = ""
        if summary.status == RUNNING:
            _decide(folder, summary, errors, exits, memory_kill, interrupted=interrupted, lost=lost)
            not_written = _write(folder, summary)
        if summary.status == INTERRUPTED:
            return Ending(summary, EXIT_INTERRUPTED, f"interrupted{not_written}")
        return _failure(folder, summary, errors, not_written)


def launcher_was_killed(folder: Path, owner: str) -> None:
    """Make the summary of a run say so, unless that has ended; remove checkpoints that are not complete.

    `owner` is the launcher's owner.json. If it is another one by now, the run is being continued, and is not touched.
    """
    with sole_writer(folder):
        if owner_text(folder) != owner:
            return
        remove_unfinished(folder / CHECKPOINTS)
        summary = read_summary(folder)
        if summary and summary.status == RUNNING:
            summary.status, summary.error = FAILED, "the launcher was killed"
            _write(folder, summary)


def _decide(folder: Path, summary: Summary, errors: Mapping[int, Error], exits: Mapping[int, int] | None,
            memory_kill: MemoryKill | None, *, interrupted: bool, lost: str | None) -> None:  # fmt: skip
    """Decide whether the run was interrupted or has failed, and which rank failed."""
    _fill(folder, summary)
    ranks = summary.ranks
    if lost and not errors:
        summary.status, summary.error = FAILED, lost
        return
    found = _first_to_fail(folder, errors, exits, ranks, memory_kill)
    if found is None and interrupted:
        summary.status = INTERRUPTED
        return
    rank, error = found or _lost(errors, ranks)
    summary.status, summary.error = FAILED, error.error
    summary.failed_rank = None if error.everyone else rank if error.blames is None else error.blames


def _failure(folder: Path, summary: Summary, errors: Mapping[int, Error], not_written: str) -> Ending:
    """The message: the error, the rank if there are several, and the path of its log."""
    rank, alone = summary.failed_rank, summary.ranks == 1
    usage = any(e.error == summary.error and e.exit_code == EXIT_USAGE for e in errors.values())
    who = "" if rank is None or alone else f"rank {rank} failed: "
    log = "" if usage else f"\n  its log: {rank_log(folder, rank or 0)}"
    return Ending(summary, EXIT_USAGE if usage else EXIT_FAILED, f"{who}{summary.error}{log}{not_written}")


def _write(folder: Path, summary: Summary) -> str:
    """Write the summary; if that fails, return a sentence about it."""
    try:
        write_summary(folder, summary)
    except OSError as error:
        return f"\n  its summary cannot be written ({error.strerror}) and still has the status running"
    return ""


def _error(folder: Path, rank: int) -> Error | None:
    """The first error of the rank's last process."""
    found = None
    for line in read_sound_lines(rank_file(folder, rank), Start, Error):
        found = None if isinstance(line, Start) else found or line
    assert found is None or isinstance(found, Error)
    return found


def _first_to_fail(
    folder: Path,
    errors: Mapping[int, Error],
    exits: Mapping[int, int] | None,
    ranks: int,
    memory_kill: MemoryKill | None = None,
) -> tuple[int, Error] | None:
    """A rank with an error of its own, otherwise one whose process exited without an error message."""
    # (Unless other ranks waited for it until the deadline: then it was killed for that.)
    own = {rank: e for rank, e in errors.items() if e.own}
    if own:
        first = _as_observed(own)[0]
        return first, own[first]
    if any(e.timeout for e in errors.values()):
        return None
    for rank in range(ranks):
        if rank not in errors and _vanished(folder, rank, exits):
            return rank, Error(how_it_ended(exits.get(rank) if exits else None, rank, memory_kill), time.time())
    return None


def failed_before(folder: Path, rank: int, ranks: int) -> tuple[int, ...]:
    """The ranks that have recorded an error before this one fails. Clocks of several machines cannot order them."""
    return tuple(other for other in range(ranks) if other != rank and _error(folder, other))


def _as_observed(errors: Mapping[int, Error]) -> list[int]:
    """The ranks in the order of their failures: a rank that saw another rank's error failed after it.

    Clocks order only errors that did not see each other.
    """
    return sorted(errors, key=lambda rank: (len(errors.keys() & set(errors[rank].after)), errors[rank].time))


def _lost(errors: Mapping[int, Error], ranks: int) -> tuple[int | None, Error]:
    """The rank that others waited for: the one they name, otherwise one that recorded no error."""
    if not errors:
        return None, Error("the ranks exited without an error message", time.time())
    early = _as_observed(errors)
    silent = [rank for rank in range(ranks) if rank not in errors]
    # In a ring, a rank names its neighbour, which may be waiting, too: the one at fault recorded no error itself.
    for rank in early:
        if errors[rank].stopped or errors[rank].peer in silent:
            return errors[rank].peer, errors[rank]
    # A rank that gives up closes its connections, which fails others: those that timed out were first.
    waited = [rank for rank in sorted(errors) if errors[rank].timeout]
    if not silent and len(errors) > 1 and waited:
        waits = ", ".join(f"rank {rank} for rank {errors[rank].peer}" for rank in waited)
        text = f"the ranks waited for each other until the deadline ({waits}): is a link down?"
        return None, Error(text, time.time())
    return (silent or early)[0], errors[early[0]]


def _vanished(folder: Path, rank: int, exits: Mapping[int, int] | None) -> bool:
    """Whether the rank's process exited on its own without recording why."""
    if any(read_sound_lines(rank_file(folder, rank), End, Signal)):
        return False
    if exits is not None:
        return exits.get(rank, EXIT_OK) not in ENDED_ON_REQUEST
    return _state(folder, rank) == "gone"


def find_stopped(folder: Path, ranks: int) -> int | None:
    """A rank on this host whose process is stopped (SIGSTOP, a debugger): others wait for it."""
    return next((rank for rank in range(ranks) if _state(folder, rank) == "T"), None)


def _state(folder: Path, rank: int) -> str:
    """The state letter of a rank's process in /proc; `gone`; or empty if it cannot be read."""
    row = next((row for row in read_ranks(folder) if row.rank == rank), None)
    if row is None or row.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return ""
    try:
        state = Path(f"/proc/{row.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"
    return "gone" if state in "ZX" else state


def how_it_ended(code: int | None, rank: int, memory_kill: MemoryKill | None = None) -> str:
    """What happened to the process of a rank that recorded no error."""
    if memory_kill and code in (None, -signal.SIGKILL) and (killed := memory_kill(rank)):
        return f"its process {killed}"
    if code is not None and code < 0:
        return f"its process was killed by signal {-code}"
    return "its process exited" + (f" with code {code}" if code is not None else "") + " without an error message"


def _fill(folder: Path, summary: Summary) -> None:
    """Fill the summary with what rank 0 recorded before the end."""
    path = rank_file(folder, 0)
    summary.steps = len({line.step for line in read_sound_lines(path, Step)})
    summary.add_epochs(read_sound_lines(path, Epoch))


def wait_for_blame(folder: Path, rank: int, seconds: float) -> None:
    """Wait until it is clear which rank failed first, or until all others have recorded an error."""
    deadline = time.monotonic() + seconds
    summary = read_summary(folder)
    while summary and time.monotonic() < deadline:
        others = [r for r in range(summary.ranks) if r != rank]
        errors = {r: error for r in others if (error := _error(folder, r))}
        if len(errors) >= len(others) - 1 and len(others) > 1:
            return
        if _first_to_fail(folder, errors, None, summary.ranks):
            return
        time.sleep(0.05)

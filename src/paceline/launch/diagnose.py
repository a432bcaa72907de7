"""How a run ended, from what its ranks left in the run folder."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from paceline.records import (
    COMPLETED,
    FAILED,
    INTERRUPTED,
    RUNNING,
    Summary,
    read_lines,
    read_ranks,
    read_summary,
    sole_writer,
    write_summary,
)

# Ranks that are asked to stop before they can handle that are ended by the signal itself.
ENDED_ON_REQUEST = (EXIT_OK, EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Ending:
    """What to tell the user, and the exit code."""

    summary: Summary | None
    exit_code: int
    message: str = ""


def diagnose(
    folder: Path, exits: Mapping[int, int] | None = None, *, interrupted: bool = False, lost: str | None = None
) -> Ending:
    """Find out who failed, and make the summary say so. `exits` are the ranks' exit codes where they are known.

    `lost` is what ended all ranks at once, if something other than a rank did.
    How a run ended is decided once: where several ranks settle it, as under mpiexec, the first one does.
    """
    with sole_writer(folder):
        summary = read_summary(folder)
        if summary is None:
            return Ending(None, EXIT_FAILED, f"the run ended before it had begun; its logs are in {folder / 'logs'}")
        if summary.status == COMPLETED:
            return Ending(summary, EXIT_OK)
        if summary.status == INTERRUPTED:
            return Ending(summary, EXIT_INTERRUPTED)
        ranks = summary.servers + summary.workers
        errors = {rank: error for rank in range(ranks) if (error := _error(folder, rank))}
        not_written = ""
        if summary.status == RUNNING:
            _decide(folder, summary, errors, exits, interrupted=interrupted, lost=lost)
            not_written = _write(folder, summary)
        if summary.status == INTERRUPTED:
            return Ending(summary, EXIT_INTERRUPTED, f"interrupted{not_written}")
        return _failure(folder, summary, errors, not_written)


def _decide(folder: Path, summary: Summary, errors: Mapping[int, dict[str, Any]], exits: Mapping[int, int] | None, *,
            interrupted: bool, lost: str | None) -> None:  # fmt: skip
    """Whether the run was interrupted or has failed, and who is to blame."""
    _fill(folder, summary)
    ranks = summary.servers + summary.workers
    if lost and not errors:
        summary.status, summary.error = FAILED, lost
        return
    found = _first_to_fail(folder, errors, exits, ranks)
    if found is None and interrupted:
        summary.status = INTERRUPTED
        return
    rank, error = found or _lost(errors, ranks)
    summary.status, summary.error = FAILED, error["error"]
    summary.failed_rank = None if error.get("everyone") else error.get("blames", rank)


def _failure(folder: Path, summary: Summary, errors: Mapping[int, dict[str, Any]], not_written: str) -> Ending:
    """What to say: the error, whose it is where there are several ranks, and where more of it can be found."""
    rank, alone = summary.failed_rank, summary.servers + summary.workers == 1
    usage = any(e["error"] == summary.error and e.get("exit_code") == EXIT_USAGE for e in errors.values())
    who = "" if rank is None or alone else f"rank {rank} failed: "
    log = "" if usage else f"\n  its log: {folder / 'logs' / f'rank_{rank or 0}.log'}"
    return Ending(summary, EXIT_USAGE if usage else EXIT_FAILED, f"{who}{summary.error}{log}{not_written}")


def _write(folder: Path, summary: Summary) -> str:
    """Write the summary; if that is impossible, what to say about it."""
    try:
        write_summary(folder, summary)
    except OSError as error:
        return f"\n  its summary cannot be written ({error.strerror}), and still says that it is running"
    return ""


def _error(folder: Path, rank: int) -> dict[str, Any] | None:
    return next((r for r in read_lines(folder / f"rank_{rank}.jsonl") if r["kind"] == "error"), None)


def _first_to_fail(
    folder: Path, errors: Mapping[int, dict[str, Any]], exits: Mapping[int, int] | None, ranks: int
) -> tuple[int, dict[str, Any]] | None:
    """A rank with an error of its own, else one whose process ended without a word."""
    # (Unless others waited for it until the deadline: then it was ended for that.)
    own = {rank: e for rank, e in errors.items() if e.get("own")}
    if own:
        first = _as_observed(own)[0]
        return first, own[first]
    if any(e.get("timeout") for e in errors.values()):
        return None
    for rank in range(ranks):
        if rank not in errors and _vanished(folder, rank, exits):
            return rank, {"error": _how(exits.get(rank) if exits else None)}
    return None


def failed_before(folder: Path, rank: int, ranks: int) -> list[int]:
    """The ranks whose errors can be seen now, when this one fails: the others' clocks may be wrong."""
    return [other for other in range(ranks) if other != rank and _error(folder, other)]


def _as_observed(errors: Mapping[int, dict[str, Any]]) -> list[int]:
    """The ranks, first failures first: a rank that saw another's error failed after it.

    Clocks only order errors that did not see each other.
    """
    return sorted(
        errors, key=lambda rank: (len(errors.keys() & set(errors[rank].get("after", ()))), errors[rank]["time"])
    )


def _lost(errors: Mapping[int, dict[str, Any]], ranks: int) -> tuple[int | None, dict[str, Any]]:
    """The rank that others waited for in vain: the one they name, else one that has said nothing."""
    if not errors:
        return None, {"error": "the ranks ended without a word"}
    early = _as_observed(errors)
    silent = [rank for rank in range(ranks) if rank not in errors]
    # In a ring, a rank names its neighbour, which was waiting itself: the one to blame is named and has said nothing.
    for rank in early:
        if errors[rank].get("stopped") or errors[rank].get("peer") in silent:
            return errors[rank]["peer"], errors[rank]
    # A rank that gives up closes its connections, and others lose it: those that waited tell what was first.
    waited = [rank for rank in sorted(errors) if errors[rank].get("timeout")]
    if not silent and len(errors) > 1 and waited:
        waits = ", ".join(f"rank {rank} for rank {errors[rank].get('peer')}" for rank in waited)
        return None, {"error": f"the ranks waited for each other until the deadline ({waits}): is a link down?"}
    return (silent or early)[0], errors[early[0]]


def _vanished(folder: Path, rank: int, exits: Mapping[int, int] | None) -> bool:
    """Whether the rank's process has ended by itself without having written why."""
    kinds = {record["kind"] for record in read_lines(folder / f"rank_{rank}.jsonl")}
    if kinds & {"end", "signal"}:
        return False
    if exits is not None:
        return exits.get(rank, EXIT_OK) not in ENDED_ON_REQUEST
    return _state(folder, rank) == "gone"


def find_stopped(folder: Path, ranks: int) -> int | None:
    """A rank of this host whose process was stopped (SIGSTOP, a debugger): the one that others wait for."""
    return next((rank for rank in range(ranks) if _state(folder, rank) == "T"), None)


def _state(folder: Path, rank: int) -> str:
    """The state letter of a rank's process as the kernel has it; `gone`; or nothing, where that cannot be seen."""
    row = next((row for row in read_ranks(folder) if row.rank == rank), None)
    if row is None or row.host != socket.gethostname() or not Path("/proc/self/stat").exists():
        return ""
    try:
        state = Path(f"/proc/{row.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return "gone"
    return "gone" if state in "ZX" else state


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was killed by signal {-code}"
    return "its process ended" + (f" with exit code {code}" if code is not None else "") + " without a word"


def _fill(folder: Path, summary: Summary) -> None:
    """What rank 0 had written down before the end."""
    records = list(read_lines(folder / "rank_0.jsonl"))
    summary.steps = len({r["step"] for r in records if r["kind"] == "step"})
    by_epoch = {r["epoch"]: r for r in records if r["kind"] == "epoch"}  # the last one, if some were done again
    epochs = [by_epoch[epoch] for epoch in sorted(by_epoch)]
    summary.epoch_seconds = [r["seconds"] for r in epochs]
    trained = [r for r in epochs if "loss" in r]  # none, where compute was emulated
    summary.train_loss = [r["loss"] for r in trained]
    summary.train_accuracy = [r["accuracy"] for r in trained]


def wait_for_blame(folder: Path, rank: int, seconds: float) -> None:
    """A rank that lost another waits until it is clear who failed first, or until all others have spoken."""
    deadline = time.monotonic() + seconds
    summary = read_summary(folder)
    while summary and time.monotonic() < deadline:
        others = [r for r in range(summary.servers + summary.workers) if r != rank]
        errors = {r: error for r in others if (error := _error(folder, r))}
        if len(errors) >= len(others) - 1 and len(others) > 1:
            return
        if _first_to_fail(folder, errors, None, summary.servers + summary.workers):
            return
        time.sleep(0.05)

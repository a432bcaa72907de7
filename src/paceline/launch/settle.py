"""How a run ended, from what its ranks left in the run folder."""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from paceline.records import COMPLETED, FAILED, INTERRUPTED, Summary, read_lines, read_summary, write_summary

# Ranks that are asked to stop before they can handle that are ended by the signal itself.
ENDED_ON_REQUEST = (EXIT_OK, EXIT_INTERRUPTED, -signal.SIGINT, -signal.SIGTERM)


@dataclass(frozen=True)
class Ending:
    """What to tell the user, and the exit code."""

    summary: Summary | None
    exit_code: int
    message: str = ""


def settle(folder: Path, exits: Mapping[int, int] | None = None, *, interrupted: bool = False) -> Ending:
    """Find out who failed, and make the summary say so. `exits` are the ranks' exit codes where they are known."""
    summary = read_summary(folder)
    if summary is None:
        return Ending(None, EXIT_FAILED, f"the run ended before it had begun; its logs are in {folder / 'logs'}")
    if summary.status == COMPLETED:
        return Ending(summary, EXIT_OK)
    if summary.status == INTERRUPTED:
        return Ending(summary, EXIT_INTERRUPTED)
    _fill(folder, summary)
    ranks = summary.servers + summary.workers
    errors = {rank: error for rank in range(ranks) if (error := _error(folder, rank))}
    found = _first_to_fail(folder, errors, exits, ranks)
    if found is None and interrupted:
        summary.status = INTERRUPTED
        write_summary(folder, summary)
        return Ending(summary, EXIT_INTERRUPTED, "interrupted")
    rank, error = found or _lost(errors, ranks)
    rank, everyone = error.get("blames", rank), bool(error.get("everyone"))
    summary.status, summary.error = FAILED, error["error"]
    summary.failed_rank = None if everyone else rank
    write_summary(folder, summary)
    code = EXIT_USAGE if error.get("exit_code") == EXIT_USAGE else EXIT_FAILED
    who = "all ranks" if everyone else f"rank {rank}" if rank is not None else "the run"
    log = folder / "logs" / f"rank_{rank or 0}.log"
    return Ending(summary, code, f"{who} failed: {error['error']}\n  its log: {log}")


def _error(folder: Path, rank: int) -> dict[str, Any] | None:
    return next((r for r in read_lines(folder / f"rank_{rank}.jsonl") if r["kind"] == "error"), None)


def _first_to_fail(
    folder: Path, errors: Mapping[int, dict[str, Any]], exits: Mapping[int, int] | None, ranks: int
) -> tuple[int, dict[str, Any]] | None:
    """A rank with an error of its own, else one whose process ended without a word."""
    # (Unless others waited for it until the deadline: then it was ended for that.)
    own = {rank: e for rank, e in errors.items() if e.get("own")}
    if own:
        first = min(own, key=lambda rank: own[rank]["time"])
        return first, own[first]
    if any(e.get("timeout") for e in errors.values()):
        return None
    for rank in range(ranks):
        if rank not in errors and _vanished(folder, rank, exits):
            return rank, {"error": _how(exits.get(rank) if exits else None)}
    return None


def _lost(errors: Mapping[int, dict[str, Any]], ranks: int) -> tuple[int | None, dict[str, Any]]:
    """The rank that others waited for in vain: the one they name, else one that has said nothing."""
    if not errors:
        return None, {"error": "the ranks ended without a word"}
    early = sorted(errors, key=lambda rank: errors[rank]["time"])
    silent = [rank for rank in range(ranks) if rank not in errors]
    # In a ring, a rank names its neighbour, which was waiting itself: the one to blame is named and has said nothing.
    for rank in early:
        if errors[rank].get("stopped") or errors[rank].get("peer") in silent:
            return errors[rank]["peer"], errors[rank]
    if not silent and len(errors) > 1 and all(e.get("timeout") for e in errors.values()):
        waits = ", ".join(f"rank {rank} for rank {errors[rank].get('peer')}" for rank in sorted(errors))
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
    try:
        listed = json.loads((folder / "env.json").read_text())["ranks"]
        row = next(row for row in listed if row["rank"] == rank)
        if row["host"] != socket.gethostname() or not Path("/proc/self/stat").exists():
            return ""
    except (OSError, ValueError, KeyError, StopIteration):
        return ""
    try:
        state = Path(f"/proc/{row['pid']}/stat").read_text().rsplit(")", 1)[1].split()[0]
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

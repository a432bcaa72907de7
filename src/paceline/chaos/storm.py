"""A storm: kills and stops workers of a run at random moments, until the run ends."""

from __future__ import annotations

import contextlib
import heapq
import os
import random
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from paceline.errors import UsageError
from paceline.run.folder import read_ranks
from paceline.run.records import RankRow

KILL, STOP = "kill", "stop"
KINDS = {KILL: signal.SIGKILL, STOP: signal.SIGSTOP}
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
LOOK_SECONDS = 0.02
STOPPED_SECONDS = 10.0


@dataclass(frozen=True)
class Often:
    """Faults of one kind: the mean time between two of them, and how long each lasts."""

    every: float
    lasts: float = STOPPED_SECONDS


@dataclass(frozen=True)
class Fault:
    """What was done to a worker, by the Unix clock."""

    time: float
    kind: str
    worker: int
    lasts: float = 0.0


def read_often(kind: str, text: str) -> Often:
    """Such as every=30s, or every=2m,for=5s."""
    usage = f"--{kind} {text}: give the mean time between two, such as every=30s" + (
        "; with how long each lasts: every=2m,for=5s" if kind == STOP else ""
    )
    found = dict(part.partition("=")[::2] for part in text.split(","))
    allowed = {"every", "for"} if kind == STOP else {"every"}
    if not found.keys() <= allowed or "every" not in found:
        raise UsageError(usage)
    values = {name: _seconds(value) for name, value in found.items()}
    if not all(values.values()):
        raise UsageError(usage)
    return Often(values["every"] or 0.0, values.get("for") or STOPPED_SECONDS)


def _seconds(text: str) -> float | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(ms|s|m|h)", text)
    return float(match[1]) * UNITS[match[2]] or None if match else None


def moments(often: Mapping[str, Often], dice: random.Random) -> Iterator[tuple[float, str]]:
    """When there is a fault, in seconds from the start, and of which kind: each kind at random, independently."""
    coming = [(dice.expovariate(1 / each.every), kind) for kind, each in sorted(often.items())]
    heapq.heapify(coming)
    while coming:
        at, kind = heapq.heappop(coming)
        yield at, kind
        heapq.heappush(coming, (at + dice.expovariate(1 / often[kind].every), kind))


def storm(
    folder: Path,
    often: Mapping[str, Often],
    seed: int,
    running: Callable[[], bool],
    struck: Callable[[Fault], object],
) -> None:
    """Strike random workers of the run in this folder, as long as it is running; `struck` is told of every fault."""
    stopped = list[tuple[float, int]]()
    try:
        _storm(folder, often, random.Random(seed), running, struck, stopped)
    finally:
        _continue(stopped)


def _storm(
    folder: Path,
    often: Mapping[str, Often],
    dice: random.Random,
    running: Callable[[], bool],
    struck: Callable[[Fault], object],
    stopped: list[tuple[float, int]],
) -> None:
    while running() and not _workers(folder):
        time.sleep(LOOK_SECONDS)
    start = time.monotonic()
    for at, kind in moments(often, dice):
        while running() and time.monotonic() - start < at:
            _continue(stopped, time.monotonic())
            time.sleep(LOOK_SECONDS)
        if not running():
            break
        workers = _workers(folder)
        if not workers:
            continue
        victim = dice.choice(workers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(victim.pid, KINDS[kind])
            if kind == STOP:
                stopped.append((time.monotonic() + often[kind].lasts, victim.pid))
            struck(Fault(time.time(), kind, victim.rank, often[kind].lasts if kind == STOP else 0.0))


def _workers(folder: Path) -> list[RankRow]:
    """The workers whose processes live. A process number may belong to another program by now."""
    found = []
    for row in read_ranks(folder):
        with contextlib.suppress(OSError):
            named = Path(f"/proc/{row.pid}/comm").read_text() == f"paceline-{row.rank}\n"
            if row.host == socket.gethostname() and named:
                found.append(row)
    return found


def _continue(stopped: list[tuple[float, int]], now: float | None = None) -> None:
    """Let processes go on that have been stopped long enough, or all."""
    for each in [each for each in stopped if now is None or each[0] <= now]:
        stopped.remove(each)
        with contextlib.suppress(ProcessLookupError):
            os.kill(each[1], signal.SIGCONT)

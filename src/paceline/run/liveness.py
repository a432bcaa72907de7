"""Whether a run that says it is running still is: the process that owns it, and its last sign of life; no torch."""

from __future__ import annotations

import os
import socket
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from paceline.run.atomic import write_whole
from paceline.run.folder import check_summary
from paceline.run.records import FAILED, RUNNING, Summary
from paceline.strict_json import Count, build, dump, parse, read_text

OWNER = "owner.json"
# A run writes samples of its nodes twice a second; a network file system may show them a minute late.
SILENT_SECONDS = 120.0
PROC = Path("/proc")


@dataclass(frozen=True)
class Owner:
    """The process without which a run cannot go on: our launcher, or rank 0 where another launcher started the ranks.

    Process numbers are used again; `started` (clock ticks since the machine's boot) tells two processes apart. `boot`
    and `namespace` say on which machine, and in which container, the number means this process.
    """

    host: str
    boot: str
    namespace: str
    pid: Count
    started: Count


def claim(folder: Path) -> None:
    """Write down that this process owns the run."""
    boot, namespace = _here()
    owner = Owner(socket.gethostname(), boot, namespace, os.getpid(), _started(os.getpid()) or 0)
    write_whole(folder / OWNER, dump(asdict(owner), indent=1) + "\n")


def current_summary(folder: Path) -> Summary:
    """The folder's summary. A run whose process has gone without a word is failed; one that has been silent for long
    has that as its error. Raises OSError or ValueError as check_summary does.
    """
    summary = check_summary(folder)
    if summary.status != RUNNING:
        return summary
    owner = _owner(folder)
    if owner and (owner.boot, owner.namespace) == _here() and owner.boot:
        if _started(owner.pid) != owner.started:
            summary.status = FAILED
            summary.error = f"its process {owner.pid} on {owner.host} is gone: was it killed?"
        return summary
    silent = time.time() - _last_sign(folder)
    if silent > SILENT_SECONDS:
        where = f" on {owner.host}" if owner else ""
        summary.error = f"no sign of life{where} for {silent:.0f} s: it was probably killed"
    return summary


def owner_name(folder: Path) -> str:
    """The process that owns the run, in words."""
    owner = _owner(folder)
    return f"process {owner.pid} on {owner.host}" if owner else "another process"


def owner_text(folder: Path) -> str:
    """What owner.json holds, which no other run's does; empty where it cannot be read."""
    try:
        return read_text(folder / OWNER)
    except (OSError, ValueError):
        return ""


def is_here(folder: Path, owner: str) -> bool:
    """Whether the run folder whose owner.json holds this is on this file system, too."""
    return bool(owner) and owner_text(folder) == owner


def _owner(folder: Path) -> Owner | None:
    try:
        return build(Owner, parse(read_text(folder / OWNER)))
    except (OSError, ValueError):
        return None


def _here() -> tuple[str, str]:
    """This boot of the machine, and this container's process numbers; empty where the kernel does not tell."""
    try:
        return (PROC / "sys/kernel/random/boot_id").read_text().strip(), os.readlink(PROC / "self/ns/pid")
    except OSError:
        return "", ""


def _started(pid: int) -> int | None:
    """When a process was started, in clock ticks since boot; None if it has ended."""
    try:
        state, *fields = (PROC / str(pid) / "stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if state in "ZX" else int(fields[18])


def _last_sign(folder: Path) -> float:
    """When something in the folder last changed, in seconds of the Unix clock."""
    times = [folder.stat().st_mtime]
    for path in folder.iterdir():
        try:
            times.append(path.stat().st_mtime)
        except OSError:  # it has been replaced just now
            times.append(time.time())
    return max(times)

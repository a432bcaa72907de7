"""Finds out whether the kernel killed a rank because memory ran out; to a parent it looks like any other SIGKILL."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from paceline.control_groups import own_groups
from paceline.launch.counters import PAGE, PROC, memory
from paceline.launch.placement import Places
from paceline.launch.usage import RanksHere
from paceline.run.folder import read_ranks

# Files of a control group, of version 2 and of version 1. The counter is a line `oom_kill N`, as in /proc/vmstat.
COUNTERS = ("memory.events", "memory.oom_control")
LIMITS = ("memory.max", "memory.limit_in_bytes")
PERIOD = 0.1
# A process with much memory takes some time to end, and the other ranks to notice it.
RECENT_SECONDS = 30.0


class MemoryKills:
    """Counts processes that the kernel kills because memory runs out. Create it before they start.

    The kernel counts each in the control group that the process is in, whichever limit was reached: of that group, of
    one that contains it, or of the machine. If no such group can be read, the kills of the whole machine are counted.
    """

    def __init__(self, groups: Sequence[Path] | None = None, proc: Path = PROC) -> None:
        """`groups`: a control group and those that contain it; by default those of this process."""
        self._groups, self._proc = own_groups("memory", proc) if groups is None else groups, proc
        counters = (group / name for group in self._groups for name in COUNTERS)
        self._counter = next((path for path in counters if path.exists()), proc / "vmstat")
        self._count, self._grown_at = self._read(), -math.inf

    def recent(self) -> bool:
        """Whether the counter has grown recently; growth is dated by the call that notices it."""
        count, now = self._read(), time.monotonic()
        if count > self._count:
            self._count, self._grown_at = count, now
        return now - self._grown_at < RECENT_SECONDS

    def describe(self, used: int | None = None) -> str | None:
        """How a process that used so many bytes was killed, if it was for lack of memory; otherwise None."""
        if not self.recent():
            return None
        least = f"it used at least {_gib(used)}, and " if used else ""
        return f"was killed by the kernel because memory ran out: {least}{self._limit()}"

    def _read(self) -> int:
        with suppress(OSError):  # the group has been removed
            lines = self._counter.read_text().splitlines()
            return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
        return 0

    def _limit(self) -> str:
        """The lowest limit that applies; groups without one say `max`, or a number larger than any memory."""
        machine = memory((self._proc / "meminfo").read_bytes())[0]
        limits = {machine: f"this machine has {_gib(machine)}"}
        for path in (group / name for group in self._groups for name in LIMITS):
            with suppress(OSError, ValueError):
                limit = int(path.read_text())
                limits.setdefault(limit, f"the control group {path.parent} is limited to {_gib(limit)}")
        return limits[min(limits)]


class RanksMemory:
    """Watches the memory of the launcher's ranks, and whether the kernel kills one for it. Create it before them."""

    def __init__(self, folder: Path, places: Places | None = None, proc: Path = PROC) -> None:
        self._folder, self._pids, self._proc = folder, RanksHere(folder), proc
        own = own_groups("memory", proc)
        self._kills = MemoryKills(own, proc)
        self._elsewhere: dict[int, MemoryKills] = {}
        if places and own and own[0].name == places.here:  # a lab with limits: each node has a group beside ours
            nodes = {node.name: MemoryKills([own[0].with_name(node.name), *own[1:]], proc) for node in places.nodes}
            self._elsewhere = {rank: nodes[node.name] for rank, node in enumerate(places.nodes)}
        self._used: dict[int, int] = {}  # by process
        self._due = 0.0

    def look(self) -> None:
        """Note what the ranks use and whether one was killed, unless that was done a moment ago."""
        if time.monotonic() < self._due:
            return
        self._due = time.monotonic() + PERIOD
        for kills in {self._kills, *self._elsewhere.values()}:
            kills.recent()
        for pid in self._pids():
            with suppress(OSError):
                resident = int((self._proc / str(pid) / "statm").read_bytes().split()[1]) * PAGE
                self._used[pid] = max(resident, self._used.get(pid, 0))

    def describe(self, rank: int | None = None) -> str | None:
        """How a rank, or else their zygote, was killed, if it was for lack of memory; otherwise None."""
        host = socket.gethostname()
        pid = next((row.pid for row in read_ranks(self._folder) if row.rank == rank and row.host == host), 0)
        kills = self._kills if rank is None else self._elsewhere.get(rank, self._kills)
        return kills.describe(self._used.get(pid))


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"

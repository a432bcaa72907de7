"""Reads the kernel's counters of a node: CPU, memory, processes, interfaces. A reading takes microseconds.

psutil has most of these figures, too, but takes three times as long for them: it opens every file again and reads all
of it. It has no pressure, no drops in queues, and no process that stays the same when its number is used again.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

PROC = Path("/proc")
TICKS, PAGE = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
# The columns of /proc/net/dev that are recorded, by their names in a sample.
COLUMNS = {"rx_bytes": 0, "rx_packets": 1, "rx_drops": 3, "tx_bytes": 8, "tx_packets": 9, "tx_drops": 11}
# linux/rtnetlink.h, linux/pkt_sched.h: a request for all queueing disciplines, and the used parts of the answer.
GET_QUEUES = struct.pack("=IHHII20x", 36, 38, 0x301, 0, 0)
HEADER, QUEUE, ATTRIBUTE = struct.Struct("=IHHII"), struct.Struct("=B3xiIII"), struct.Struct("=HH")
FAILED, DONE, STATISTICS, ROOT = 2, 3, 3, 0xFFFF_FFFF

Pids = Callable[[], Iterable[int]]
Interfaces = dict[str, dict[str, int]]


def busy_seconds(stat: bytes) -> float:
    """/proc/stat: busy seconds of all cores together, without waiting for a disk or a hypervisor."""
    user, nice, system, _idle, _iowait, irq, softirq = map(int, stat.split(b"\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) / TICKS


def process_seconds(stat: bytes) -> float:
    """/proc/stat: seconds that all processes of the machine have used.

    Without interrupts: a run's own traffic causes them, and some kernels count them for no process.
    """
    return sum(map(int, stat.split(b"\n", 1)[0].split()[1:4])) / TICKS


def stolen_seconds(stat: bytes) -> float:
    """/proc/stat: seconds in which a virtual core had work, and the hypervisor did not run it (steal time)."""
    return int(stat.split(b"\n", 1)[0].split()[8]) / TICKS


def waited_seconds(pressure: bytes) -> float:
    """/proc/pressure/cpu: seconds in which at least one process of the machine waited for a core."""
    return int(pressure.split(b"\n", 1)[0].rpartition(b"total=")[2]) / 1e6


def preemptions(status: bytes) -> int:
    """/proc/PID/status: how often the kernel preempted the main thread of the process.

    0 if the kernel does not count it, as in some sandboxes.
    """
    _, found, count = status.rpartition(b"nonvoluntary_ctxt_switches:")
    return int(count.split()[0]) if found else 0


def memory(meminfo: bytes) -> tuple[int, int]:
    """/proc/meminfo: total memory in bytes, and how much of it is not available to a new process."""
    rows = dict(line.split(b":", 1) for line in meminfo.splitlines())
    total, free = (int(rows[name].split()[0]) * 1024 for name in (b"MemTotal", b"MemAvailable"))
    return total, total - free


def process(stat: bytes) -> tuple[float, int, float]:
    """/proc/PID/stat: CPU seconds of all threads, resident bytes, and the start time in seconds since boot."""
    fields = stat[stat.rindex(b")") + 2 :].split()  # a program's name may have spaces and parentheses
    return (int(fields[11]) + int(fields[12])) / TICKS, int(fields[21]) * PAGE, int(fields[19]) / TICKS


def interfaces(net_dev: bytes) -> Interfaces:
    """/proc/net/dev: the counters of each interface that has ever carried traffic."""
    found = {}
    for line in net_dev.splitlines()[2:]:
        name, numbers = line.split(b":", 1)
        fields = numbers.split()
        if fields[0] != b"0" or fields[8] != b"0":
            found[name.strip().decode(errors="replace")] = {key: int(fields[i]) for key, i in COLUMNS.items()}
    return found


class ProcFile:
    """A file of /proc that stays open. Of a process that has ended it says so, even if another has its number now."""

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDONLY)

    def read(self) -> bytes:
        text = os.pread(self._file, 1 << 16, 0)
        while more := os.pread(self._file, 1 << 16, len(text)):  # the kernel hands out long tables page by page
            text += more
        return text

    def close(self) -> None:
        os.close(self._file)


class Used(NamedTuple):
    """What some processes have used: processor seconds and preemptions since they were first looked at; memory now."""

    seconds: float
    memory_bytes: int
    preemptions: int


class Process:
    """One process, followed through files that stay open."""

    def __init__(self, folder: Path) -> None:
        self._stat = ProcFile(folder / "stat")
        try:
            self._status = ProcFile(folder / "status")
        except OSError:
            self._stat.close()
            raise

    def read(self) -> tuple[float, int, float, int]:
        """Processor seconds, bytes in memory, when it began, preemptions."""
        return *process(self._stat.read()), preemptions(self._status.read())

    def close(self) -> None:
        self._stat.close()
        self._status.close()


class Processes:
    """What some processes have used since this object was created, including processes that have ended."""

    def __init__(self, pids: Pids, proc: Path = PROC) -> None:
        self._pids, self._proc = pids, proc
        self._known: dict[int, tuple[Process, float, int]] = {}
        self._seconds, self._preemptions, self._looked = 0.0, 0, _since_boot()

    def read(self) -> Used | None:
        """None while there are no such processes."""
        looked, self._looked, resident = self._looked, _since_boot(), 0
        for pid in {*self._pids(), *self._known}:
            file, before, preempted_before = self._known.pop(pid, (None, None, 0))
            try:
                file = file or Process(self._proc / str(pid))
                seconds, memory_bytes, began, preempted = file.read()
            except OSError:  # it has ended, or may not be read
                if file:
                    file.close()
                continue
            if before is None:  # what it used before the last look, if it is older than that, does not count
                new = began + 1 / TICKS > looked
                before, preempted_before = (0.0, 0) if new else (seconds, preempted)
            self._known[pid] = file, seconds, preempted
            self._seconds += max(0.0, seconds - before)
            self._preemptions += preempted - preempted_before
            resident += memory_bytes
        return Used(self._seconds, resident, self._preemptions) if self._known else None

    def close(self) -> None:
        for file, *_ in self._known.values():
            file.close()


def all_processes(proc: Path = PROC) -> Iterable[int]:
    return [int(name) for name in os.listdir(proc) if name.isdecimal()]


def _since_boot() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.monotonic()


class Queues:
    """Counts packets that the queues of the interfaces have dropped.

    A link that is limited with tc drops packets in its queue, and /proc/net/dev does not count these.
    """

    def __init__(self) -> None:
        if sys.platform != "linux":
            raise OSError("netlink is not available")
        self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC)
        self._socket.settimeout(1.0)

    def drops(self) -> dict[str, int]:
        """Drops by interface; interfaces without drops are left out."""
        self._socket.send(GET_QUEUES)
        dropped: dict[int, int] = {}
        while not queue_drops(self._socket.recv(1 << 16), dropped):
            continue
        found = {}
        for index, count in dropped.items():
            with suppress(OSError):  # the interface is gone
                found[socket.if_indextoname(index)] = count
        return found

    def close(self) -> None:
        self._socket.close()


def queue_drops(answer: bytes, dropped: dict[int, int]) -> bool:
    """Add the drops in one part of the kernel's answer, by interface number; true if it was the last part."""
    at = 0
    while at < len(answer):
        length, kind, *_ = HEADER.unpack_from(answer, at)
        if kind in (FAILED, DONE):
            return True
        index, count = _queue(answer[at + HEADER.size : at + length])
        if count:
            dropped[index] = count
        at += _aligned(length)
    return False


def _queue(message: bytes) -> tuple[int, int]:
    """The interface's number, and the drops of its outermost queue, which include those of the queues inside it."""
    _, index, _, parent, _ = QUEUE.unpack_from(message)
    at = QUEUE.size
    while parent == ROOT and at < len(message):
        length, kind = ATTRIBUTE.unpack_from(message, at)
        if kind == STATISTICS:  # struct tc_stats: bytes (64 bits), packets, drops …
            return index, struct.unpack_from("=QII", message, at + ATTRIBUTE.size)[2]
        at += _aligned(length)
    return index, 0


def _aligned(length: int) -> int:
    return (length + 3) & ~3


@dataclass(frozen=True)
class Reading:
    """Counters, of which only differences are meaningful; None if one is not available.

    `machine_seconds`, `stolen_seconds` and `waited_seconds` count the whole machine, also on a node of the lab.
    """

    seconds: float | None
    memory_bytes: int | None
    run_seconds: float | None
    run_memory_bytes: int | None
    interfaces: Interfaces
    machine_seconds: float | None = None
    stolen_seconds: float | None = None
    waited_seconds: float | None = None
    preemptions: int | None = None


class Counters:
    """All counters of this node.

    CPU and memory are the machine's. With `own_processes` they are those of all processes that are visible here: a
    node of the lab has its own namespaces on a shared machine.
    """

    def __init__(self, run: Pids, *, own_processes: bool = False, proc: Path = PROC) -> None:
        self._stat, self._meminfo, self._net = (_opened(proc / name) for name in ("stat", "meminfo", "net/dev"))
        self._pressure = _opened(proc / "pressure/cpu")
        self._own = Processes(lambda: all_processes(proc), proc) if own_processes else None
        self._run = None if own_processes else Processes(run, proc)
        self._queues: Queues | None = None
        with suppress(OSError):
            self._queues = Queues()
        if not (self._stat or self._meminfo or self._net):
            self.close()
            raise OSError(f"cannot read counters in {proc}")
        self.memory_bytes = memory(self._meminfo.read())[0] if self._meminfo else None

    def read(self) -> Reading:
        stat = self._stat.read() if self._stat else None
        own, run = self._own and self._own.read(), self._run and self._run.read()
        if self._own:
            seconds, used = (own.seconds, own.memory_bytes) if own else (None, None)
        else:
            seconds = busy_seconds(stat) if stat else None
            used = memory(self._meminfo.read())[1] if self._meminfo else None
        carried = interfaces(self._net.read()) if self._net else {}
        for name, dropped in self._queues.drops().items() if self._queues else ():
            if name in carried:
                carried[name]["tx_drops"] += dropped
        followed = own or run
        return Reading(
            seconds,
            used,
            run.seconds if run else None,
            run.memory_bytes if run else None,
            carried,
            process_seconds(stat) if stat else None,
            stolen_seconds(stat) if stat else None,
            waited_seconds(self._pressure.read()) if self._pressure else None,
            followed.preemptions if followed else None,
        )

    def close(self) -> None:
        for each in (self._stat, self._meminfo, self._net, self._pressure, self._own, self._run, self._queues):
            if each:
                each.close()


def _opened(path: Path) -> ProcFile | None:
    """The open file, or None if it cannot be read; a kernel without pressure accounting fails only on reading."""
    file = None
    try:
        file = ProcFile(path)
        file.read()
    except OSError:
        if file:
            file.close()
        return None
    return file

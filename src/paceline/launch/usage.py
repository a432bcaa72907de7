"""Samples a node during a run: a thread of the node's first rank writes node_NAME.jsonl."""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

from paceline.launch.counters import PROC, Counters, Reading
from paceline.launch.gpus import Gpus
from paceline.layout import cores
from paceline.run.folder import ENVIRONMENT, node_file, read_ranks
from paceline.run.lines import LineWriter
from paceline.run.records import Gpu, NodeEnd, NodeSample, NodeStart, Traffic

PERIOD = 0.5
# The kernel counts CPU time in hundredths of a second: differences over less than this are too inaccurate.
SHORTEST = 0.1
# How long a rank waits for the last sample when it ends, in case the file system hangs.
LAST_SAMPLE_SECONDS = 5.0
# Fields of a sample that are rates of counters; left out if the counter is not available.
RATES = {"machine_cpu": "machine_seconds", "steal": "stolen_seconds", "pressure": "waited_seconds",
                  "preemptions": "preemptions"}  # fmt: skip


class NodeUsage:
    """Samples this node at a fixed period from enter to exit; if that fails, the run continues.

    `complain` is called once if there are no samples, or no more. `own_processes`: see Counters.
    """

    def __init__(
        self,
        folder: Path,
        complain: Callable[[str], object],
        *,
        own_processes: bool = False,
        name: str | None = None,
        period: float = PERIOD,
        proc: Path = PROC,
    ) -> None:
        self.name = name or socket.gethostname()
        self.path = node_file(folder, self.name)
        self._folder, self._complain, self._period, self._proc = folder, complain, period, proc
        self._own_processes = own_processes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-usage", daemon=True)

    def __enter__(self) -> NodeUsage:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(LAST_SAMPLE_SECONDS)

    def _run(self) -> None:
        ranks = RanksHere(self._folder)
        try:
            with (
                closing(Counters(ranks, own_processes=self._own_processes, proc=self._proc)) as counters,
                closing(Gpus()) as gpus,
                closing(LineWriter(self.path)) as lines,
            ):
                self._sample(counters, gpus, lines)
        except (OSError, ValueError, LookupError) as error:
            self._complain(f"Sampling of this node has stopped: {error}")

    def _sample(self, counters: Counters, gpus: Gpus, lines: LineWriter) -> None:
        count = cores() if self._own_processes else os.cpu_count()
        lines.write(NodeStart(self.name, count, counters.memory_bytes, self._period, "unix", self._own_processes,
                              boot_id(self._proc)))  # fmt: skip
        samples = Samples(counters, gpus)
        for _ in beats(self._period, self._stop.wait):
            lines.write(samples.take())
            lines.flush()
        lines.write(samples.take())
        lines.write(NodeEnd(round(time.time(), 6), samples.taken, time.thread_time()))


class Samples:
    """Turns counters into samples; rates are averages since the previous sample."""

    def __init__(self, counters: Counters, gpus: Gpus, clock: Callable[[], float] = time.monotonic) -> None:
        self._counters, self._gpus, self._clock = counters, gpus, clock
        self._last: tuple[float, Reading] | None = None
        self.taken = 0

    def take(self) -> NodeSample:
        now, when = self._clock(), time.time()
        reading, before = self._counters.read(), self._last
        self._last, self.taken = (now, reading), self.taken + 1
        elapsed = now - before[0] if before else 0.0

        def rate(name: str) -> float | None:
            return _rate(getattr(reading, name), before and getattr(before[1], name), elapsed)

        sample: dict[str, Any] = {"time": round(when, 6), "cpu": rate("seconds"), "memory_bytes": reading.memory_bytes}
        sample |= {field: rate(name) for field, name in RATES.items() if getattr(reading, name) is not None}
        if reading.run_seconds is not None:
            sample["run_cpu"] = rate("run_seconds")
            sample["run_memory_bytes"] = reading.run_memory_bytes
        if gpus := self._gpus.read():
            sample["gpus"] = tuple(Gpu(**gpu) for gpu in gpus)
        return NodeSample(**sample, interfaces={name: Traffic(**row) for name, row in reading.interfaces.items()})


def _rate(seconds: float | None, before: float | None, elapsed: float) -> float | None:
    if seconds is None or before is None or elapsed < SHORTEST:
        return None
    return round(max(0.0, seconds - before) / elapsed, 3)


def beats(period: float, wait: Callable[[float], bool], clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Yield at once, then at every multiple of the period until `wait` returns true; missed multiples are skipped."""
    due = clock()
    while True:
        yield
        due += period * max(1, math.ceil((clock() - due) / period))
        if wait(max(0.0, due - clock())):
            return


class RanksHere:
    """The processes of the ranks on this host, from env.json, which changes when a rank is restarted."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._host = folder, socket.gethostname()
        self._changed = 0
        self._pids: set[int] = set()

    def __call__(self) -> Iterable[int]:
        try:
            changed = (self._folder / ENVIRONMENT).stat().st_mtime_ns
        except OSError:
            return ()
        if changed != self._changed:
            self._changed = changed
            self._pids = {row.pid for row in read_ranks(self._folder) if row.host == self._host}
        return self._pids


def boot_id(proc: Path = PROC) -> str | None:
    """The machine's boot id: the same for all nodes of a lab and all containers of a machine; None if unknown."""
    try:
        return (proc / "sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None

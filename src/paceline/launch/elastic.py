"""The launcher's part in an elastic run: it says who takes part, starts lost workers again, and ends silent ones."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from paceline.data.course import Position
from paceline.elastic.channel import LEFT, READY, Desk
from paceline.elastic.membership import Registrar
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from paceline.launch.diagnose import how_it_ended
from paceline.launch.joining import allow_joining, forbid_joining
from paceline.launch.spawn import Crew
from paceline.messages import LOGGER
from paceline.run.folder import rank_files
from paceline.run.lines import read_sound_lines
from paceline.run.records import Regrouped
from paceline.spec import RunSpec
from paceline.strategies.options import limits

# A worker that ends so often without having trained in between is started again after a pause, which grows; after so
# many errors of its own, the run has failed.
FUTILE, LONGEST_PAUSE = 3, 30.0
# After an error of its own, a worker is started again this much later: by then, it is known whether all have failed.
AFTER_ERROR = 1.0
# When a member has lost another one, this process is told of the end of that process sooner than after this time.
AFTER_LOSS = 1.0
# A worker that is stopped is taken for lost after this time; after silence of some time, it is looked whether it is.
STOPPED_SECONDS, LOOK_AFTER = 2.0, 0.2
# How often all may restart from the same checkpoint.
MOST_RETURNS = 3
# If this process itself has not run for so long, it cannot tell who has.
ABSENT_SECONDS = 0.5


class ElasticCrew:
    """Supervises the workers of an elastic run, which starts at a position. `go_back` prepares the folder for workers
    that restart from the last checkpoint, and returns its position; None if there is none.
    """

    def __init__(
        self, crew: Crew, folder: Path, spec: RunSpec, start: Position, go_back: Callable[[], Position | None]
    ) -> None:
        assert spec.elastic is not None
        assert spec.workers is not None
        self._crew, self._spec, self._start, self._go_back, self._returns = crew, spec, start, go_back, 0
        self._least, _ = limits(spec.elastic)
        self._desk = Desk(crew.private, spec.workers)
        self._registrar = Registrar(range(spec.workers), self._least, last_generation(folder))
        self._ended: set[int] = set()  # workers whose end has been dealt with, until they are started again
        self._futile, self._failures = Counter[int](), Counter[int]()
        self._later: dict[int, float] = {}  # when to start a worker again
        self._short_since: float | None = None
        self._silence = Silence(self._desk)
        self._evicted: dict[int, float] = {}
        self._left: dict[int, float] = {}  # by generation: when the first member has left it

    def wait(self, seconds: float) -> None:
        """Return when there is news."""
        zygote = self._crew.zygote
        self._desk.wait(seconds, [zygote.control] if zygote and not zygote.dead else [])

    def look(self, *, stopping: bool) -> bool:
        """Deal with what has happened; whether the run is over, or has failed."""
        crew, registrar = self._crew, self._registrar
        for worker, what, number in self._desk.messages():
            if what == READY:
                registrar.ready(worker)
            elif what == LEFT:
                self._left.setdefault(number, time.monotonic())
            else:
                registrar.entered(worker, number)
                self._futile[worker] = 0
        over = [self._has_ended(worker, code, stopping=stopping) for worker, code in dict(crew.exits).items()]
        if any(over) or crew.lost_zygote():
            self._end_newcomers()
            return True
        for worker in [worker for worker, when in self._later.items() if time.monotonic() > when]:
            self._start_again(worker)
        self._evict_silent()
        if registrar.lost_all:
            failed = [worker for worker, code in crew.exits.items() if code > 0]  # by the same error, very probably
            return len(failed) == len(crew.processes) or not self._begin_anew(stopping=stopping)
        self._count_patience(stopping=stopping)
        if time.monotonic() - self._left.get(registrar.number, math.inf) > AFTER_LOSS:
            registrar.repeat(registrar.number, "members have lost each other")
        while generation := registrar.due():
            LOGGER.debug("generation %d: workers %s: %s", generation.number, generation.members, generation.why)
            if generation.fresh:
                allow_joining(crew.private, self._start)
            self._desk.announce(generation)
        return False

    def close(self) -> None:
        self._desk.close()

    def _has_ended(self, worker: int, code: int, *, stopping: bool) -> bool:
        """Deal with the end of a worker's process; whether the run is over, or has failed."""
        if worker in self._ended:
            return False
        self._ended.add(worker)
        registrar = self._registrar
        was_member = worker in registrar.members
        how = how_it_ended(code, worker, self._crew.memory.describe)
        if worker in self._evicted:
            how = f"it made no progress for {self._evicted.pop(worker):.1f} s, and was killed"
        registrar.ended(worker, how)
        if code in (EXIT_OK, EXIT_INTERRUPTED):
            return was_member or stopping
        if (code == EXIT_USAGE and was_member) or (code > 0 and not registrar.begun):
            return True
        self._futile[worker] += 1
        self._failures[worker] += code > 0
        in_vain = self._futile[worker] - FUTILE
        if self._failures[worker] > FUTILE or (in_vain > 0 and not registrar.begun):
            return True
        pause = (
            min(LONGEST_PAUSE, AFTER_ERROR * 2 ** min(in_vain, 9)) if in_vain > 0 else AFTER_ERROR if code > 0 else 0.0
        )
        if stopping:
            return False
        if pause:
            LOGGER.warning("worker %d: %s; it is restarted in %g s", worker, how, pause)
            self._later[worker] = time.monotonic() + pause
        else:
            self._start_again(worker)
        return False

    def _start_again(self, worker: int) -> None:
        self._later.pop(worker, None)
        self._ended.discard(worker)
        self._crew.start_again(worker)

    def _end_newcomers(self) -> None:
        """Those that only wait to join would wait for ever."""
        for worker, process in self._crew.running().items():
            if worker not in self._registrar.training:
                self._crew.send(process, signal.SIGKILL)

    def _evict_silent(self) -> None:
        """End members that are stopped, or hang."""
        running, registrar = self._crew.running(), self._registrar
        pids = {worker: running[worker].pid for worker in registrar.members if worker in running}
        for worker, seconds in self._silence.find(pids, registrar.healthy, self._spec.timeout).items():
            self._evicted[worker] = seconds
            self._crew.send(running[worker], signal.SIGKILL)

    def _count_patience(self, *, stopping: bool) -> None:
        """If there are too few workers for too long, those that are left save, and stop."""
        if not self._registrar.short:
            self._short_since = None
            return
        if self._short_since is None:
            self._short_since = time.monotonic()
            LOGGER.warning("fewer than %d workers are left (--elastic %s): waiting up to %g s for others",
                           self._least, self._spec.elastic, self._spec.timeout)  # fmt: skip
        if stopping or time.monotonic() - self._short_since > self._spec.timeout:
            self._registrar.give_up()

    def _begin_anew(self, *, stopping: bool) -> bool:
        """All that had the state of the training have ended at once: start all from the last checkpoint."""
        crew = self._crew
        while running := crew.running():
            for process in running.values():  # again and again: one may not be forked yet
                crew.send(process, signal.SIGKILL)
            time.sleep(0.01)
        list(self._desk.messages())  # of the dead
        if stopping:
            return False
        position = self._go_back()
        if position is None:
            LOGGER.error("all workers have ended at once, and there is no checkpoint to go back to")
            return False
        self._returns = self._returns + 1 if position == self._start else 1
        if self._returns > MOST_RETURNS:
            LOGGER.error("all workers have ended again and again after step %d, of the last checkpoint", position.step)
            return False
        LOGGER.warning("all workers have ended at once: they restart from the checkpoint of step %d", position.step)
        self._start = position
        for kept in (self._later, self._futile, self._evicted, self._left):
            kept.clear()
        forbid_joining(crew.private)
        self._registrar = Registrar(crew.processes, self._least, self._registrar.number)
        for worker in crew.processes:
            self._start_again(worker)
        return True


def last_generation(folder: Path) -> int:
    """The number of the newest generation that the run has recorded: numbers never go back."""
    lines = (line for path in rank_files(folder) for line in read_sound_lines(path, Regrouped))
    return max((line.generation for line in lines if isinstance(line, Regrouped)), default=0)


class Silence:
    """Finds members that are stopped, and members that make no progress while others wait for them."""

    def __init__(self, desk: Desk) -> None:
        self._counters, self._seen = desk.counters, dict[int, tuple[int, float]]()
        self._stopped: dict[int, float] = {}  # since when
        self._looked = time.monotonic()

    def find(self, pids: Mapping[int, int | None], healthy: Collection[int], timeout: float) -> dict[int, float]:
        """The members to end, of these with their processes, each with the seconds of its silence.

        They are spared if no healthy one would be left, unless the silence exceeds the timeout.
        """
        now = time.monotonic()
        if now - self._looked > ABSENT_SECONDS:  # what this process has missed says nothing
            self._seen.clear()
            self._stopped.clear()
        self._looked = now
        silent, late = dict[int, float](), dict[int, float]()
        for worker, pid in pids.items():
            before, since = self._seen.setdefault(worker, (self._counters[worker], now))
            if self._counters[worker] != before:
                self._seen[worker] = self._counters[worker], now
            silent[worker] = now - since if self._counters[worker] == before else 0.0
            if silent[worker] > LOOK_AFTER and is_stopped(pid):
                since = self._stopped.setdefault(worker, now)
                if now - since > STOPPED_SECONDS:
                    late[worker] = silent[worker]
            else:
                self._stopped.pop(worker, None)
        if min(silent.values(), default=0.0) < timeout:  # otherwise nobody waits for them: the machine is slow
            late |= {worker: seconds for worker, seconds in silent.items() if seconds > timeout}
        for gone in self._seen.keys() - pids.keys():
            del self._seen[gone]
            self._stopped.pop(gone, None)
        left = set(healthy) - late.keys()
        return {worker: seconds for worker, seconds in late.items() if left or seconds > timeout}


def is_stopped(pid: int | None) -> bool:
    """Whether a process of this machine is stopped (SIGSTOP); false if that cannot be known."""
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"
    return False

"""The launcher's part in an elastic run: it says who takes part, starts lost workers again, and ends silent ones."""

from __future__ import annotations

import math
import signal
import time
from collections import Counter, deque
from collections.abc import Callable

from paceline.elastic.channel import LEFT, READY, Desk, Life
from paceline.elastic.membership import Registrar
from paceline.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from paceline.launch.diagnose import how_it_ended
from paceline.launch.spawn import Crew
from paceline.messages import LOGGER
from paceline.spec import RunSpec
from paceline.strategies.options import limits

# A worker that ends so often without having trained in between is started again after a pause, which grows; after so
# many errors of its own, the run has failed.
FUTILE, LONGEST_PAUSE = 3, 30.0
# After an error of its own, a worker is started again this much later: by then, it is known whether all have failed.
AFTER_ERROR = 1.0
# When a member has lost another one, this process is told of the end of that process sooner than after this time.
AFTER_LOSS = 1.0
# A worker that others wait for is taken for lost when it has not come further for this time, or for this many times the
# longest of the last steps, whichever is longer; and not before there were a few steps.
SILENT_SECONDS, SILENT_STEPS = 2.0, 10
FEW_STEPS, LAST_STEPS = 20, 200  # of all workers together
# If this process itself has not run for so long, it cannot tell who has.
ABSENT_SECONDS = 0.5


class ElasticCrew:
    """Supervises the workers of an elastic run. `go_back` prepares the folder for workers that begin anew from the last
    checkpoint; it returns false if there is none.
    """

    def __init__(self, crew: Crew, spec: RunSpec, go_back: Callable[[], bool]) -> None:
        assert spec.elastic is not None
        assert spec.workers is not None
        self._crew, self._spec, self._go_back = crew, spec, go_back
        self._least, _ = limits(spec.elastic)
        self._desk = Desk(crew.private, spec.workers)
        self._registrar = Registrar(range(spec.workers), self._least)
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
            return not self._begin_anew(stopping=stopping)
        self._count_patience(stopping=stopping)
        if time.monotonic() - self._left.get(registrar.number, math.inf) > AFTER_LOSS:
            registrar.repeat(registrar.number, "members have lost each other")
        while generation := registrar.due():
            LOGGER.debug("generation %d: workers %s: %s", generation.number, generation.members, generation.why)
            self._desk.announce(generation)
            self._silence.forget()
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
            how = f"it did not come further for {self._evicted.pop(worker):.1f} s, and was ended"
        registrar.ended(worker, how)
        if code in (EXIT_OK, EXIT_INTERRUPTED):
            return was_member or stopping
        if code == EXIT_USAGE or (code > 0 and not registrar.begun):
            return True
        self._futile[worker] += 1
        self._failures[worker] += code > 0
        in_vain = self._futile[worker] - FUTILE
        if self._failures[worker] > FUTILE or (in_vain > 0 and not registrar.begun):
            return True
        pause = min(LONGEST_PAUSE, AFTER_ERROR * 2**in_vain) if in_vain > 0 else AFTER_ERROR if code > 0 else 0.0
        if stopping:
            return False
        if pause:
            LOGGER.warning("worker %d: %s; it is started again in %g s", worker, how, pause)
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
            if worker not in self._registrar.members:
                self._crew.send(process, signal.SIGKILL)

    def _evict_silent(self) -> None:
        """End a member that stands still while others wait for it: it is stopped, or hangs."""
        for worker, seconds in self._silence.find(self._registrar.members, self._spec.timeout).items():
            if worker not in self._evicted and worker in self._crew.running():
                self._evicted[worker] = seconds
                self._crew.send(self._crew.processes[worker], signal.SIGKILL)

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
        if not self._go_back():
            LOGGER.error("all workers have ended at once, and there is no checkpoint to go back to")
            return False
        LOGGER.warning("all workers have ended at once: they begin anew from the last checkpoint")
        self._later.clear()
        self._registrar = Registrar(range(crew_size(crew)), self._least, self._registrar.number)
        for worker in range(crew_size(crew)):
            self._start_again(worker)
        return True


def crew_size(crew: Crew) -> int:
    return len(crew.processes)


class Silence:
    """Finds members that have not come further for so long that they must be stopped, or hang."""

    def __init__(self, desk: Desk) -> None:
        self._lives, self._seen = desk.lives, dict[int, tuple[Life, float, float]]()
        self._steps: deque[float] = deque(maxlen=LAST_STEPS)  # seconds of steps, waiting included
        self._looked = time.monotonic()

    def forget(self) -> None:
        """Other members, or another moment to count from."""
        self._seen.clear()

    def find(self, members: tuple[int, ...], timeout: float) -> dict[int, float]:
        """The silent ones, each with the seconds of its silence. They are never all."""
        now = time.monotonic()
        absent, self._looked = now - self._looked > ABSENT_SECONDS, now
        if absent:
            self.forget()
        silent = dict[int, float]()
        for worker in members:
            life = self._lives[worker]
            before, since, stepped = self._seen.setdefault(worker, (life, now, now))
            if life.steps != before.steps:
                self._steps.append(now - stepped)
                stepped = now
            if life != before:
                self._seen[worker] = life, now, stepped
            else:
                silent[worker] = now - since
        limit = max(SILENT_SECONDS, SILENT_STEPS * max(self._steps)) if len(self._steps) >= FEW_STEPS else timeout
        found = {worker: seconds for worker, seconds in silent.items()
                 if seconds > (timeout if self._lives[worker].slow else limit)}  # fmt: skip
        return found if len(silent) < len(members) else {}

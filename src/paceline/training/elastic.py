"""One worker's part in an elastic training: it goes on with whoever is there, from the state that is furthest.

member ── ready ──► registrar ── generation ──► connect → compare progress → who is behind takes the state of one
                                                 that is not → compare digests → train, until a rank is lost
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from paceline.checkpoint.carried import carry
from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.single import SingleComm
from paceline.comm.table import Transport
from paceline.comm.words import tell
from paceline.elastic.channel import Member
from paceline.elastic.membership import UNHEALTHY, Generation, Reached, choose_source
from paceline.errors import CommError, PacelineError
from paceline.messages import LOGGER
from paceline.run.records import Regrouped
from paceline.strategies.engine import REGROUP, Lockstep
from paceline.strategies.replicas import average_buffers, check_equal

if TYPE_CHECKING:
    from paceline.data.course import Course
    from paceline.training.driver import Driver
    from paceline.training.progress import Progress

RanksUp = Callable[[Mapping[int, int]], None]  # told the processes of all members, by worker


class Regroup(CommError):
    """All ranks leave this generation after the same step, because a worker joins."""


class Elastic:
    def __init__(self, folder: Path, worker: int, transport: Transport, timeout: float, ranks_up: RanksUp) -> None:
        """`folder` is where the registrar is, `ranks_up` is called on rank 0 of each generation."""
        self._folder, self._transport, self._timeout, self._ranks_up = folder, transport, timeout, ranks_up
        self._member = Member(folder, worker, timeout)
        self._generation: Generation | None = None
        self._healthy = False  # whether this worker has the state of the training
        self._comm: Comm = SingleComm(timeout)

    @property
    def last(self) -> bool:
        """Whether this training stops here, because there are too few workers."""
        return self._generation is not None and self._generation.last

    def alive(self) -> None:
        self._member.alive()

    def ask(self) -> int:
        """Before a step: what rank 0 asks of all ranks if there is a new generation."""
        self.alive()
        newest = self._member.newest
        news = newest is not None and newest is not self._generation
        return REGROUP if self._comm.rank == 0 and news else 0

    def train(self, driver: Driver, engine: Lockstep, course: Course, progress: Progress) -> None:
        """Train to the end, in one generation after the other."""
        self._member.ready()
        since, error = time.perf_counter(), CommError("this worker has lost nobody")
        while True:
            try:
                self._enter(driver, engine, course, progress, since, error)
                driver.go_on(engine, course, progress)
            except CommError as found:
                error, since = _without_frames(found), time.perf_counter()
                LOGGER.debug("worker %d leaves its generation: %s", self._member.worker, error)
                self._comm.close()
                progress.pause()
                if self._generation and not isinstance(error, Regroup):
                    self._member.left(self._generation)
            else:
                break
        self._comm.close()
        self._member.close()

    def _enter(
        self, driver: Driver, engine: Lockstep, course: Course, progress: Progress, since: float, error: CommError
    ) -> None:
        before = self._generation
        # The launcher makes another generation at once, or when it has lost patience with too few workers.
        generation = self._member.after(before.number, 2 * self._timeout + 10) if before else self._member.after(0)
        if generation is None:
            raise error
        self._generation = generation
        comm = MeteredComm(self._connect(generation))
        self._comm = comm
        self._healthy = self._healthy or self._member.fresh
        table = _share(progress.reached if self._healthy else UNHEALTHY, comm)
        source = choose_source(table)
        if source is None:
            raise PacelineError("no worker is left that has the state of the training")
        behind = [rank for rank, made in enumerate(table) if made < table[source]]
        if behind and comm.rank in (source, *behind):
            mine = driver.pack(engine, course, progress) if comm.rank == source else None
            state = carry(mine, comm.group([source, *behind]), self.alive)
            if mine is None:
                driver.adopt(state, engine, progress)
        known = engine.facts() if before and len(before.members) > 1 else {}  # alone, nothing has been found out
        facts = json.loads(tell(json.dumps(known | {"steps": progress.reached.steps}), comm, source))
        moments = (each.tensor for each in engine.hold_optimizer(own=False))
        check_equal(chain(engine.model.parameters(), moments), comm, progress.reached.steps, "state")
        # Running statistics of those that have trained; newcomers have those of the source.
        average_buffers(engine.model, comm, 0.0 if comm.rank in behind else 1 / (comm.size - len(behind)))
        lost = generation.at_once or bool(before and set(before.members) - set(generation.members))
        driver.regroup(engine, comm, facts, lost=lost)
        self._healthy = True
        self._tell_processes(generation.members, comm)
        self._member.entered(generation)
        self._record(driver, generation, before.members if before else (), time.perf_counter() - since)

    def _connect(self, generation: Generation) -> Comm:
        if len(generation.members) == 1:
            alone = SingleComm(self._timeout)
            alone.numbers = generation.members
            return alone
        return self._transport.connect_generation(
            self._folder,
            generation,
            self._member.worker,
            self._timeout,
            lambda: self._member.left_by(generation.number),
        )

    def _tell_processes(self, members: Sequence[int], comm: Comm) -> None:
        pids = torch.zeros(comm.size, dtype=torch.int64)
        pids[comm.rank] = os.getpid()
        comm.allreduce(pids)
        if comm.rank == 0:
            self._ranks_up(dict(zip(members, pids.tolist(), strict=True)))

    def _record(self, driver: Driver, generation: Generation, before: Sequence[int], seconds: float) -> None:
        job, members = driver.job, generation.members
        lost, joined = (tuple(sorted(set(a) - set(b))) for a, b in ((before, members), (members, before)))
        job.recorder.write(Regrouped(generation.number, members, job.summary.steps, time.time(), seconds,
                                     generation.why, lost, joined))  # fmt: skip
        if not generation.fresh:
            job.console.line(
                f"Generation {generation.number}, {generation.why}: {len(members)} of {job.spec.workers} workers go on "
                f"after step {job.summary.steps}",
                always=True,
            )


def _without_frames(error: CommError) -> CommError:
    """The error alone: its frames would keep the memory of the earlier generation."""
    error.__context__ = None
    return error.with_traceback(None)


def _share(mine: Reached, comm: Comm) -> list[Reached]:
    """The progress of all ranks."""
    table = torch.zeros(comm.size, len(mine), dtype=torch.int64)
    table[comm.rank] = torch.tensor(mine)
    comm.allreduce(table.view(-1))
    return [Reached(*row) for row in table.tolist()]

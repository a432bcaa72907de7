"""Steps with parameter servers, event by event: workers push chunks of gradients, servers answer with new weights."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial

import numpy as np

from paceline.predict.fluid import Delay, Done, Process
from paceline.predict.network import Network
from paceline.predict.steps import Array, Case
from paceline.server.layout import CHUNK_BYTES, Layout

MOST_WORKERS, SOME_WORKERS = 16, 8  # that are simulated: all if they are few, otherwise so many
UPDATES, WARM_UP = 8, 2  # of each worker, in a simulation; the first do not count
SEQUENCES = 2  # of compute times that are simulated
# Messages are simulated one by one if a server has at most twice as many chunks. With more, messages are put together;
# the time that this adds is proportional to their size, and so known from two sizes.
FEW_CHUNKS = 6


def served(case: Case) -> Array:
    """Workers wait for all. Many are taken to begin their exchange together, when the slowest has computed."""
    workers, slowest = _workers(case), case.compute.slowest()
    if workers > MOST_WORKERS:
        return slowest + _together(case, workers) + case.overhead
    found: Array = _mean_round(case, 0) + (slowest - np.median(slowest)) + case.overhead
    return found


def unsynchronised(case: Case) -> Array:
    """Workers do not wait for each other, or only for those that are too far behind: the mean time of an update.

    An update is of one worker, or of all of them if staleness is bounded. Many workers keep the server busy: then an
    update takes as long as the server needs for it; otherwise they wait no longer than some do.
    """
    staleness, workers = case.options.get("staleness"), _workers(case)
    if workers <= MOST_WORKERS:
        whole = _mean_round(case, staleness)
    else:
        some, whole = _with(case, SOME_WORKERS), _together(case, workers)
        if whole < float(np.median(case.compute.slowest())) + _together(case, SOME_WORKERS):
            whole = max(whole, _mean_round(some, staleness))
    mean = (whole + case.overhead) / (1 if staleness is not None else workers)
    return np.full(len(case.compute.slowest()), mean)


def _mean_round(case: Case, staleness: int | None) -> float:
    """The mean time from one update of a worker to its next, over some sequences of compute times."""
    workers = _workers(case)
    drawn = case.compute(UPDATES, workers)[:SEQUENCES].copy()
    if staleness is None:  # workers that begin together would go on in step, which real ones do not
        drawn[:, 0] *= 1 + np.arange(workers) / workers
    varies = np.ptp(drawn[:, 1:]) > 1e-9 and len(drawn) > 1
    return float(np.mean([_exchanged(case, staleness, times) for times in drawn[: None if varies else 1]]))


def _together(case: Case, workers: int) -> float:
    """An exchange that all workers begin together. Each worker beyond some adds the same."""
    if workers <= MOST_WORKERS:
        return _exchanged(_with(case, workers), 0, np.zeros((1, workers)))
    half, whole = (_together(case, each) for each in (SOME_WORKERS // 2, SOME_WORKERS))
    return whole + (workers - SOME_WORKERS) * (whole - half) / (SOME_WORKERS - SOME_WORKERS // 2)


def _exchanged(case: Case, staleness: int | None, times: Array) -> float:
    """Seconds from one update of a worker to its next."""
    options, state, itemsize = case.options, case.anatomy.state, case.anatomy.itemsize
    whole = Layout(state, state, options["servers"], itemsize, CHUNK_BYTES // options["shrink"])
    chunks = whole.chunks / whole.servers
    if chunks <= 2 * FEW_CHUNKS:
        return Exchange(case, staleness, times, whole).run()
    some, more = (
        Exchange(case, staleness, times, replace(whole, chunk_bytes=-(-state * itemsize // (each * whole.servers))),
                 whole.chunks / each / whole.servers).run()
        for each in (FEW_CHUNKS, 2 * FEW_CHUNKS)
    )  # fmt: skip
    return more - (some - more) * (1 - 2 * FEW_CHUNKS / chunks)


def _workers(case: Case) -> int:
    return int(case.options["workers"])


def _with(case: Case, workers: int) -> Case:
    places = case.places[: case.options["servers"] + workers]
    cluster = case.cluster.first(max(places) + 1)
    return replace(case, options=case.options | {"workers": workers}, places=places, cluster=cluster)


class Exchange:
    """Servers and workers for some updates. `staleness` None: a worker goes on with whatever weights there are."""

    def __init__(
        self, case: Case, staleness: int | None, compute: Array, layout: Layout, messages: float = 1.0
    ) -> None:
        """A chunk of the layout is sent as this many messages."""
        self.workers, self.servers, self.staleness = _workers(case), layout.servers, staleness
        self.times, self.layout = compute, layout
        self.costs = replace(case.costs, message=case.costs.message * messages)
        between = [(self.servers + worker, server) for worker in range(self.workers) for server in range(self.servers)]
        self.network = Network(case.cluster, case.places, self.costs, [*between, *((to, who) for who, to in between)])
        self.fluid = self.network.fluid
        self._boxes: list[deque[tuple[int, int, int]]] = [deque() for _ in range(self.servers)]
        self._mail = [Done() for _ in range(self.servers)]
        self._answers: dict[tuple[int, int, int], Done] = {}  # by worker, update and chunk
        self._ends: list[list[float]] = [[] for _ in range(self.workers)]

    def run(self) -> float:
        """Seconds from one update of a worker to its next."""
        for worker in range(self.workers):
            self.fluid.start(self._work(worker))
        for server in range(self.servers):
            self.fluid.start(self._serve(server))
        self.fluid.run()
        rounds = len(self.times)
        if rounds == 1:
            return max(ends[0] for ends in self._ends)
        skip = min(WARM_UP, rounds // 2)
        rates = [(rounds - skip) / (ends[-1] - ends[skip - 1]) for ends in self._ends]
        return len(rates) / sum(rates)

    def _work(self, worker: int) -> Process:
        rank, layout = self.servers + worker, self.layout
        for update, seconds in enumerate(self.times[:, worker]):
            yield Delay(float(seconds))
            answers = []
            for chunk in range(layout.chunks):
                yield self.network.compute(rank, self.costs.message)
                server, size = layout.server_of(chunk), len(layout.span(chunk)) * layout.itemsize
                answered = Done()
                answers.append(answered)
                self._answers[worker, update, chunk] = answered
                self.network.send(rank, server, size, partial(self._post, server, (worker, update, chunk)))
            for answered in answers:
                yield answered
            self._ends[worker].append(self.fluid.now)

    def _post(self, server: int, message: tuple[int, int, int]) -> None:
        self._boxes[server].append(message)
        if self._mail[server].at is None:
            self.fluid.set(self._mail[server])

    def _serve(self, server: int) -> Process:
        layout, box = self.layout, self._boxes[server]
        expected = len(layout.of_server(server)) * self.workers * len(self.times)
        parts: dict[tuple[int, int], int] = {}  # of each update and chunk: how many have arrived
        versions = dict.fromkeys(layout.of_server(server), 0)
        waiting: dict[int, list[tuple[int, int, int]]] = {chunk: [] for chunk in versions}  # want, worker, update
        for _ in range(expected):
            if not box:
                self._mail[server] = Done()
                yield self._mail[server]
            worker, update, chunk = box.popleft()
            size = len(layout.span(chunk)) * layout.itemsize
            yield self.network.compute(server, self.costs.message + self.costs.add * size)
            if self.staleness is None:
                versions[chunk] += 1
                ready = [(worker, update)]
                yield self.network.compute(server, self.costs.update * size)
            else:
                parts[update, chunk] = parts.get((update, chunk), 0) + 1
                waiting[chunk].append((max(0, update + 1 - self.staleness), worker, update))
                if parts[update, chunk] == self.workers:
                    versions[chunk] += 1
                    yield self.network.compute(server, self.costs.update * size)
                ready = [(who, which) for want, who, which in waiting[chunk] if want <= versions[chunk]]
                waiting[chunk] = [each for each in waiting[chunk] if each[0] > versions[chunk]]
            for who, which in ready:
                yield self.network.compute(server, self.costs.message)
                answered = self._answers.pop((who, which, chunk))
                self.network.send(server, self.servers + who, size, partial(self.fluid.set, answered))

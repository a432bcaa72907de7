"""Steps with parameter servers, event by event: workers push chunks of gradients, servers answer with new weights."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from functools import partial
from itertools import count
from statistics import NormalDist

import numpy as np

from paceline.predict.fluid import Delay, Done, Process
from paceline.predict.network import Network
from paceline.predict.steps import Array, Case
from paceline.server.layout import Layout

MOST_WORKERS, SOME_WORKERS = 16, 8  # that are simulated: all if they are few, otherwise so many
UPDATES, FEWEST, WARM_UP = 48, 8, 2  # of all workers, and of each at least, in a simulation; the first do not count
SEQUENCES = 2  # of compute times, one after the other
SHUFFLES = 2  # of who has which part of a link
MOST_UPDATES = 4  # times as many are made by all workers while a slow one makes its own
LASTING = 0.15  # part of the variance between connections that is the same in all updates
# Messages are simulated one by one if a server has few chunks. With more than twice as many, messages are put together;
# the time that this adds is proportional to their size, and so known from two sizes. Where workers do not wait for each
# other, a small difference may change the order of everything after it, so that two sizes cannot be compared: there is
# one simulation, with many chunks.
FEW_CHUNKS = 6
MANY_CHUNKS = 16


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
    staleness, workers, draws = case.options.get("staleness"), _workers(case), len(case.compute.slowest())
    if workers <= MOST_WORKERS:
        found = _mean_rounds(case, staleness)
    else:
        some, found = _with(case, SOME_WORKERS), np.array([_together(case, workers)])
        if found[0] < float(np.median(case.compute.slowest())) + _together(case, SOME_WORKERS):
            found = np.maximum(found, _mean_rounds(some, staleness))
    means: Array = (found + case.overhead) / (1 if staleness is not None else workers)
    return np.resize(means, draws)


def _mean_rounds(case: Case, staleness: int | None) -> Array:
    """The mean time from one update of a worker to its next. If staleness is bounded, it depends on which worker has
    the smallest part of the server's link: some of the possible values.
    """
    return np.array([_mean_round(case, staleness, shuffle) for shuffle in range(SHUFFLES if staleness else 1)])


def _mean_round(case: Case, staleness: int | None, shuffle: int = 0) -> float:
    """The mean time from one update of a worker to its next."""
    workers = _workers(case)
    updates = max(FEWEST * (2 if staleness else 1), UPDATES // workers)
    drawn = case.compute(-(-updates // SEQUENCES), workers)
    times = drawn[np.arange(SEQUENCES) % len(drawn)]
    return _exchanged(case, staleness, times.reshape(-1, workers), shuffle)


def _together(case: Case, workers: int) -> float:
    """An exchange that all workers begin together. Each worker beyond some adds the same."""
    if workers <= MOST_WORKERS:
        return _exchanged(_with(case, workers), 0, np.zeros((1, workers)))
    half, whole = (_together(case, each) for each in (SOME_WORKERS // 2, SOME_WORKERS))
    return whole + (workers - SOME_WORKERS) * (whole - half) / (SOME_WORKERS - SOME_WORKERS // 2)


def _exchanged(case: Case, staleness: int | None, times: Array, shuffle: int = 0) -> float:
    """Seconds from one update of a worker to its next."""
    whole = case.anatomy.on_servers(case.options)
    chunks = whole.chunks / whole.servers

    def with_chunks(count: int) -> float:
        """With so many chunks on each server, each of which is sent as several messages."""
        layout = replace(whole, chunk_bytes=-(-whole.length * whole.itemsize // (count * whole.servers)))
        return Exchange(case, staleness, times, layout, chunks / count, shuffle).run()

    if chunks <= (2 * FEW_CHUNKS if staleness == 0 else MANY_CHUNKS):
        return Exchange(case, staleness, times, whole, 1.0, shuffle).run()
    if staleness != 0:
        return with_chunks(MANY_CHUNKS)
    some, more = with_chunks(FEW_CHUNKS), with_chunks(2 * FEW_CHUNKS)
    return more - (some - more) * (1 - 2 * FEW_CHUNKS / chunks)


def _workers(case: Case) -> int:
    return int(case.options["workers"])


def _with(case: Case, workers: int) -> Case:
    places = case.places[: case.options["servers"] + workers]
    cluster = case.cluster.first(max(places) + 1)
    return replace(case, options=case.options | {"workers": workers}, places=places, cluster=cluster)


class Exchange:
    """Servers and workers, until each worker has made some updates; faster ones go on meanwhile.

    `staleness` None: a worker goes on with whatever weights there are.
    """

    def __init__(
        self, case: Case, staleness: int | None, compute: Array, layout: Layout, messages: float, shuffle: int
    ) -> None:
        """A chunk of the layout is sent as this many messages. Who has which part of a link is shuffled by number."""
        self.workers, self.servers, self.staleness = _workers(case), layout.servers, staleness
        self.times, self.layout = compute, layout
        self.costs = replace(case.costs, message=case.costs.message * messages)
        self.weights = self._weights(shuffle)
        between = [(self.servers + worker, server) for worker in range(self.workers) for server in range(self.servers)]
        self.network = Network(case.cluster, case.places, self.costs, [*between, *((to, who) for who, to in between)])
        self.fluid = self.network.fluid
        self._boxes: list[deque[tuple[int, int, int]]] = [deque() for _ in range(self.servers)]
        self._mail = [Done() for _ in range(self.servers)]
        self._answers: dict[tuple[int, int, int], Done] = {}  # by worker, update and chunk
        self._ends: list[list[float]] = [[] for _ in range(self.workers)]
        self._behind, self._made, self._over = self.workers, 0, Done()  # workers that have not made all updates yet

    def run(self) -> float:
        """Seconds from one update of a worker to its next."""
        for worker in range(self.workers):
            self.fluid.start(self._work(worker))
        for server in range(self.servers):
            self.fluid.start(self._serve(server))
        end, rounds = self.fluid.run(self._over), len(self.times)
        if rounds == 1:
            return end
        # While all workers are at work: those that are alone at the end would be faster.
        skip = min(WARM_UP + (self.staleness or 0), rounds // 2)  # at first, nobody is too far behind
        first, last = max(ends[skip - 1] for ends in self._ends), min(ends[-1] for ends in self._ends)
        made = sum(float(np.diff(np.interp([first, last], ends, range(len(ends))))[0]) for ends in self._ends)
        return self.workers * (last - first) / made

    def _weights(self, shuffle: int) -> Array:
        """Of connections, by update, server and worker. They are unequal, as those of TCP are, and partly in the same
        way in all updates.
        """
        dice = np.random.default_rng([self.workers, shuffle])
        spread = [NormalDist().inv_cdf((number + 0.5) / self.workers) for number in range(self.workers)]
        shape = len(self.times), self.servers, self.workers
        lasting, varying = (dice.permuted(np.broadcast_to(spread, each), axis=-1) for each in (shape[1:], shape))
        logs: Array = self.costs.unfairness * (LASTING**0.5 * lasting + (1 - LASTING) ** 0.5 * varying)
        return np.exp(logs)

    def _work(self, worker: int) -> Process:
        rank, layout, rounds = self.servers + worker, self.layout, len(self.times)
        if self.staleness is None:  # workers that begin together would go on in step, which real ones do not
            yield Delay(float(self.times[0, worker]) * worker / self.workers)
        for update in count():
            yield Delay(float(self.times[update % rounds, worker]))
            answers = []
            for chunk in range(layout.chunks):
                yield self.network.compute(rank, self.costs.message)
                server, size = layout.server_of(chunk), len(layout.span(chunk)) * layout.itemsize
                answered = Done()
                answers.append(answered)
                self._answers[worker, update, chunk] = answered
                arrived = partial(self._post, server, (worker, update, chunk))
                self.network.send(rank, server, size, arrived, float(self.weights[update % rounds, server, worker]))
            for answered in answers:
                yield answered
            self._ends[worker].append(self.fluid.now)
            self._made += 1
            self._behind -= update + 1 == rounds
            if self._over.at is None and (not self._behind or self._enough()):
                self.fluid.set(self._over)

    def _enough(self) -> bool:
        """Whether others have made so many updates that a slow worker need not make all of its own."""
        return self._made >= MOST_UPDATES * self.workers * len(self.times) and all(
            len(ends) > WARM_UP + (self.staleness or 0) for ends in self._ends
        )

    def _post(self, server: int, message: tuple[int, int, int]) -> None:
        self._boxes[server].append(message)
        if self._mail[server].at is None:
            self.fluid.set(self._mail[server])

    def _serve(self, server: int) -> Process:
        layout, box = self.layout, self._boxes[server]
        parts: dict[tuple[int, int], int] = {}  # of each update and chunk: how many have arrived
        versions = dict.fromkeys(layout.of_server(server), 0)
        waiting: dict[int, list[tuple[int, int, int]]] = {chunk: [] for chunk in versions}  # want, worker, update
        while True:
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

"""The cause that is made to dominate is the one that is named, with the seconds that arithmetic says."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from paceline.predict.anatomy import Anatomy
from paceline.predict.cluster import Cluster, Machine
from paceline.predict.limits import COMPUTE, CORES, LATENCY, LINK, SERVER, SLOWEST, limit_of
from paceline.predict.network import MEMORY, Costs
from paceline.predict.steps import Array, Case
from paceline.server.layout import Layout

RATE = 1e8
VALUES = 6_000_000  # of the model, in one bucket
MODEL = Anatomy((VALUES,), (1.0,))
BYTES = 4 * VALUES


@dataclass(frozen=True)
class Drawn:
    """The compute times of workers, a row for each draw."""

    times: Array

    def __call__(self, steps: int, workers: int | None = None, mean_of: int = 1) -> Array:
        return np.repeat(self.times[:, None, :workers], steps, axis=1)

    def slowest(self, mean_of: int = 1) -> Array:
        slowest: Array = self.times.max(axis=1)
        return slowest


def case(
    strategy: str, workers: int, *, compute: float = 1e-6, rate: float = RATE, speeds: Any = None, **costs: float
) -> Case:
    servers = int(strategy.startswith("ps"))
    ranks = workers + servers
    paces = [1.0] * servers + list(speeds or [1.0] * workers)
    nodes = tuple(Machine(rate, rate, pace, host=host) for host, pace in enumerate(paces))
    options = {"strategy": strategy, "averaging": "ring", "bucket_mb": 100.0, "shrink": 1, "overlap": "on",
               "workers": workers, "servers": servers, "accumulate": 1, "sync_every": 1}  # fmt: skip

    draw = Drawn(np.array([[compute / pace for pace in paces[servers:]]]))
    return Case(options, MODEL, Cluster(nodes), tuple(range(ranks)), draw, Costs(**costs))


def ring_seconds(workers: int, rate: float) -> float:
    """2 (N-1) messages of an N-th of the model."""
    return 2 * (workers - 1) / workers * BYTES / rate


def test_the_link_of_a_ring() -> None:
    said = limit_of(case("ring", 4), 1e-6)
    assert said.cause == LINK
    assert said.seconds == pytest.approx(ring_seconds(4, RATE) - ring_seconds(4, MEMORY), rel=1e-3)


def test_a_link_is_not_made_faster_than_memory_nor_slower_than_it_is() -> None:
    assert limit_of(case("ring", 4, rate=MEMORY), 1e-6).saved[LINK] == pytest.approx(0.0, abs=1e-9)
    assert limit_of(case("ring", 4, rate=3 * MEMORY), 1e-6).saved[LINK] == pytest.approx(0.0, abs=1e-9)


def test_compute() -> None:
    said = limit_of(case("ring", 4, compute=50.0), 50.0)
    assert said.cause == COMPUTE
    assert said.seconds == pytest.approx(50.0)
    alone = limit_of(case("sequential", 1, compute=0.3), 0.3)
    assert alone.cause == COMPUTE
    assert alone.seconds == pytest.approx(0.3)


def test_messages() -> None:
    """Each of 2 (N-1) messages, which are too small for several pieces, is handled on two ranks, and arrives later."""
    small = replace(case("ring", 4, message=0.1, latency=0.3), anatomy=Anatomy((4000,), (1.0,)))
    said = limit_of(small, 1e-6)
    assert said.cause == LATENCY
    assert said.seconds == pytest.approx(6 * (2 * 0.1 + 0.3), rel=1e-3)


def test_processor_time_of_bytes_and_of_sums() -> None:
    bytes_ = limit_of(case("ring", 4, byte=1e-6), 1e-6)
    assert bytes_.cause == CORES
    assert bytes_.seconds == pytest.approx(ring_seconds(4, 1e6) - ring_seconds(4, RATE), rel=1e-3)
    sums = limit_of(case("ring", 4, add=1e-6), 1e-6)
    assert sums.cause == CORES
    assert sums.seconds == pytest.approx(ring_seconds(4, 1e6) / 2, rel=0.02)


def test_cores_that_ranks_share() -> None:
    """Eight ranks on one host whose single core handles every byte twice."""
    shared = case("ring", 8, rate=1e12, byte=1e-7)
    nodes = tuple(replace(node, host=0) for node in shared.cluster.nodes)
    said = limit_of(replace(shared, cluster=Cluster(nodes, cores=1.0)), 1e-6)
    assert said.cause == CORES
    assert said.seconds == pytest.approx(8 * ring_seconds(8, 1e12) * 1e12 * 2e-7, rel=0.02)


def test_one_node_that_is_slower_than_the_others() -> None:
    """It takes 40 s, the others 1 s; with the mean of both, a step is 29.25 s shorter. No computing saves more."""
    slow = case("ring", 4, compute=1.0, speeds=[1.0, 1.0, 1.0, 0.025])
    said = limit_of(slow, 1.0)
    assert said.saved[SLOWEST] == pytest.approx(40 - 10.75)
    assert said.cause == COMPUTE
    assert said.saved[COMPUTE] == pytest.approx(40)


def test_noise_makes_workers_wait_for_the_slowest() -> None:
    """In each step another one takes 10 times as long."""
    quiet = case("ring", 4, compute=0.1)

    times = np.full((40, 4), 0.1)
    times[np.arange(40), np.arange(40) % 4] = 4.0
    draw = Drawn(times)
    said = limit_of(replace(quiet, compute=draw), 0.1)
    assert said.cause == SLOWEST
    assert said.seconds == pytest.approx(3.9, rel=0.01)
    assert limit_of(replace(quiet, compute=draw), 0.1, noise=False).cause == LINK


@pytest.mark.parametrize("strategy", ["ps-sync", "ps-async"])
def test_a_server_whose_link_all_workers_share(strategy: str) -> None:
    """Its link carries the gradients of all workers, and in the end the last chunk to all; theirs carry one each."""
    said = limit_of(case(strategy, 8), 1e-6)
    assert said.cause == SERVER
    if strategy == "ps-sync":
        layout = Layout(VALUES, VALUES, 1, 4)
        last = 4 * len(layout.span(layout.chunks - 1))
        assert said.seconds == pytest.approx(7 * (BYTES + last) / RATE, rel=0.02)


def test_connections_with_unequal_parts_of_a_link_are_not_slow_nodes() -> None:
    said = limit_of(case("ps-sync", 8, unfairness=0.35), 1e-6)
    assert said.cause == SERVER
    assert said.saved[SLOWEST] == pytest.approx(0, abs=1e-6)


def test_a_server_with_much_work_for_each_update() -> None:
    said = limit_of(case("ps-sync", 2, update=1e-5), 1e-6)
    assert said.cause == SERVER
    assert said.seconds == pytest.approx(BYTES * 1e-5, rel=0.02)


def test_the_link_of_a_worker_that_has_the_server_for_itself() -> None:
    """Both links are as slow: without the server's, the worker's still limits."""
    assert limit_of(case("ps-sync", 1), 1e-6).cause == LINK

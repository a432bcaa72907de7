"""Steps of strategies: buckets are those of real training, servers send what cost() says, noise takes the slowest."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import norm

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.single import SingleComm
from paceline.emulation.standin import StandIn
from paceline.models.build import build
from paceline.predict.anatomy import Anatomy, anatomy_of
from paceline.predict.cluster import Cluster, Machine
from paceline.predict.collective import Group, seconds
from paceline.predict.network import Costs
from paceline.predict.served import served, unsynchronised
from paceline.predict.steps import Array, Case, averaged, local
from paceline.server.layout import Layout
from paceline.server.layout import cost as served_cost
from paceline.spec import resolve
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.emulated import bucket_times
from paceline.strategies.synchronous import RIDERS

RATE = 1e8
SMALL = Anatomy((3_000_000, 1_200_000, 4_000_000), (1.0, 0.7, 0.5))


@dataclass
class Given:
    """Compute times that are given: draws × steps × workers."""

    times: Array

    def __call__(self, steps: int, workers: int | None = None, mean_of: int = 1) -> Array:
        return np.broadcast_to(self.times, (len(self.times), steps, self.times.shape[2]))[:, :, :workers]

    def slowest(self, mean_of: int = 1) -> Array:
        slowest: Array = self.times[:, 0].max(axis=1)
        return slowest


def constant(*values: float) -> Given:
    """The time of each worker."""
    return Given(np.array([[values]]))


def case(workers: int, compute: Any, *, servers: int = 0, costs: Costs = Costs(), **options: Any) -> Case:  # noqa: B008
    ranks = workers + servers
    nodes = tuple(Machine(RATE, RATE, host=host) for host in range(ranks))
    known = {
        "averaging": "ring",
        "bucket_mb": 4.0,
        "shrink": 1,
        "overlap": "on",
        "workers": workers,
        "servers": servers,
        "accumulate": 1,
    }
    return Case(known | options, SMALL, Cluster(nodes), tuple(range(ranks)), compute, costs)


@pytest.mark.parametrize(("model", "shrink"), [("mnist-cnn", 1), ("resnet18", 1), ("resnet18", 7)])
def test_buckets_are_those_of_a_training(model: str, shrink: int) -> None:
    spec = resolve(("test", {"model": model, "data": "mnist-mini"})).spec
    anatomy = anatomy_of(spec).shrunk(shrink)
    real: torch.nn.Module = build(model, (1, 28, 28), 10)
    if shrink > 1:
        real = StandIn(real, shrink)
    limit = int(4.0 / shrink * 2**20)
    made = GradientBuckets(real, SingleComm(), AVERAGINGS["ring"], limit, RIDERS)
    lengths, times = anatomy.buckets(limit)
    assert list(lengths) == [len(bucket.flat) for bucket in made.buckets]
    assert times[:-1] == pytest.approx(bucket_times(made, anatomy.ready)[:-1])
    assert anatomy.state == sum(t.numel() for t in (*real.parameters(), *real.buffers()))


def test_a_bucket_waits_for_its_gradients_and_for_the_bucket_before_it() -> None:
    group = case(4, constant(*[0.0] * 4)).group
    lengths, times = SMALL.buckets(4 * 2**20)
    assert len(lengths) == 3
    first, second, third = (seconds("ring", group, length) for length in lengths)
    # Computing is short: the sums follow each other.
    (short,) = averaged(case(4, constant(*[1e-3] * 4)))
    assert short == pytest.approx(1e-3 * times[0] + first + second + third)
    # Computing is long: only the last bucket is not hidden.
    (long,) = averaged(case(4, constant(*[100.0] * 4)))
    assert long == pytest.approx(100.0 + third)
    (apart,) = averaged(case(4, constant(*[100.0] * 4), overlap="off"))
    assert apart == pytest.approx(100.0 + first + second + third)


def test_ranks_that_have_all_sums_early_go_on_early() -> None:
    """Rank 0 of a gather serves one rank after another: the first one computes and sends while others still receive."""
    size, compute = 20_000, 0.0005
    plain = case(6, constant(*[compute] * 6), averaging="gather", bucket_mb=64.0)
    one = replace(plain, anatomy=Anatomy((size,), (1.0,)))
    (step,) = averaged(one)
    alone = compute + seconds("gather", one.group, size)
    assert compute + size * 4 * 5 / RATE < step < 0.9 * alone
    (ring,) = averaged(replace(one, options=one.options | {"averaging": "ring"}))
    assert ring == pytest.approx(compute + seconds("ring", one.group, size), rel=0.01)  # nobody is early
    # Of long messages the kernel keeps only the ends: rank 0 goes on when all others have nearly everything.
    (step,) = averaged(replace(plain, anatomy=Anatomy((1_000_000,), (1.0,))))
    assert step == pytest.approx(compute + seconds("gather", one.group, 1_000_000), rel=0.05)


def test_only_the_last_of_accumulated_backwards_sends() -> None:
    lengths, times = SMALL.buckets(4 * 2**20)
    end = 0.0
    for length, ready in zip(lengths, times, strict=True):
        end = max(end, 0.75 + ready / 4) + seconds("ring", case(4, constant(*[0.0] * 4)).group, length)
    assert averaged(case(4, constant(*[1.0] * 4), accumulate=4)) == pytest.approx([end])


def test_a_synchronous_step_takes_as_long_as_the_slowest_of_its_workers() -> None:
    """The expected maximum of n normal variables, by SciPy."""
    compute = Given(10 + np.random.default_rng(0).standard_normal((20_000, 1, 8)))
    largest = norm.expect(lambda x: 8 * x * norm.cdf(x) ** 7)
    last = seconds("ring", case(8, compute).group, SMALL.buckets(4 * 2**20)[0][-1])
    assert averaged(case(8, compute)).mean() == pytest.approx(10 + largest + last, rel=2e-3)


def test_local_steps_average_only_sometimes() -> None:
    group = case(4, constant(*[0.0] * 4)).group
    (step,) = local(case(4, constant(*[0.5] * 4), sync_every=5))
    assert step == pytest.approx(0.5 + seconds("ring", group, 8_200_004) / 5)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("servers", [1, 2])
def test_a_synchronous_server_takes_as_long_as_its_link(workers: int, servers: int) -> None:
    """Without other costs: it receives while it sends, one chunk later."""
    (step,) = served(case(workers, constant(*[0.25] * workers), servers=servers))
    layout = Layout(SMALL.state, SMALL.state, servers, 4)
    busiest = max(served_cost(workers, layout).bytes_received) / RATE
    chunk = len(layout.span(0)) * 4 / RATE
    assert busiest < step - 0.25 <= busiest + 2 * workers * chunk


def test_workers_of_an_asynchronous_server_do_not_wait_for_a_slow_one() -> None:
    compute = constant(1.0, 1.0, 10.0)
    (step,) = unsynchronised(case(3, compute, servers=1))
    sync = served(case(3, compute, servers=1))[0]
    assert 1 / 2.1 * 0.9 < step < 1.0 < sync / 3
    (bounded,) = unsynchronised(case(3, compute, servers=1, staleness=0))
    assert bounded == pytest.approx(sync, rel=0.02)


def test_connections_with_unequal_parts_of_a_link_hold_up_only_workers_that_wait_for_each_other() -> None:
    fair, unfair = Costs(), Costs(unfairness=0.5)
    sync = [served(case(6, constant(*[0.1] * 6), servers=1, costs=costs))[0] for costs in (fair, unfair)]
    apart = [unsynchronised(case(6, constant(*[0.1] * 6), servers=1, costs=costs))[0] for costs in (fair, unfair)]
    assert sync[1] > 1.1 * sync[0]
    assert apart == pytest.approx([SMALL.state * 4 / RATE] * 2, rel=0.02)  # its link is busy all the time


def test_a_simulation_does_not_wait_long_for_a_worker_that_is_much_slower() -> None:
    (step,) = unsynchronised(case(4, constant(1.0, 1.0, 1.0, 60.0), servers=1))
    least, most = (3 / (1 + part * SMALL.state * 4 / RATE) + 1 / 60 for part in (2, 1))  # updates in a second
    assert 1 / most < step < 1 / least


def test_costs_of_one_rank_are_nothing() -> None:
    assert seconds("ring", Group(Cluster((Machine(RATE, RATE),)), (0,), Costs(message=1.0)), 1000) == 0.0


def test_communication_slows_computing_down_while_it_is_hidden() -> None:
    """Computing is long enough to hide all buckets but the last: it takes so much longer as these take."""
    lengths, _ = SMALL.buckets(4 * 2**20)
    base = case(4, constant(*[100.0] * 4))
    first, second, third = (seconds("ring", base.group, length) for length in lengths)
    (slower,) = averaged(replace(base, slowdown=0.5))
    assert slower == pytest.approx(100.0 + 0.5 * (first + second) + third, rel=1e-6)
    (apart,) = averaged(replace(case(4, constant(*[100.0] * 4), overlap="off"), slowdown=0.5))
    assert apart == pytest.approx(100.0 + first + second + third)

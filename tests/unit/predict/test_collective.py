"""Simulated collectives take as long as their bytes need; what is computed for many ranks agrees with them."""

from __future__ import annotations

from math import ceil, log2

import pytest

from paceline.collectives.choose import TABLE
from paceline.collectives.plan import PIECE, Growth
from paceline.predict.cluster import Cluster, Machine, alike
from paceline.predict.collective import Group, computed, seconds, simulated
from paceline.predict.network import Costs
from paceline.predict.stars import Rank

RATE = 1e8  # bytes/s
FREE, DEAR = Costs(), Costs(message=2e-4, add=2e-10, byte=1e-9, latency=1e-4)


def group(ranks: int, costs: Costs = FREE) -> Group:
    nodes = tuple(Machine(RATE, RATE, host=host) for host in range(ranks))
    return Group(Cluster(nodes, cores=4), tuple(range(ranks)), costs)


@pytest.mark.parametrize("averaging", TABLE)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_without_noise_and_other_costs_a_collective_takes_as_long_as_its_largest_link(
    averaging: str, ranks: int
) -> None:
    """By cost(): the rank that sends or receives most. The root of a tree, and rank 0 of a gather, first receive, then
    send. A tree also waits for the levels below, piece by piece.
    """
    length = 2520 * 4096
    cost = TABLE[averaging].cost(ranks, length)
    most = max(*cost.bytes_sent, *cost.bytes_received) / RATE
    found, growth = simulated(averaging, group(ranks), (length,), (0.0,), 4), TABLE[averaging].growth
    if growth is Growth.CYCLE:  # the native one's cost is the payload
        assert found == pytest.approx(2 * (ranks - 1) / ranks * length * 4 / RATE, rel=1e-3)
    elif growth is Growth.STAR:
        assert found == pytest.approx(2 * most, rel=1e-3)
    else:
        pieces = -(-length // PIECE)
        assert 2 * most * (1 - 1e-3) <= found <= 2 * most * (1 + ranks.bit_length() / pieces)


@pytest.mark.parametrize("averaging", TABLE)
@pytest.mark.parametrize("costs", [FREE, DEAR])
@pytest.mark.parametrize("length", [960, 300_000, 1_048_576, 6_000_000])
@pytest.mark.parametrize("ranks", [2, 3, 24, 48, 64])
def test_what_is_computed_for_many_ranks_agrees_with_simulations(
    averaging: str, costs: Costs, length: int, ranks: int
) -> None:
    expected = simulated(averaging, group(ranks, costs), (length,), (0.0,), 4)
    assert computed(averaging, Rank(Machine(RATE, RATE), costs), ranks, length) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("ranks", [100, 128])
def test_a_tree_of_more_ranks_than_are_simulated(ranks: int) -> None:
    expected = simulated("reduce-bcast", group(ranks, DEAR), (600_000,), (0.0,), 4)
    assert computed("reduce-bcast", Rank(Machine(RATE, RATE), DEAR), ranks, 600_000) == pytest.approx(
        expected, rel=1e-3
    )


@pytest.mark.parametrize("averaging", TABLE)
@pytest.mark.parametrize("ranks", [2, 7, 1000, 10_240])
def test_without_other_costs_each_further_piece_takes_the_bytes_of_cost(averaging: str, ranks: int) -> None:
    """By cost(), which is linear in the length: of the rank that sends most. Its ranks below wait only once."""
    rank, some, more = Rank(Machine(RATE, RATE), FREE), 64 * PIECE, 128 * PIECE
    found = computed(averaging, rank, ranks, more) - computed(averaging, rank, ranks, some)
    times = {Growth.CYCLE: 2 * (ranks - 1) / ranks, Growth.STAR: 2 * (ranks - 1), Growth.TREE: 2 * ceil(log2(ranks))}
    assert found == pytest.approx(times[TABLE[averaging].growth] * 64 * PIECE * 4 / RATE, rel=1e-3)
    if ranks < 10 and TABLE[averaging].cost(2, 1).exact:
        sent = max(TABLE[averaging].cost(ranks, 64 * PIECE).bytes_sent)
        both = 1 if TABLE[averaging].growth is Growth.CYCLE else 2  # first up, then down
        assert found == pytest.approx(both * sent / RATE, rel=1e-3)


def test_a_link_that_is_slower_in_one_direction_decides() -> None:
    nodes = (Machine(RATE / 5, RATE, host=0), *(Machine(RATE, RATE, host=host) for host in range(1, 4)))
    slow = seconds("ring", Group(Cluster(nodes), (0, 1, 2, 3), FREE), 4_000_000)
    assert slow == pytest.approx(1.5 * 16e6 / (RATE / 5), rel=0.05)


def test_ranks_of_one_host_share_its_cores() -> None:
    costs = Costs(message=1e-3)
    apart = seconds("ring", group(8, costs), 800)
    nodes = tuple(Machine(RATE, RATE, host=0) for _ in range(8))
    together = seconds("ring", Group(Cluster(nodes, cores=2), tuple(range(8)), costs), 800)
    assert together == pytest.approx(4 * apart, rel=0.05)


def test_racks_share_their_link() -> None:
    nodes = tuple(Machine(RATE, RATE, rack=rank // 4, host=rank) for rank in range(8))
    flat = seconds("gather", Group(Cluster(nodes), tuple(range(8)), FREE), 1_000_000)
    racks = seconds("gather", Group(Cluster(nodes, ((RATE / 4, RATE / 4),) * 2), tuple(range(8)), FREE), 1_000_000)
    assert racks == pytest.approx(flat * 16 / 7, rel=0.05)  # 4 ranks behind a quarter of the rate, not 7 behind all


def test_payload_of_a_link() -> None:
    node = alike(2, 1e9).nodes[0]
    assert node.up == pytest.approx(1e9 / 8 * 0.9556, rel=1e-3)

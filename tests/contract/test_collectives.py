"""Every averaging sums right on every transport, and sends exactly what it prices."""

import collective_cases as cases
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from worlds import ThreadWorld, World

from paceline.collectives.choose import TABLE
from paceline.collectives.plan import PIECE, Recv, Send
from paceline.collectives.reduce_bcast import plan as tree_plan
from paceline.collectives.ring import ALL_GATHER, REDUCE_SCATTER, RING
from paceline.collectives.ring import plan as ring_plan

# Fewer values than ranks, uneven chunks, several pieces a chunk.
LENGTHS = [1, 2, 3, 5, 12, 1001, PIECE + 1, 4 * PIECE + 3]


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sum_is_right_and_equal_on_all_ranks_and_bytes_are_as_priced(world: World, name: str, dtype: str) -> None:
    results = world.run(cases.sums_and_meters, name=name, lengths=LENGTHS, dtype=dtype)
    for i, length in enumerate(LENGTHS):
        cost = TABLE[name].cost(world.size, length, {"float32": 4, "float64": 8}[dtype])
        of_rank = [result[i] for result in results]
        assert all(r["right"] for r in of_rank)
        assert len({r["digest"] for r in of_rank}) == 1
        assert tuple(r["bytes_sent"] for r in of_rank) == cost.bytes_sent
        assert tuple(r["bytes_received"] for r in of_rank) == cost.bytes_received
        assert tuple(r["messages_sent"] for r in of_rank) == cost.messages_sent


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_halves_of_the_ring_leave_each_rank_its_sum_and_everyones_chunk_for_the_bytes_they_price(
    world: World, dtype: str
) -> None:
    results, itemsize = world.run(cases.halves_and_meters, lengths=LENGTHS, dtype=dtype), getattr(torch, dtype).itemsize
    for i, length in enumerate(LENGTHS):
        for half, collective in enumerate((REDUCE_SCATTER, ALL_GATHER)):
            of_rank = [result[i][half] for result in results]
            assert all(r["right"] for r in of_rank)
            cost = collective.cost(world.size, length, itemsize)
            for name in ("bytes_sent", "bytes_received", "messages_sent"):
                assert tuple(r[name] for r in of_rank) == getattr(cost, name)


@given(ranks=st.integers(1, 9), length=st.integers(0, 500))
def test_the_halves_of_the_ring_are_the_ring(ranks: int, length: int) -> None:
    for rank in range(ranks):
        halves = REDUCE_SCATTER.plan(rank, ranks, length), ALL_GATHER.plan(rank, ranks, length)
        whole = RING.plan(rank, ranks, length)
        for kind in (Send, Recv):
            assert [i for half in halves for i in half if isinstance(i, kind)] == [
                i for i in whole if isinstance(i, kind)
            ]


@settings(max_examples=40)
@given(size=st.integers(1, 9), length=st.integers(1, 3000), name=st.sampled_from(sorted(TABLE)))
def test_any_number_of_ranks_and_any_length(size: int, length: int, name: str) -> None:
    results = ThreadWorld(size).run(cases.sums_and_meters, name=name, lengths=[length])
    cost = TABLE[name].cost(size, length)
    assert all(result[0]["right"] for result in results)
    assert tuple(result[0]["bytes_sent"] for result in results) == cost.bytes_sent


@given(ranks=st.integers(1, 64), chunk=st.integers(1, 3 * PIECE))
def test_ring_costs_each_rank_two_times_n_minus_one_over_n_of_the_data(ranks: int, chunk: int) -> None:
    cost = TABLE["ring"].cost(ranks, chunk * ranks)
    assert set(cost.bytes_sent) == set(cost.bytes_received) == {2 * (ranks - 1) * chunk * 4}


@given(ranks=st.integers(2, 20), length=st.integers(1, 5000))
def test_gather_makes_the_root_carry_everything_and_the_tree_spreads_it(ranks: int, length: int) -> None:
    gather, tree = (TABLE[name].cost(ranks, length) for name in ("gather", "reduce-bcast"))
    assert gather.bytes_sent == ((ranks - 1) * length * 4, *[length * 4] * (ranks - 1))
    assert sum(tree.bytes_sent) == sum(gather.bytes_sent)
    assert tree.bytes_sent[0] == (ranks - 1).bit_length() * length * 4


@given(ranks=st.integers(1, 17), length=st.integers(0, 100), name=st.sampled_from(["ring", "reduce-bcast", "gather"]))
def test_every_send_of_a_plan_has_its_receive_in_the_same_order(ranks: int, length: int, name: str) -> None:
    from paceline.collectives.plan import Planned

    averaging = TABLE[name]
    assert isinstance(averaging, Planned)
    plans = [averaging.plan(rank, ranks, length) for rank in range(ranks)]
    for a in range(ranks):
        for b in range(ranks):
            sent = [(i.start, i.stop) for i in plans[a] if isinstance(i, Send) and i.to == b]
            received = [(i.start, i.stop) for i in plans[b] if isinstance(i, Recv) and i.source == a]
            assert sent == received


def test_the_ring_of_three_is_the_table_in_its_comment() -> None:
    sends = {
        rank: [i.start for i in ring_plan(rank, 3, 3) if isinstance(i, Send)] for rank in range(3)
    }  # chunk c of 3 values is value c
    assert sends == {0: [2, 1, 0, 2], 1: [0, 2, 1, 0], 2: [1, 0, 2, 1]}
    adds = [i.add for i in ring_plan(0, 3, 3) if isinstance(i, Recv)]
    assert adds == [True, True, False, False]


def test_the_tree_of_eight_is_the_drawing_in_its_comment() -> None:
    children = {
        rank: sorted({i.source for i in tree_plan(rank, 8, 1) if isinstance(i, Recv) and i.add}) for rank in range(8)
    }
    assert children == {0: [1, 2, 4], 1: [], 2: [3], 3: [], 4: [5, 6], 5: [], 6: [7], 7: []}


def test_the_transports_own_allreduce_says_that_the_wire_is_opaque() -> None:
    cost = TABLE["allreduce"].cost(4, 100)
    assert not cost.exact
    assert cost.bytes_sent == (400,) * 4
    assert all(TABLE[name].cost(4, 100).exact for name in TABLE if name != "allreduce")

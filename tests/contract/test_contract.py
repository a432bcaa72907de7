"""One suite for every transport."""

import contract_cases as cases
import pytest
from worlds import World, Worlds


@pytest.mark.parametrize("length", [1, 1000, 300_001])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "uint8"])
def test_a_message_arrives_whole(world: World, length: int, dtype: str) -> None:
    got = world.run(cases.neighbours_exchange, length=length, dtype=dtype)
    assert got == [[(rank - 1) % world.size] for rank in range(world.size)]


def test_tags_choose_the_message(world: World) -> None:
    assert world.run(cases.tags_choose)[1] == [1.0, 2.0]


def test_messages_with_one_tag_keep_their_order(world: World) -> None:
    assert world.run(cases.order_is_kept, count=30)[1] == list(range(30))


def test_two_ranks_can_send_large_messages_to_each_other_at_once(world: World) -> None:
    assert all(world.run(cases.large_both_ways, length=2_000_000))


@pytest.mark.parametrize("length", [1, 2, 17, 100_003])
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
def test_allreduce_sums_over_all_ranks(world: World, length: int, dtype: str) -> None:
    assert all(world.run(cases.sums, length=length, dtype=dtype))


def test_broadcast_gives_everyone_the_roots_values(world: World) -> None:
    for root in range(world.size):
        assert world.run(cases.broadcasts, root=root) == [[root]] * world.size


def test_nobody_leaves_a_barrier_before_the_last_has_come(world: World) -> None:
    times = world.run(cases.barrier_holds)
    assert min(left for _, left in times) >= max(came for came, _ in times)


def test_split_makes_groups_by_color_in_the_order_of_the_keys(world: World) -> None:
    for rank, (group_rank, group_size, total) in enumerate(world.run(cases.odd_and_even)):
        mine = [r for r in range(world.size) if r % 2 == rank % 2]
        assert (group_size, total) == (len(mine), sum(mine))
        assert group_rank == sorted(mine, reverse=True).index(rank)


def test_ranks_may_belong_to_different_numbers_of_groups(world: World) -> None:
    others = sum(range(world.size))
    assert world.run(cases.groups_of_some) == [others, *range(1, world.size)]


def test_a_duplicate_has_messages_of_its_own(world: World) -> None:
    assert world.run(cases.duplicates_keep_apart)[1] == [1.0, 2.0]


def test_a_rank_may_close_a_duplicate_as_soon_as_it_has_it(world: World) -> None:
    """However far the others are in making it."""
    assert world.run(cases.duplicates_close_at_once, count=20) == [20] * world.size


def test_a_receive_without_a_send_ends_at_the_deadline_and_names_both_ranks(world: World) -> None:
    message = world.run(cases.nobody_sends)[0]
    assert f"rank 0 of {world.size} waited 0.3 s to receive from rank 1 (tag 5)" in message


@pytest.mark.parametrize("what", ["barrier", "allreduce"])
def test_a_collective_that_a_rank_stays_away_from_ends_at_the_deadline(world: World, what: str) -> None:
    messages = world.run(cases.somebody_stays_away, what=what)
    # Where one rank's deadline closes the connections, a later one sees a lost peer instead.
    assert all(f"rank {rank} of {world.size}" in messages[rank] for rank in range(1, world.size))
    assert any("waited 0.3 s" in message for message in messages)


def test_a_peer_that_is_not_there_is_refused(world: World) -> None:
    for rank, messages in enumerate(world.run(cases.wrong_peers)):
        assert len(messages) == 6
        assert all(f"rank {rank} of {world.size} cannot" in message for message in messages)


def test_the_meter_counts_messages_and_bytes_exactly(world: World) -> None:
    counts = world.run(cases.metered)
    assert counts[0] == {
        "messages_sent": 2, "messages_received": 0, "bytes_sent": 64, "bytes_received": 0,
        "opaque_calls": 1, "opaque_bytes": 20, "own_opaque_calls": 0,
    }  # fmt: skip
    assert (counts[1]["messages_received"], counts[1]["bytes_received"]) == (2, 64)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("transport", ["threads", "shm", "gloo"])  # MPI's abort ends the processes: see tests/process
def test_an_abort_ends_the_waits_of_the_others(worlds: Worlds, transport: str, size: int) -> None:
    for nested in (False, True):
        messages = worlds.get(transport, size).run(cases.one_aborts, nested=nested)
        assert all(f"rank {rank} of {size}" in messages[rank] for rank in range(1, size))

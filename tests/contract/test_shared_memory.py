"""What ranks that share memory can do besides: sums in place, waits that end when they are cancelled."""

import pytest
import shared_cases as cases
from worlds import Worlds

from paceline.collectives.in_place import cost


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("lengths", [[3, 4], [1000, 17], [1_000_003, 300_000]])
def test_sums_in_place_are_right_and_read_what_they_cost(worlds: Worlds, size: int, lengths: list[int]) -> None:
    turns = 12
    results = worlds.get("shm", size).run(cases.sums_in_place, lengths=lengths, turns=turns, seed=size)
    for turn in range(turns):
        of_rank = [result[turn] for result in results]
        assert all(each["right"] and each["squares"] and each["sent_as_much"] for each in of_rank)
        assert len({each["digest"] for each in of_rank}) == 1
    # In several spans a rank's part may be one value more or less than in one.
    for rank, result in enumerate(results):
        wanted = sum(cost(size, n, itemsize).bytes_received[rank] for n, itemsize in zip(lengths, (4, 8), strict=True))
        assert all(abs(each["received"] - wanted) <= 3 * size * 12 for each in result)


def test_a_whole_vector_costs_exactly_that(worlds: Worlds) -> None:
    for size in (2, 3, 4):
        for length in (1, 5, 1000):
            found = worlds.get("shm", size).run(cases.bytes_of_one_sum, length=length)
            assert tuple(found) == cost(size, length, 8).bytes_received == cost(size, length, 8).bytes_sent


@pytest.mark.parametrize("size", [2, 3, 4])
def test_nobody_overwrites_what_a_late_rank_still_reads(worlds: Worlds, size: int) -> None:
    for late, root in ((0, 1), (1, 0), (size - 1, size - 1)):
        assert all(worlds.get("shm", size).run(cases.late_reader, late=late, root=root)), (late, root)


@pytest.mark.parametrize("size", [2, 3])
def test_another_thread_can_cancel_a_wait(worlds: Worlds, size: int) -> None:
    messages = worlds.get("shm", size).run(cases.cancelled_by_a_thread)[0]
    assert len(messages) == 2
    assert all(f"rank 0 of {size}: cancelled: the members have changed" in message for message in messages)


@pytest.mark.parametrize("first", [False, True])
def test_a_message_of_another_length_than_its_receive_is_an_error(worlds: Worlds, first: bool) -> None:
    message = worlds.get("shm", 2).run(cases.of_another_length, first=first)[0]
    assert message == "rank 0 expected 16 bytes from rank 1, got 20"

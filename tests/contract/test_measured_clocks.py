"""The clocks of other machines are measured on every transport; on this machine all ranks really have one clock."""

import clock_cases as cases
from worlds import World

from paceline.launch.clocks import RESOLUTION, ROUND_TRIPS

SHIFTS = [5.0, 0.0, -3600.0, 0.25]


def test_the_true_offset_is_within_the_uncertainty(world: World) -> None:
    machines = [f"machine {rank}" for rank in range(world.size)]
    for shifts in ([0.0] * world.size, SHIFTS[: world.size]):
        first, *others = world.run(cases.measures, machines=machines, shifts=shifts)
        assert first is None, "the others' times are put on its clock"
        for rank, found in enumerate(others, 1):
            assert abs(found["offset"] - (shifts[0] - shifts[rank])) <= found["uncertainty"]
            shortest = 2 * (found["uncertainty"] - RESOLUTION)
            assert 0 < ROUND_TRIPS * shortest <= found["seconds"] + 1e-6, "of all round trips it is the shortest"


def test_ranks_on_the_machine_of_rank_0_have_its_clock_without_a_message(world: World) -> None:
    machines = ["here"] * (world.size - 1) + ["there"]
    first, *here, there = world.run(cases.messages, machines=machines)
    assert here == [0] * (world.size - 2)
    assert first == there > 0
    found = world.run(cases.measures, machines=["here"] * world.size, shifts=[0.0] * world.size)
    assert found == [None, *[{"offset": 0.0, "uncertainty": 0.0, "seconds": 0.0}] * (world.size - 1)]


def test_machines_whose_names_cannot_be_known_are_measured(world: World) -> None:
    found = world.run(cases.measures, machines=[None] * world.size, shifts=[0.0] * world.size)
    assert all(each["uncertainty"] > 0 for each in found[1:])

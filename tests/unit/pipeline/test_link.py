"""How fast ranks exchange messages: the same answer everywhere, in little time whatever the link."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
import torch
from worlds import ThreadWorld

from paceline.comm.base import Comm
from paceline.pipeline import link


def measured(comm: Comm, ranks: list[int]) -> list[float]:
    return link.bandwidths(comm, ranks)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_pair_of_neighbours_has_a_speed_that_all_ranks_know(size: int) -> None:
    first, *others = ThreadWorld(size).run(measured, ranks=list(range(size)))
    assert len(first) == size - 1
    assert all(speed > 0 for speed in first)
    assert all(other == first for other in others)


def test_ranks_need_not_be_neighbours_nor_all() -> None:
    found = ThreadWorld(4).run(measured, ranks=[0, 3, 1])
    assert len(found[2]) == 2
    assert all(a == b for a, b in pairwise(found))


class Slow:
    """A link of so many bytes a second, each way, before a communicator."""

    def __init__(self, comm: Comm, speed: float, late: float = 0.0) -> None:
        self.comm, self.speed, self.late = comm, speed, late
        self.sent = list[int]()
        self.rank, self.recv, self.broadcast = comm.rank, comm.recv, comm.broadcast

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        time.sleep(tensor.nbytes / self.speed + (self.late if len(self.sent) == 3 else 0.0))
        self.sent.append(tensor.numel())
        self.comm.send(tensor, to, tag)


def over_slow(comm: Comm, speed: float, late: float = 0.0) -> tuple[float, float, int]:
    """The speed that is found, how long that takes, and the longest message."""
    slow, start = Slow(comm, speed, late), time.perf_counter()
    found = link.bandwidth(slow, 0, 1)  # type: ignore[arg-type]
    return found, time.perf_counter() - start, max(slow.sent, default=0)


@pytest.mark.parametrize("speed", [0.2e6, 1.25e6, 12.5e6, 125e6])
def test_a_slow_link_is_measured_well_and_takes_no_longer(speed: float) -> None:
    for found, seconds, _ in ThreadWorld(3).run(over_slow, speed=speed):
        assert 0.5 * speed < found < 1.05 * speed
        assert seconds < 2.5


def test_one_round_that_took_long_is_no_slow_link() -> None:
    """The fourth message is the first that is timed and counts; longer ones are tried all the same."""
    [(found, _, longest), _] = ThreadWorld(2).run(over_slow, speed=125e6, late=0.1)
    assert found > 0.5 * 125e6
    assert longest == link.LONGEST


def test_this_machine_has_a_speed() -> None:
    assert link.local_bandwidth() > 1e6

"""How fast ranks exchange messages: the same answer everywhere, in little time whatever the link."""

from __future__ import annotations

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


class Clock:
    """Time that passes only where a message is under way."""

    def __init__(self) -> None:
        self.now = 0.0

    def perf_counter(self) -> float:
        return self.now


class Slow:
    """A link of so many bytes a second, each way, before a communicator."""

    def __init__(self, comm: Comm, speed: float, late: float, clock: Clock) -> None:
        self.comm, self.speed, self.late, self.clock = comm, speed, late, clock
        self.sent = list[int]()
        self.rank, self.recv, self.broadcast = comm.rank, comm.recv, comm.broadcast

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> None:
        self.clock.now += tensor.nbytes / self.speed + (self.late if len(self.sent) == 3 else 0.0)
        self.sent.append(tensor.numel())
        self.comm.send(tensor, to, tag)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(link, "time", made)
    return made


def over_slow(comm: Comm, speed: float, late: float, clock: Clock) -> tuple[float, int]:
    """The speed that is found, and the longest message."""
    slow = Slow(comm, speed, late, clock)
    found = link.bandwidth(slow, 0, 1)  # type: ignore[arg-type]
    return found, max(slow.sent, default=0)


@pytest.mark.parametrize("speed", [0.2e6, 1.25e6, 12.5e6, 125e6])
def test_a_slow_link_is_measured_well_and_in_little_time(speed: float, clock: Clock) -> None:
    for found, _ in ThreadWorld(3).run(over_slow, speed=speed, late=0.0, clock=clock):
        assert found == pytest.approx(speed)
    assert clock.now < 2.5  # of the link's own time


def test_one_round_that_took_long_is_no_slow_link(clock: Clock) -> None:
    """The fourth message is the first that is timed and counts; longer ones are tried all the same."""
    [(found, longest), _] = ThreadWorld(2).run(over_slow, speed=125e6, late=0.1, clock=clock)
    assert found == pytest.approx(125e6)
    assert longest == link.LONGEST


def test_this_machine_has_a_speed() -> None:
    assert link.local_bandwidth() > 1e6

"""The transport's own all-reduce."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.collectives import ring
from paceline.collectives.plan import Cost, Growth, Plan, pieces

if TYPE_CHECKING:
    from torch import Tensor

    from paceline.comm.base import Comm


def halves(chunk: range) -> list[tuple[int, int]]:
    """The two halves of a chunk, each in pieces."""
    middle = (chunk.start + chunk.stop) // 2
    return [*pieces(range(chunk.start, middle)), *pieces(range(middle, chunk.stop))]


class Native:
    name = "allreduce"
    growth = Growth.CYCLE

    @staticmethod
    def plan(rank: int, ranks: int, length: int) -> Plan:
        """What gloo does: a ring whose chunks are sent in two halves, or in pieces of at most 1 MB."""
        return ring.plan(rank, ranks, length, halves)

    def run(self, comm: Comm, tensor: Tensor) -> None:
        comm.allreduce(tensor)

    def cost(self, ranks: int, length: int, itemsize: int = 4) -> Cost:
        """The payload only: the transport decides what it sends."""
        payload = (length * itemsize,) * ranks if ranks > 1 else (0,)
        return Cost(payload, payload, (0,) * ranks, exact=False)


NATIVE = Native()

"""Ring all-reduce: reduce-scatter, then all-gather (Patarasuk and Yuan, 2009). Each rank sends 2(N-1)/N of the data.

Each half is a collective of its own, too, and costs half of it.
"""

from collections.abc import Callable, Iterable

from paceline.collectives.plan import Growth, Plan, Planned, Recv, Send, pieces
from paceline.layout import share

Cut = Callable[[range], Iterable[tuple[int, int]]]


def plan(rank: int, ranks: int, length: int, cut: Cut = pieces) -> Plan:
    """The data has N chunks; every chunk goes around the ring twice, first to be summed, then to be distributed.

    The chunk that rank r sends in each step, N = 3 (+: the receiver adds it to its own; otherwise it replaces its own):

        step     0    1   |  2    3
        rank 0   2+   1+  |  0    2
        rank 1   0+   2+  |  1    0
        rank 2   1+   0+  |  2    1

    So after the first half rank r has the sum of chunk r, which is `layout.share` of the data. What a rank receives in
    one step it sends in the next, piece by piece, so that a piece is sent on as soon as it has been added. `cut`
    divides a chunk into pieces.
    """
    return _steps(rank, ranks, length, range(2 * (ranks - 1)), cut)


def reduce_scatter(rank: int, ranks: int, length: int) -> Plan:
    """The first half: rank r gets the sum of chunk r; other chunks are left with sums of some ranks."""
    return _steps(rank, ranks, length, range(ranks - 1))


def all_gather(rank: int, ranks: int, length: int) -> Plan:
    """The second half: every rank gets chunk r of each rank r."""
    return _steps(rank, ranks, length, range(ranks - 1, 2 * (ranks - 1)))


def _steps(rank: int, ranks: int, length: int, steps: range, cut: Cut = pieces) -> Plan:
    if not steps:
        return []
    chunk = [share(length, ranks, i) for i in range(ranks)]
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    todo: Plan = [Send(after, *piece) for piece in cut(chunk[(rank - 1 - steps.start) % ranks])]
    for step in steps:
        for piece in cut(chunk[(rank - 2 - step) % ranks]):
            todo.append(Recv(before, *piece, add=step < ranks - 1))
            if step + 1 < steps.stop:
                todo.append(Send(after, *piece))
    return todo


RING = Planned("ring", plan, Growth.CYCLE)
REDUCE_SCATTER = Planned("reduce-scatter", reduce_scatter, Growth.CYCLE)
ALL_GATHER = Planned("all-gather", all_gather, Growth.CYCLE)

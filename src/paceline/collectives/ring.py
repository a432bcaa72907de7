"""Ring all-reduce: reduce-scatter, then all-gather (Patarasuk and Yuan, 2009). Each rank sends 2(N-1)/N of the data."""

from collections.abc import Callable, Iterable

from paceline.collectives.plan import Growth, Plan, Planned, Recv, Send, pieces
from paceline.layout import share


def plan(rank: int, ranks: int, length: int, cut: Callable[[range], Iterable[tuple[int, int]]] = pieces) -> Plan:
    """The data has N chunks; every chunk goes around the ring twice, first to be summed, then to be distributed.

    The chunk that rank r sends in each step, N = 3 (+: the receiver adds it to its own; otherwise it replaces its own):

        step     0    1   |  2    3
        rank 0   0+   2+  |  1    0
        rank 1   1+   0+  |  2    1
        rank 2   2+   1+  |  0    2

    What a rank receives in one step it sends in the next, piece by piece, so that a piece is sent on as soon as it has
    been added. `cut` divides a chunk into pieces.
    """
    if ranks == 1:
        return []
    chunk = [share(length, ranks, i) for i in range(ranks)]
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    steps = 2 * (ranks - 1)
    todo: Plan = [Send(after, *piece) for piece in cut(chunk[rank])]
    for step in range(steps):
        for piece in cut(chunk[(rank - step - 1) % ranks]):
            todo.append(Recv(before, *piece, add=step < ranks - 1))
            if step + 1 < steps:
                todo.append(Send(after, *piece))
    return todo


RING = Planned("ring", plan, Growth.CYCLE)

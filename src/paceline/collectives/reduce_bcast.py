"""Reduce to rank 0 along a binomial tree, then broadcast along the same tree (as Wang and Yang did)."""

from paceline.collectives.plan import Growth, Plan, Planned, Recv, Send, pieces


def plan(rank: int, ranks: int, length: int) -> Plan:
    """Rank r's children are r + 1, r + 2, r + 4 … below its lowest set bit; its parent is r without that bit.

    0 ─┬─ 1          up:   a rank adds its children's pieces to its own, smallest child first, and sends the sum
       ├─ 2 ── 3     down: in the opposite order
       └─ 4 ─┬─ 5
             └─ 6 ── 7
    """
    below = rank & -rank if rank else 1 << ranks.bit_length()
    children = [rank + (1 << bit) for bit in range(below.bit_length() - 1) if rank + (1 << bit) < ranks]
    parent = rank - below if rank else None
    spans = list(pieces(range(length)))
    todo: Plan = []
    for span in spans:
        todo.extend(Recv(child, *span, add=True) for child in children)
        if parent is not None:
            todo.append(Send(parent, *span))
    for span in spans:
        if parent is not None:
            todo.append(Recv(parent, *span, add=False))
        todo.extend(Send(child, *span) for child in reversed(children))
    return todo


REDUCE_BCAST = Planned("reduce-bcast", plan, Growth.TREE)

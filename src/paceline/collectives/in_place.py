"""Sums in memory that ranks share: each adds up its part of all ranks' vectors, and all read the sums there."""

from paceline.collectives.plan import Cost
from paceline.layout import share


def cost(ranks: int, length: int, itemsize: int = 4) -> Cost:
    """What a rank reads of the others counts as received: its part of their vectors, and their parts of the sum. These
    are the bytes of a ring, without messages. It also reads its part of its own vector, and writes its part of the sum.
    """
    own = [len(share(length, ranks, rank)) for rank in range(ranks)]
    moved = tuple(((ranks - 1) * part + length - part) * itemsize for part in own)
    return Cost(moved, moved, (0,) * ranks)

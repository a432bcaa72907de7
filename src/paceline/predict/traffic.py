"""The bytes of an all-reduce of any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.collectives.plan import Growth

FEW_RANKS = 8  # whose bytes are counted; those of more follow from them


def averaged_bytes(averaging: str, ranks: int, lengths: Sequence[int], itemsize: int) -> float:
    """What the rank that sends most sends in all-reduces of these lengths: of many ranks, from the plans of few."""
    if ranks == 1:
        return 0.0
    collective, few = AVERAGINGS[averaging], min(ranks, FEW_RANKS)
    costs = [collective.cost(few, length, itemsize) for length in lengths]
    ring = (ranks - 1) / ranks / ((few - 1) / few)
    more = {
        Growth.CYCLE: ring if costs[0].exact else 1.0,
        Growth.STAR: (ranks - 1) / (few - 1),
        Growth.TREE: ceil(log2(ranks)) / ceil(log2(few)),
    }
    return sum(max(cost.bytes_sent) for cost in costs) * more[collective.growth]

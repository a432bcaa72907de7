"""The bytes of an all-reduce of any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log2

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.collectives.plan import Growth
from paceline.predict.collective import MOST_SIMULATED


def averaged_bytes(averaging: str, ranks: int, lengths: Sequence[int], itemsize: int) -> float:
    """What the rank that sends most sends in all-reduces of these lengths: of many ranks, by the law of growth."""
    if ranks == 1:
        return 0.0
    collective, few = AVERAGINGS[averaging], min(ranks, MOST_SIMULATED)
    sent = sum(max(collective.cost(few, length, itemsize).bytes_sent) for length in lengths)
    more = {
        Growth.CYCLE: 1.0,
        Growth.LINEAR: (ranks - 1) / (few - 1),
        Growth.DOUBLING: ceil(log2(ranks)) / ceil(log2(few)),
    }
    return sent * more[collective.growth]

"""How long a collective takes: its plan is simulated; rings, and many ranks, follow from how they scale."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from math import ceil, log2

from paceline.collectives import choose
from paceline.collectives.plan import Growth, Send
from paceline.errors import UsageError
from paceline.predict.cluster import Cluster
from paceline.predict.network import Costs, simulate

MOST_SIMULATED = 64
KNOWN = 32  # ranks, from whose times those of more than MOST_SIMULATED follow


@dataclass(frozen=True)
class Group:
    """Ranks that run a collective: on which node of the cluster each is, and what messages cost."""

    cluster: Cluster
    places: tuple[int, ...]
    costs: Costs

    @property
    def ranks(self) -> int:
        return len(self.places)

    @property
    def uniform(self) -> bool:
        """Whether there is one rank on each of some nodes that are alike and share nothing."""
        return self.cluster.uniform and len(set(self.places)) == self.ranks

    def follows_law(self, growth: Growth) -> bool:
        """Whether times follow from the law of growth: always if all ranks do the same, or for many ranks."""
        same = growth is Growth.CYCLE and not self.cluster.nodes[0].burst and self.cluster.cores > 1
        return self.uniform and (same or self.ranks > MOST_SIMULATED)


def seconds(averaging: str, group: Group, length: int, itemsize: int = 4) -> float:
    """Seconds of an all-reduce of `length` values."""
    return finished(averaging, group, (length,), (0.0,), itemsize)


def finished(
    averaging: str, group: Group, lengths: tuple[int, ...], ready: tuple[float, ...], itemsize: int = 4
) -> float:
    """When all-reduces of buckets have ended; each can begin when it is ready, and the one before it has ended.

    Raises UsageError where that can only be simulated, and there are too many ranks.
    """
    if group.ranks == 1:
        return 0.0
    if not group.follows_law(choose.TABLE[averaging].growth):
        if group.ranks > MOST_SIMULATED:
            raise UsageError(
                f"more than {MOST_SIMULATED} ranks can be predicted only on machines that are all alike, one for each: "
                "give --link"
            )
        return simulated(averaging, group, lengths, ready, itemsize)
    end = 0.0
    for length, at in zip(lengths, ready, strict=True):
        end = max(end, at) + grown(averaging, group, length, itemsize)
    return end


def simulated(averaging: str, group: Group, lengths: tuple[int, ...], ready: tuple[float, ...], itemsize: int) -> float:
    """The same, message by message."""
    plan = choose.TABLE[averaging].plan
    return simulate(plan, lengths, ready, itemsize, group.cluster, group.places, group.costs)


@lru_cache(maxsize=4096)
def grown(averaging: str, group: Group, length: int, itemsize: int = 4, known: int = KNOWN) -> float:
    """The same on nodes that are alike, from simulations of at most `known` ranks."""
    growth = choose.TABLE[averaging].growth
    if growth is Growth.CYCLE:
        return _cycle(averaging, group, length, itemsize)
    quarter, half, whole = (_alike(averaging, group, known // each, length, itemsize) for each in (4, 2, 1))
    if growth is Growth.LINEAR:
        return whole + (group.ranks - known) * (whole - half) / (known - known // 2)
    more = ceil(log2(group.ranks)) - log2(known)
    return whole + more * (whole - half) + more * (more + 1) / 2 * (whole - 2 * half + quarter)


def _cycle(averaging: str, group: Group, length: int, itemsize: int) -> float:
    """All ranks do the same at the same time, so that a message arrives on a rank when its own arrives on the next.

    A chunk is a ranks-th part of the values. N-1 steps add it up, and N-1 distribute it; a piece of it that has arrived
    is sent on in the next step.
    """
    node, costs, steps = group.cluster.nodes[0], group.costs, 2 * (group.ranks - 1)
    rate = min(node.up, node.down, 1 / costs.byte if costs.byte else node.up)
    of_two = choose.TABLE[averaging].plan(0, 2, 2 * ceil(length / group.ranks))
    sizes = [(each.stop - each.start) * itemsize for each in takewhile(lambda each: isinstance(each, Send), of_two)]
    if len(sizes) == 1:
        (size,) = sizes
        return steps * (2 * costs.message + size / rate + costs.latency) + steps / 2 * costs.add * size
    arrived, free, linked = [0.0] * len(sizes), 0.0, 0.0  # when the rank's thread, and its link, have nothing to do
    for step in range(steps + 1):
        for number, size in enumerate(sizes):
            if step:
                free = max(free, arrived[number]) + costs.message + costs.add * size * (step <= steps / 2)
            if step < steps:
                free += costs.message
                linked = max(linked, free) + size / rate
                arrived[number] = linked + costs.latency
    return free


def _alike(averaging: str, group: Group, ranks: int, length: int, itemsize: int) -> float:
    fewer = Group(group.cluster.first(ranks), tuple(range(ranks)), group.costs)
    return simulated(averaging, fewer, (length,), (0.0,), itemsize)

"""How long a collective takes: its plan is simulated, or, on machines that are all alike, computed from a few ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import takewhile
from math import ceil

from paceline.collectives import choose
from paceline.collectives.plan import PIECE, Growth, Send
from paceline.errors import UsageError
from paceline.predict import stars
from paceline.predict.cluster import Cluster
from paceline.predict.network import Costs, simulate
from paceline.predict.stars import Rank

MOST_SIMULATED = 64
LONG = 16 * PIECE  # values: of longer buckets, not all messages are simulated
# After this many steps of a cycle, each further one takes as long as the mean of the last ones.
TRANSIENT, LAST = 48, 16


@dataclass(frozen=True)
class Group:
    """Ranks that run a collective: on which node of the cluster each is, and what messages cost."""

    cluster: Cluster
    places: tuple[int, ...]
    costs: Costs

    @property
    def ranks(self) -> int:
        return len(self.places)

    @cached_property
    def uniform(self) -> bool:
        """Whether there is one rank on each of some nodes that are alike and share nothing."""
        return self.cluster.uniform and len(set(self.places)) == self.ranks

    def computed(self, growth: Growth) -> bool:
        """Whether its time is computed from a few ranks: always if all ranks do the same, or for many ranks."""
        same = growth is Growth.CYCLE and not self.cluster.nodes[0].burst and self.cluster.cores > 1
        return self.uniform and (same or self.ranks > MOST_SIMULATED)


def seconds(averaging: str, group: Group, length: int, itemsize: int = 4) -> float:
    """Seconds of an all-reduce of `length` values."""
    return finished(averaging, group, (length,), (0.0,), itemsize)


def finished(
    averaging: str,
    group: Group,
    lengths: tuple[int, ...],
    ready: tuple[float, ...],
    itemsize: int = 4,
    shares: tuple[float, ...] = (),
    steps: int = 1,
) -> float:
    """When all-reduces of buckets have ended; each can begin when it is ready, and the one before it has ended.

    It is ready on the slowest rank at this time, and on others after their share of it. That counts where messages are
    simulated. With several steps, the time from one to the next: ranks that have all sums early go on early, which is
    left out for very long buckets and where times are computed.

    Raises UsageError where that can only be simulated, and there are too many ranks.
    """
    if group.ranks == 1:
        return 0.0
    if not group.computed(choose.TABLE[averaging].growth):
        if group.ranks > MOST_SIMULATED:
            raise UsageError(
                f"more than {MOST_SIMULATED} ranks can be predicted only on machines that are all alike, one for each: "
                "give --link"
            )
        if max(lengths) <= LONG:
            return simulated(averaging, group, lengths, ready, itemsize, shares, steps)
        each = [_long(averaging, group, length, itemsize) for length in lengths]
    else:
        node, load = group.cluster.nodes[0], group.costs.load
        rank = Rank(replace(node, up=node.up / load, down=node.down / load), group.costs)
        each = [computed(averaging, rank, group.ranks, length, itemsize) for length in lengths]
    end = 0.0
    for at, took in zip(ready, each, strict=True):
        end = max(end, at) + took
    return end


def _long(averaging: str, group: Group, length: int, itemsize: int) -> float:
    """A single one, if need be from two shorter ones: all pieces beyond the first take the same time."""
    if length <= LONG:
        return simulated(averaging, group, (length,), (0.0,), itemsize)
    some, more = (simulated(averaging, group, (part,), (0.0,), itemsize) for part in (LONG // 2, LONG))
    return more + (length - LONG) * (more - some) / (LONG - LONG // 2)


def simulated(
    averaging: str,
    group: Group,
    lengths: tuple[int, ...],
    ready: tuple[float, ...],
    itemsize: int,
    shares: tuple[float, ...] = (),
    steps: int = 1,
) -> float:
    """The same, message by message."""
    plan = choose.TABLE[averaging].plan
    return simulate(plan, lengths, ready, itemsize, group.cluster, group.places, group.costs, shares, steps)


@lru_cache(maxsize=4096)
def computed(averaging: str, rank: Rank, ranks: int, length: int, itemsize: int = 4) -> float:
    """Seconds of an all-reduce on machines that are all alike."""
    algorithm = choose.TABLE[averaging]
    if algorithm.growth is Growth.CYCLE:
        of_two = algorithm.plan(0, 2, 2 * ceil(length / ranks))
        sends = takewhile(lambda each: isinstance(each, Send), of_two)
        return _cycle(rank, ranks, [(each.stop - each.start) * itemsize for each in sends])
    return _BY_GROWTH[algorithm.growth](rank, ranks, length, itemsize)


_BY_GROWTH: Mapping[Growth, Callable[[Rank, int, int, int], float]] = {Growth.TREE: stars.tree, Growth.STAR: stars.star}


def _cycle(rank: Rank, ranks: int, sizes: list[int]) -> float:
    """All ranks do the same at the same time, so that a message arrives on a rank when its own arrives on the next.

    A chunk is a ranks-th part of the values, in messages of these sizes. N-1 steps add it up, and N-1 distribute it; a
    message that has arrived is sent on in the next step.
    """
    costs, arrived = rank.costs, [0.0] * len(sizes)
    rate = min(rank.machine.up, rank.machine.down, rank.fastest)
    free = linked = 0.0  # when the rank's thread, and its link, have nothing to do
    for number, size in enumerate(sizes):
        free += costs.message
        linked = max(linked, free) + size / rate
        arrived[number] = linked + costs.latency
    for add, steps in ((costs.add, ranks - 1), (0.0, ranks - 2)):
        times = [free]
        for _ in range(min(steps, TRANSIENT)):
            for number, size in enumerate(sizes):
                free = max(free, arrived[number]) + 2 * costs.message + add * size
                linked = max(linked, free) + size / rate
                arrived[number] = linked + costs.latency
            times.append(free)
        if steps > TRANSIENT:
            more = (steps - TRANSIENT) * (times[-1] - times[-1 - LAST]) / LAST
            free, linked, arrived = free + more, linked + more, [each + more for each in arrived]
    for at in arrived:  # of the last step, which is not sent on
        free = max(free, at) + costs.message
    return free

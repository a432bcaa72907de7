"""Divides work, and the cores of a node, over ranks; measures peak memory; no torch."""

import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path


def share(total: int, parts: int, index: int) -> range:
    """Part `index` of `total` items divided over `parts`, contiguous and as evenly as possible.

    >>> [list(share(5, 3, i)) for i in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(total * index // parts, total * (index + 1) // parts)


@dataclass(frozen=True)
class Spot:
    """A rank's place in a grid."""

    replica: int
    stage: int
    shard: int


@dataclass(frozen=True)
class Grid:
    """Replicas of a model that is itself divided into stages and shards.

    Ranks that communicate most have consecutive numbers, because these are likely to be on one machine: first the
    shards of a stage, then the stages of a replica.

    >>> [str(Grid(2, 2).spot(rank)) for rank in (1, 2)]
    ['Spot(replica=0, stage=1, shard=0)', 'Spot(replica=1, stage=0, shard=0)']
    """

    replicas: int
    stages: int = 1
    shards: int = 1

    def spot(self, rank: int) -> Spot:
        rest, shard = divmod(rank, self.shards)
        return Spot(*divmod(rest, self.stages), shard)

    def rank(self, replica: int, stage: int, shard: int) -> int:
        return (replica * self.stages + stage) * self.shards + shard

    def replicas_of(self, rank: int) -> list[int]:
        """The ranks with the same weights as this one, including itself."""
        spot = self.spot(rank)
        return [self.rank(replica, spot.stage, spot.shard) for replica in range(self.replicas)]

    def shards_of(self, rank: int) -> list[int]:
        """The ranks with the other parts of this one's layers, including itself."""
        spot = self.spot(rank)
        return [self.rank(spot.replica, spot.stage, shard) for shard in range(self.shards)]


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(local_ranks: int) -> int:
    """OMP_NUM_THREADS if it is set, otherwise the cores divided by the ranks of a node."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else max(1, cores() // local_ranks)


def slow_bf16() -> str | None:
    """A warning if this CPU has no instructions for bfloat16; none where that is not known."""
    try:
        flags = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].split()
    except OSError:
        return None
    if {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags):
        return "this CPU has no instructions for bfloat16: --precision bf16 is probably slower than full precision here"
    return None


def crowded(workers: int, threads: int | None, *, bound: bool = False) -> str | None:
    """A warning if this many workers on a machine have fewer cores than threads.

    `bound`: this process may be bound to a part of its node's cores.
    """
    there = os.cpu_count() or 1 if bound else cores()
    if workers * (threads or 1) <= there:
        return None
    each = f" of {threads} threads" if threads and threads > 1 else ""
    return (
        f"{workers} worker{'s' if workers > 1 else ''}{each} on {there} core{'s' if there > 1 else ''} take "
        f"turns: expect no speedup from more than {there}, and do not take these times for those of {workers} machines"
    )


def peak_rss_bytes() -> int:
    """The peak memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

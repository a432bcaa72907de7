"""Which rank does what: how work, and the cores of a node, are divided over ranks, and what memory one has had."""

import os
import resource
import sys


def share(total: int, parts: int, index: int) -> range:
    """Part `index` of `total` things divided over `parts`, contiguous and as even as can be.

    >>> [list(share(5, 3, i)) for i in range(3)]
    [[0], [1, 2], [3, 4]]
    """
    return range(total * index // parts, total * (index + 1) // parts)


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def threads_per_rank(local_ranks: int) -> int:
    """Cores divided over the ranks of a node; OMP_NUM_THREADS, where somebody has set it, wins."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return int(asked) if asked.isdecimal() and int(asked) else max(1, cores() // local_ranks)


def peak_rss_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

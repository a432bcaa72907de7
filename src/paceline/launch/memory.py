"""Keeps freed memory in the process for the next step instead of returning it to the system."""

import contextlib
import ctypes

# glibc's mallopt.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MIB = 1 << 20
MOST = 2047 * MIB  # it takes an int


def keep_freed_memory(*, one_arena: bool = False) -> None:
    """Tell glibc's allocator not to unmap what a step frees; with another allocator, do nothing.

    By default an activation of a few MiB is mapped, faulted in page by page, and unmapped in every step. With two
    processes on two cores that cost mnist-cnn a fifth of its speed (docs/data-parallel.md). On a virtual machine,
    writing 64 MiB takes 27 ms with page faults and 2.6 ms without. Before glibc 2.35 blocks above 32 MiB are always
    mapped. Threads other than the first have their own arenas, which still return memory: with `one_arena` all threads
    share the first arena. That is for ranks that receive messages of megabytes through ZeroMQ's thread.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MOST) or mallopt(M_MMAP_THRESHOLD, 32 * MIB)
        mallopt(M_TRIM_THRESHOLD, MOST)
        mallopt(M_TOP_PAD, 64 * MIB)
        if one_arena:
            mallopt(M_ARENA_MAX, 1)

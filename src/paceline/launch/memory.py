"""Keeps freed memory in the process for the next step instead of returning it to the system."""

import contextlib
import ctypes

# glibc's mallopt. It always maps blocks above 32 MiB.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MIB = 1 << 20


def keep_freed_memory(*, one_arena: bool = False) -> None:
    """Tell glibc's allocator not to unmap what a step frees; with another allocator, do nothing.

    By default an activation of a few MiB is mapped, faulted in page by page, and unmapped in every step. With two
    processes on two cores that cost mnist-cnn a fifth of its speed (docs/data-parallel.md). Threads other than the
    first have their own arenas, which still return memory: with `one_arena` all threads share the first arena. That is
    for ranks that receive messages of megabytes through ZeroMQ's thread.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 * MIB)
        mallopt(M_TRIM_THRESHOLD, 2047 * MIB)
        mallopt(M_TOP_PAD, 64 * MIB)
        if one_arena:
            mallopt(M_ARENA_MAX, 1)

"""Keeps freed memory for the next step instead of giving it back to the system after each."""

import contextlib
import ctypes

# glibc's mallopt. Above 32 MiB it maps memory whatever it is told.
M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -2, -3, -8
MIB = 1 << 20


def keep_freed_memory(*, one_arena: bool = False) -> None:
    """Tell glibc's allocator not to unmap what a step frees; elsewhere do nothing.

    By default an activation of a few MiB is mapped, faulted in page by page, and unmapped in every step. With two
    processes on two cores that cost mnist-cnn a fifth of its speed (docs/data-parallel.md). A thread other than the
    first has an arena of its own, which still gives memory back: with `one_arena` all share the first one's. That is
    for ranks to whom ZeroMQ's thread brings messages of megabytes.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, 32 * MIB)
        mallopt(M_TRIM_THRESHOLD, 2047 * MIB)
        mallopt(M_TOP_PAD, 64 * MIB)
        if one_arena:
            mallopt(M_ARENA_MAX, 1)

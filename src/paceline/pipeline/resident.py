"""The memory of this process, as Linux counts it; elsewhere nothing is known, and nothing is done."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Callable
from pathlib import Path

_PROCESS = Path("/proc/self")


def resident_bytes() -> int:
    """Now; 0 where that cannot be known."""
    try:
        pages = int((_PROCESS / "statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def give_back_memory() -> None:
    """What has been freed, glibc's allocator keeps for the thread that has freed it, which may not need it again."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def most_added(action: Callable[[], object]) -> int:
    """By how much memory grows at most while it is done; 0 where that cannot be known."""
    give_back_memory()
    try:
        (_PROCESS / "clear_refs").write_text("5")  # forgets the peak so far
        before = resident_bytes()
        action()
        peak = next(line for line in (_PROCESS / "status").read_text().splitlines() if line.startswith("VmHWM:"))
        return max(0, int(peak.split()[1]) * 1024 - before)
    except (OSError, ValueError, StopIteration):
        return 0

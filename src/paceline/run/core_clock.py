"""How long the calling thread was ready to run and had no core: the kernel's own count."""

from __future__ import annotations

import os
from contextlib import suppress


class CoreClock:
    """Of the thread that makes it. Linux counts this (scheduler statistics); elsewhere it is always 0.

    Wall time less CPU time would not do: a thread that waits for a message or a GPU is off its core, too. Time that
    torch's other threads had to wait shows only as far as this one waited with them.
    """

    def __init__(self) -> None:
        self._file: int | None = None
        with suppress(OSError):
            self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        self._last = self._read()

    def _read(self) -> int:
        """Nanoseconds since the thread began; reading them takes 3 microseconds."""
        return int(os.pread(self._file, 64, 0).split()[1]) if self._file is not None else 0

    def lap(self) -> float:
        """Seconds since the last call."""
        before, self._last = self._last, self._read()
        return (self._last - before) / 1e9

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

"""Measures how long the calling thread was ready to run but had no core, from the kernel's statistics."""

from __future__ import annotations

import os
from contextlib import suppress


class CoreClock:
    """The clock of the thread that creates it. Linux counts this (scheduler statistics); elsewhere it is always 0.

    Wall time minus CPU time would be wrong: a thread that waits for a message or a GPU is off its core, too. Waiting of
    torch's other threads shows only as far as this thread waited with them.
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

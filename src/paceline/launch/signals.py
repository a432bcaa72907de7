"""Signal handling: the first signal lets ranks finish their step; Ctrl-C after it exits at once, SIGTERM does not."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from paceline.errors import EXIT_INTERRUPTED

# Slurm sends SIGUSR1 before the time limit, if it is asked to.
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def stopping() -> list[int]:
    """The signals that ask a run to stop; SIGHUP only if it is not ignored, as under nohup."""
    ignores_hangup = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in STOPPING if number != signal.SIGHUP or not ignores_hangup]


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """While modules are imported, let Ctrl-C end the process at once and without a traceback."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, lambda *_: os._exit(EXIT_INTERRUPTED))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


class StopSignals:
    """Handles signals in its own thread, because Python's handlers wait until the main thread leaves a long call."""

    def __init__(self, on_first: Callable[[int], None]) -> None:
        self._requested = threading.Event()
        self._on_first = on_first
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        for number in stopping():
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, name="paceline-signals", daemon=True).start()

    def requested(self) -> bool:
        return self._requested.is_set()

    def _watch(self) -> None:
        first = None
        while caught := os.read(self._read, 1):
            number = caught[0]
            # Schedulers send SIGTERM more than once, to launchers and to ranks; later they send SIGKILL.
            if number not in STOPPING or (first is not None and number != signal.SIGINT):
                continue
            if first is not None:
                os._exit(EXIT_INTERRUPTED)
            first = number
            self._requested.set()
            self._on_first(number)

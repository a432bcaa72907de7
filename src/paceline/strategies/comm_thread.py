"""A thread that communicates while the main thread computes."""

import queue
import threading
from collections.abc import Callable

from torch import Tensor


class CommThread:
    """Runs `work` on tensors in the order they are put. An error stops it for good; `wait` raises it."""

    def __init__(self, work: Callable[[Tensor], None]) -> None:
        self._todo: queue.SimpleQueue[Tensor | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._pending = 0
        self._error: BaseException | None = None
        self._work = work
        self._thread = threading.Thread(target=self._run, name="paceline-comm", daemon=True)
        self._thread.start()

    def put(self, tensor: Tensor) -> None:
        self._pending += 1
        self._todo.put(tensor)

    def wait(self) -> None:
        """Return when everything put so far is done. The communicator's own deadline bounds this."""
        while self._pending and self._error is None:
            self._error = self._done.get()
            self._pending -= 1
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        self._todo.put(None)

    def _run(self) -> None:
        while (tensor := self._todo.get()) is not None:
            try:
                self._work(tensor)
            except BaseException as error:  # noqa: BLE001  handed to the main thread, whatever it is
                self._done.put(error)
                return
            self._done.put(None)

"""A progress bar where rank 0 cannot print: in a notebook, and on streams without a file descriptor."""

from __future__ import annotations

import importlib.util
import io
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

from paceline.messages import quiet
from paceline.run.folder import rank_file
from paceline.run.growing import GrowingLines, ReplacedError
from paceline.run.records import Line, Planned, Step

PERIOD = 0.5  # seconds; a rank's file grows once a second


def bar_stream(show: TextIO | None) -> TextIO | None:
    """Where a bar is shown; None where rank 0 prints its progress itself, or none is wanted."""
    if quiet() or not (in_notebook() or (show is not None and not has_descriptor(show))):
        return None
    return show or sys.stdout


def in_notebook() -> bool:
    """Whether this is a kernel of Jupyter: its standard output has the descriptor of the terminal it was started in."""
    found = sys.modules.get("IPython")
    shell = found.get_ipython() if found else None
    return getattr(shell, "kernel", None) is not None


def has_descriptor(stream: TextIO) -> bool:
    try:
        return stream.fileno() >= 0
    except (OSError, io.UnsupportedOperation, AttributeError):
        return False


class StepBar:
    """A bar of the steps of a run, from the file of rank 0 as it grows; use it in a with statement."""

    def __init__(self, folder: Path, stream: TextIO) -> None:
        self._lines = GrowingLines(rank_file(folder, 0), Planned, Step)
        self._stream, self._first = stream, True
        self._bar: Any = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="paceline-bar", daemon=True)

    def __enter__(self) -> Self:
        self._bar = self._make()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._stop.set()
        self._thread.join()
        self._bar.close()

    def _make(self) -> Any:
        """A widget where there are any, else text."""
        if in_notebook() and importlib.util.find_spec("ipywidgets"):
            from tqdm.notebook import tqdm

            return tqdm(desc="training", unit="step")
        from tqdm import tqdm as text

        return text(desc="training", unit="step", file=self._stream, ncols=100)

    def _run(self) -> None:
        try:
            while not self._stop.wait(PERIOD):
                self._show(self._lines.read())
            self._show(self._lines.read())
        except ReplacedError:  # the run did not begin, and its folder was removed
            return

    def _show(self, lines: list[Line]) -> None:
        last: Step | None = None
        for line in lines:
            if isinstance(line, Planned):
                self._bar.reset(total=line.steps)
                self._first = True
            elif isinstance(line, Step):
                self._bar.n, last = line.step + 1, line
        if last:
            if self._first:  # its speed is that of the steps from here on; a run may be continued
                self._bar.initial, self._first = self._bar.n, False
            loss = {} if last.loss is None else {"loss": f"{last.loss:.4f}"}
            self._bar.set_postfix({**loss, "samples/s": f"{last.samples / last.seconds:,.0f}"}, refresh=False)
        self._bar.refresh()

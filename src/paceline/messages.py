"""Messages to whoever runs a command, through the logger "paceline", on standard error; results are printed instead."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from paceline.errors import visible

LOGGER = logging.getLogger("paceline")


class _Terminal(logging.Handler):
    """Writes `paceline: ` and the message; a warning is marked as one. The logger paceline.lab is `paceline lab: `."""

    def emit(self, record: logging.LogRecord) -> None:
        mark = "warning: " if record.levelno == logging.WARNING else ""
        print(visible(f"{record.name.replace('.', ' ')}: {mark}{record.getMessage()}"), file=sys.stderr, flush=True)


def configure(level: int | str = logging.INFO) -> None:
    """For our own programs. Where Paceline is a library, whoever uses it configures logging."""
    LOGGER.handlers, LOGGER.propagate = [_Terminal()], False
    LOGGER.setLevel(level)


def quiet() -> bool:
    """Whether only warnings and errors are wanted: no progress, no bars."""
    return LOGGER.level > logging.INFO


def bar_options() -> dict[str, Any]:
    """Of tqdm's bars: on standard error, where that is a terminal."""
    if quiet() or not sys.stderr.isatty():
        return {"disable": True}
    # A terminal may not know its size, as in `script` or a container; tqdm then shows nothing.
    try:
        known = os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:
        known = False
    return {"leave": False} | ({"dynamic_ncols": True} if known else {"ncols": 80, "nrows": 24})


def end_line() -> None:
    """Before a message about Ctrl-C: a terminal has shown ^C, without the end of a line."""
    if sys.stderr.isatty():
        print(file=sys.stderr)

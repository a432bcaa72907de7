"""Puts the lines of ranks and nodes on other machines on the clock of rank 0, as far as it was measured."""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from paceline.run.lines import L
from paceline.run.records import Clock, Line, Start
from paceline.strict_json import build, open_regular, parse

LINE = b'{"kind": "%s"'  # as `LineWriter` begins a line


def aligned(lines: Iterable[Line]) -> Iterator[Line]:
    """A rank's lines in their order, those of kind `start` and `clock` included, with times of rank 0's clock."""
    offset, held = 0.0, list[Line]()
    for line in lines:
        if isinstance(line, Start):  # another process, perhaps on another machine; its clock's line is the next
            yield from held
            offset, held = 0.0, [line]
            continue
        if isinstance(line, Clock):
            offset = line.offset
        yield from (shifted(each, offset) for each in (*held, line))
        held = []
    yield from held


def shifted(line: L, offset: float) -> L:
    """The same, with its time on another clock."""
    return replace(cast(Any, line), time=cast(Any, line).time + offset) if offset and hasattr(line, "time") else line


def read_clock(path: Path) -> Clock | None:
    """What the last process of a rank found out; None where nothing was measured.

    It is looked for from the end of the file, without reading the lines of all steps.
    """
    try:
        with open_regular(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as text:
            at = text.rfind(LINE % Clock.kind.encode())
            if at < 0 or text.find(LINE % Start.kind.encode(), at) >= 0:
                return None
            text.seek(at)
            return build(Clock, parse(text.readline().decode()), extra=True)
    except (OSError, ValueError):  # there is no file, or an empty one, or the line is not finished
        return None

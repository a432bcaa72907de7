"""Reads a file of JSON lines as another process appends to it: each time only what is new."""

from __future__ import annotations

import os
from pathlib import Path

from paceline.run.lines import parse_line
from paceline.run.records import Line, Step
from paceline.strict_json import build, open_regular

# Bytes that are read at once. Before the last two blocks, one step in as many as there are blocks is read.
BLOCK = 1 << 19
# As `LineWriter` begins the line of a step.
STEP = f'{{"kind": "{Step.kind}"'.encode()


class ReplacedError(Exception):
    """The file is not the one that was read before, or has lost a part of it."""


class GrowingLines:
    """The lines of these kinds of a file that may not exist yet, or is still written.

    A last line that is not finished is left for the next time. `faults` says what cannot be read, and was left out. Of
    a file that has grown by megabytes only some of the steps are read, evenly spaced, but all lines of other kinds.
    `last` is how many bytes at the end are read at most, beside the first line.
    """

    def __init__(self, path: Path, *kinds: type[Line], last: int | None = None) -> None:
        self.path, self.faults = path, dict[str, str]()  # by what cannot be read
        self._by_name = {kind.kind: kind for kind in kinds}
        self._last, self._at, self._number = last, 0, 0  # the file's, so that another of this name is recognised
        self._unreadable = 0

    def read(self) -> list[Line]:
        """What is new. Raises ReplacedError."""
        found: list[Line] = []
        try:
            with open_regular(self.path) as file:
                status = os.fstat(file.fileno())
                if status.st_size < self._at or self._number not in (0, status.st_ino):
                    raise ReplacedError(f"{self.path.name} was replaced")
                self._number = status.st_ino
                if self._last is not None and status.st_size - self._at > self._last:
                    if self._at == 0:
                        found += self._parsed(file.readline(BLOCK), 1)
                    file.seek(status.st_size - self._last)
                    self._at = file.tell() + len(file.readline())
                file.seek(self._at)
                every = 1 + (status.st_size - self._at) // BLOCK
                while block := _finished(file.read(BLOCK)):
                    self._at += len(block)
                    found += self._parsed(block, every if status.st_size - self._at > BLOCK else 1)
                    file.seek(self._at)
            self.faults.pop("file", None)
        except FileNotFoundError:
            if self._at:
                raise ReplacedError(f"{self.path.name} is gone") from None
        except (OSError, ValueError) as error:
            self.faults["file"] = f"{self.path.name}: {error}"
        return found

    def _parsed(self, block: bytes, every: int) -> list[Line]:
        """All lines but those of steps, of which one in `every` is read."""
        found = list[Line]()
        for number, line in enumerate(block.splitlines()):
            if number % every and line.startswith(STEP):
                continue
            try:
                if record := parse_line(line.decode("utf-8", errors="replace"), self._by_name):
                    found.append(build(*record, extra=True))
            except ValueError as error:
                self._unreadable += 1
                lines = f"{self._unreadable} line{'s' if self._unreadable > 1 else ''}"
                self.faults["lines"] = f"{lines} of {self.path.name} cannot be read: {error}"
        return found


def _finished(read: bytes) -> bytes:
    """Its finished lines; what is longer than a block is no line of ours, and not waited for."""
    return read if len(read) == BLOCK and b"\n" not in read else read[: read.rfind(b"\n") + 1]

"""The lines of a run's files as anybody would read them, without the reader that is tested."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any


def raw_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Without those that are not finished yet, or were cut short; none where there is no file."""
    for line in path.read_text().splitlines(keepends=True) if path.exists() else ():
        with suppress(ValueError):
            yield json.loads(line)


class RawWriter:
    """Appends lines, whatever they hold; after one that was cut short, on a line of its own."""

    def __init__(self, path: Path) -> None:
        cut = path.exists() and path.read_text()[-1:] not in ("", "\n")
        self._file = path.open("a")
        if cut:
            self._file.write("\n")

    def write(self, kind: str, **values: Any) -> None:
        self._file.write(json.dumps({"kind": kind, **values}) + "\n")

    def flush(self) -> None:
        self._file.flush()

    def close(self) -> None:
        self._file.close()

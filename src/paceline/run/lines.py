"""Files of JSON lines: one writer, one reader."""

from __future__ import annotations

import os
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from paceline.run.records import Line, Resumed, Step, Timeline
from paceline.strict_json import build, dump, naming, open_regular, parse, read_text

L = TypeVar("L", bound=Line)
PLAIN = frozenset((int, float, str, bool, type(None)))
STEP = re.compile(rb'"(?:step|timeline)", ?"step": ?([0-9]{1,19})[,}]')  # the number, in a line that is about a step
TAIL = 1 << 16  # bytes: more than a step has


class LineWriter:
    """Appends records to a file; a crash loses at most the lines since the last flush."""

    def __init__(self, path: Path) -> None:
        cut = _is_cut(path)
        self._file = path.open("a", encoding="utf-8")
        self._waiting: list[
            Line
        ] = []  # encoded together: one at a time, between steps, each takes several times as long
        if cut:  # the next line must not be lost with the unfinished one
            self._file.write("\n")

    def write(self, line: Line) -> None:
        self._waiting.append(line)

    def flush(self) -> None:
        lines, self._waiting = self._waiting, []
        self._file.writelines(dump({"kind": line.kind, **_fields_of(line)}) + "\n" for line in lines)
        self._file.flush()

    def sync(self) -> None:
        """Wait until what was flushed is on the disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        if not self._file.closed:
            self.flush()
        self._file.close()


def _fields_of(line: Line) -> dict[str, Any]:
    """Its fields, those left out that are optional and have nothing to say."""
    optional = _optional(cast(Hashable, type(line)))
    return {
        name: _plain(value)
        for name, value in vars(line).items()
        if value or name not in optional or value != optional[name]
    }


@cache
def _optional(kind: Any) -> dict[str, Any]:
    """The fields that a reader fills in when they are missing, with what it puts there."""
    defaults = {f.name: f.default if f.default_factory is MISSING else f.default_factory() for f in fields(kind)}
    return {name: value for name, value in defaults.items() if value is not MISSING}


def _plain(value: Any) -> Any:
    if type(value) in PLAIN:  # nearly all are; a step has many, and the next one waits
        return value
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else value


def _is_cut(path: Path) -> bool:
    """Whether there is a last line that a crash left unfinished."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"
    except OSError:
        return False


def read_lines(path: Path, *kinds: type[L]) -> Iterator[L]:
    """The lines of these kinds, every value checked; none where there is no file.

    A line that a crash cut short is left out; so are lines that a resumed run has superseded, and fields that a later
    version has added. Raises ValueError, with the file's name, for a line that has other fields than its kind.
    """
    with naming(path):
        yield from _standing((build(kind, values, extra=True) for kind, values in _records(path, kinds)), kinds)


def read_sound_lines(path: Path, *kinds: type[L], last: int | None = None) -> Iterator[L]:
    """The same, without those that cannot be: how a run ended must be found out whatever is in its files.

    With `last`, only what the last so many bytes of the file hold.
    """

    def sound() -> Iterator[Line]:
        for kind, values in _records(path, kinds, last):
            with suppress(ValueError):
                yield build(kind, values, extra=True)

    yield from _standing(sound(), kinds)


def stream_lines(path: Path, *kinds: type[L], steps: range | None = None) -> Iterator[L]:
    """As read_lines, but line by line: the file may be larger than memory. Of steps and timelines, only `steps`."""
    with naming(path):
        resumes = [(at, line) for at, line in _streamed(path, ()) if isinstance(line, Resumed)]
        for at, line in _streamed(path, kinds, steps):
            if isinstance(line, tuple(kinds)) and not any(where > at and line.superseded(by) for where, by in resumes):
                yield cast(L, line)


def _streamed(path: Path, kinds: Iterable[type[Line]], steps: range | None = None) -> Iterator[tuple[int, Line]]:
    """The lines of these kinds, and those that say that the run was resumed, each with its number in the file."""
    by_name = _by_name(kinds)
    wanted = re.compile(rb'"kind"\s*:\s*"(?:' + "|".join(map(re.escape, by_name)).encode() + rb')"')
    try:
        with open_regular(path) as file:
            for at, raw in enumerate(file):
                # Parsing takes most of the time: first look for the kind and the number.
                other = steps is not None and (found := STEP.search(raw)) and int(found[1]) not in steps
                if other or not wanted.search(raw):
                    continue
                try:
                    record = parse_line(raw.decode("utf-8", errors="replace"), by_name)
                except ValueError:  # cut short
                    continue
                if record:
                    line = build(record[0], record[1], extra=True)
                    if steps is None or not isinstance(line, Step | Timeline) or line.step in steps:
                        yield at, line
    except OSError:
        return


def last_step(path: Path) -> int | None:
    """The number of the last step in a rank's file, from its end; None where there is none."""
    steps = [line.step for line in read_sound_lines(path, Step, last=TAIL)]
    return steps[-1] if steps else None


def _standing(lines: Iterable[Line], kinds: Sequence[type[L]]) -> list[L]:
    """The lines of these kinds that no later line of a resumed run supersedes."""
    found: list[Line] = []
    for line in lines:
        if isinstance(line, Resumed):
            found = [each for each in found if not each.superseded(line)]
        if isinstance(line, tuple(kinds)):
            found.append(line)
    return cast(list[L], found)


def _records(
    path: Path, kinds: Iterable[type[Line]], last: int | None = None
) -> Iterator[tuple[type[Line], dict[str, Any]]]:
    """The lines that are JSON and of one of these kinds, or say that the run was resumed, with what they hold."""
    by_name = _by_name(kinds)
    try:
        text = read_text(path, last)
    except (OSError, ValueError):
        return
    for line in text.splitlines():
        with suppress(ValueError):
            if found := parse_line(line, by_name):
                yield found


def parse_line(line: str, by_name: Mapping[str, type[Line]]) -> tuple[type[Line], dict[str, Any]] | None:
    """A line of one of these kinds, not checked yet; None if it is of another. Raises ValueError if it is no JSON."""
    record = parse(line)
    if isinstance(record, dict) and isinstance(name := record.get("kind"), str) and name in by_name:
        return by_name[name], record
    return None


def _by_name(kinds: Iterable[type[Line]]) -> dict[str, type[Line]]:
    return {kind.kind: kind for kind in kinds} | {Resumed.kind: Resumed}

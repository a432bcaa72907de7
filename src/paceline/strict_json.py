"""JSON, strictly: what is written is valid everywhere, and what is read has the types that it should; no torch."""

from __future__ import annotations

import json
import os
import stat
import types
import typing
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from math import isfinite, nan
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeVar

# No count, size or time of a run is larger; sums and squares of such numbers are finite.
LARGEST = 2**63
# Values without a type of their own, such as a lab's description, may be nested this deeply.
DEEPEST = 16
# A file of records that is larger is not one of ours.
LARGEST_FILE = 4 << 30

T = TypeVar("T")
Check = Callable[[Any, str], Any]
NAMES: dict[Any, str] = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


@dataclass(frozen=True)
class Bounds:
    """The smallest and the largest value that a number may have."""

    least: float
    most: float


Count = Annotated[int, Bounds(0, LARGEST)]
Positive = Annotated[int, Bounds(1, LARGEST)]
Ranks = Annotated[int, Bounds(0, 100_000)]
Seconds = Annotated[float, Bounds(0, 1e10)]  # 300 years: a length of time, or a time of the Unix clock


ENCODER = json.JSONEncoder(allow_nan=False)  # made once: a step is recorded by it


def dump(value: Any, indent: int | None = None) -> str:
    """As JSON. It has no word for numbers that are not finite: they are null."""
    try:
        return ENCODER.encode(value) if indent is None else json.dumps(value, indent=indent, allow_nan=False)
    except ValueError:
        return json.dumps(finite(value), indent=indent, allow_nan=False)


def finite(value: Any) -> Any:
    """As JSON can have it: None instead of numbers that are not finite, and plain values instead of NumPy's."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float):
        return value if isfinite(value) else None
    return finite(value.tolist()) if hasattr(value, "tolist") else value


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A regular file; reading a pipe could wait for ever. Raises OSError or ValueError."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError("it is not a regular file")
        yield file


def read_text(path: Path, last: int | None = None) -> str:
    """A regular file as text, or its `last` bytes. Raises OSError or ValueError."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if min(size, last or size) > LARGEST_FILE:
            raise ValueError("it is too large")
        if last is not None:
            file.seek(max(0, size - last))
        return file.read().decode("utf-8", errors="replace")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Let a ValueError say which file it is about."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None


def parse(text: str) -> Any:
    """A value from JSON whose numbers are finite and not too large. Raises ValueError."""
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_float, parse_int=_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word[:40]} is not a number of JSON, or too large")


def _float(text: str) -> float:
    value = float(text)
    return value if -LARGEST <= value <= LARGEST else _refuse(text)


def _int(text: str) -> int:
    return int(text) if len(text) < 20 and -LARGEST <= int(text) <= LARGEST else _refuse(text)


def build(kind: type[T], values: Any, *, extra: bool = False) -> T:
    """A dataclass from parsed JSON, every value checked against its type. Raises ValueError.

    `extra`: there may be values that it has no field for; they are left out.
    """
    if not isinstance(values, dict):
        raise ValueError(f"a table is expected for {kind.__name__}")
    known, required = _fields(typing.cast(Hashable, kind), extra)
    if not extra and (unknown := [name for name in values if name not in known]):
        raise ValueError(f"{kind.__name__} has no {unknown[0][:40]!r}")
    if missing := [name for name in required if name not in values]:
        raise ValueError(f"{missing[0]} is missing")
    return kind(**{name: known[name](value, name) for name, value in values.items() if name in known})


@cache
def _fields(kind: Any, extra: bool) -> tuple[dict[str, Check], list[str]]:
    """How each field of a dataclass is checked, and those that have no default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    found = [f for f in fields(kind) if f.init]
    required = [f.name for f in found if f.default is MISSING and f.default_factory is MISSING]
    return {f.name: _check(hints[f.name], extra) for f in found}, required


def _check(hint: Any, extra: bool) -> Check:
    """Returns a value and its name to the value, if it is what the type says; or else raises ValueError."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        inner = _check(arguments[0], extra)
        return lambda value, name: None if value is None else inner(value, name)
    if origin in (list, tuple, dict):
        kind = arguments[-1] if origin is dict else arguments[0]
        return _check_each(origin, _check(kind, extra), kind)
    if is_dataclass(hint):
        return lambda value, name: build(typing.cast(type, hint), value, extra=extra)
    if origin is Annotated or hint in (int, float):
        kind = arguments[0] if arguments else hint
        return _check_number(kind, arguments[1] if arguments else Bounds(0 if kind is int else -LARGEST, LARGEST))
    if hint is Any:
        return plain

    def check(value: Any, name: str) -> Any:
        return value if isinstance(value, hint) else _refuse_value(value, name, NAMES[hint])

    return check


def _check_each(kind: type, item: Check, hint: Any) -> Check:
    """A list, tuple or table; a number in it that was not finite was written as null."""

    def each_of(value: Any, name: str) -> Any:
        return nan if value is None and hint is float else item(value, name)

    def check(value: Any, name: str) -> Any:
        if not isinstance(value, dict if kind is dict else list):
            return _refuse_value(value, name, "a table" if kind is dict else "a list")
        if isinstance(value, dict):
            return {key: each_of(each, name) for key, each in value.items()}
        return kind(each_of(each, name) for each in value)

    return check


def _check_number(kind: type, bounds: Bounds) -> Check:
    allowed, least, most = ((int, float) if kind is float else (int,)), bounds.least, bounds.most

    def check(value: Any, name: str) -> Any:
        if type(value) in allowed and least <= value <= most:
            return kind(value)
        upper = f" to {most:g}" if most < LARGEST else " or more"
        return _refuse_value(value, name, NAMES[kind] + (f" of {least:g}{upper}" if least > -LARGEST else ""))

    return check


def _refuse_value(value: Any, name: str, expected: str) -> Any:
    raise ValueError(f"{name} is {_shown(value)}, and {expected} is expected")


def plain(value: Any, name: str, depth: int = DEEPEST) -> Any:
    """A value that may be anything, if it is not nested too deeply and its numbers are in bounds. Raises ValueError."""
    if depth < 0:
        raise ValueError(f"{name} is nested too deeply")
    if isinstance(value, int | float) and not -LARGEST <= value <= LARGEST:
        raise ValueError(f"{name} is {_shown(value)}")
    if isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            plain(each, name, depth - 1)
    return value


def _shown(value: Any) -> str:
    """For an error; what is nested may be too deep for repr()."""
    if isinstance(value, dict | list):
        return "a table" if isinstance(value, dict) else "a list"
    text = repr(value) if not isinstance(value, int) or -LARGEST <= value <= LARGEST else "too large"
    return text if len(text) <= 40 else f"{text[:37]}..."

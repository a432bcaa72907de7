"""Claims as an experiment's file declares them: what is measured of which settings, and what is claimed of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any

from paceline.errors import UsageError, unknown
from paceline.spec import FIELDS
from paceline.strict_json import LARGEST, Bounds, build

# What can be measured along a line of settings that differ in their number of workers alone, and the bounds that can be
# claimed of it.
MEASURES: dict[str, tuple[str, ...]] = {
    "added-speed": ("below", "at_least"),  # of the speed that the last workers could add: from half of them to all
    "efficiency": ("below", "at_least"),  # with the most workers, beside one worker or the fewest
    "speed": ("faster_than", "any"),  # with the most workers that both ran with
    "bytes": ("law", "within", "most_gradients"),  # that an update moves through the busiest server, or through a node
    "rate": ("law", "within"),  # the same for each second
}
# How a number depends on the workers n.
LAWS: dict[str, Callable[[int], float]] = {"constant": lambda n: 1.0, "n": float, "(n-1)/n": lambda n: (n - 1) / n}
Part = Annotated[float, Bounds(0.0, LARGEST)]


@dataclass(frozen=True)
class Reading:
    """One interpretation of a claim; each is decided separately.

    `name` is empty if there is only one. `figure` names the number that decides, if its extremes should be shown.
    """

    measure: str
    name: str = ""
    figure: str = ""
    below: Part | None = None
    at_least: Part | None = None
    faster_than: dict[str, Any] | None = None  # which settings, as in `of`
    any: bool = False  # whether it is enough that one setting of a problem is faster
    law: str = "constant"
    within: Part = 0.0  # how far, as a part, numbers may be from the law
    most_gradients: Part | None = None  # times the gradient's size: more is not allowed

    @property
    def bounds(self) -> list[str]:
        """What is claimed of the measure, by name."""
        return [f.name for f in fields(self) if f.name not in GENERAL and getattr(self, f.name) != f.default]


@dataclass(frozen=True)
class Declared:
    """A claim about the settings that `of` matches; `say` has options that a case is always named with."""

    name: str
    text: str
    of: dict[str, Any]
    reading: tuple[Reading, ...]
    source: str = ""
    say: tuple[str, ...] = ()


GENERAL = ("name", "measure", "figure")
OF_READING = tuple(each.name for each in fields(Reading))
OF_CLAIM = tuple(each.name for each in fields(Declared))


def read_claims(rows: Any, where: str) -> tuple[Declared, ...]:
    """The claims of a file; UsageError if one cannot be evaluated."""
    if not isinstance(rows, list | tuple):
        raise UsageError(f"{where}: {rows!r} is not a list of tables; write [[claim]]")
    found = tuple(_claim(row, f"{where} {number}") for number, row in enumerate(rows, 1))
    names = [each.name for each in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise UsageError(f"{where}: two claims are called {twice[0]!r}")
    return found


def _claim(row: Any, where: str) -> Declared:
    """A claim with one reading has its values beside its own."""
    _check_keys(row, (*OF_CLAIM, *OF_READING), where)
    inline = {key: value for key, value in row.items() if key not in OF_CLAIM}
    rest = {key: value for key, value in row.items() if key in OF_CLAIM}
    if inline and "reading" in row:
        raise UsageError(f"{where}: {next(iter(inline))} is for a claim without readings: give it in one of them")
    readings = rest.setdefault("reading", [inline])
    for number, each in enumerate(readings if isinstance(readings, list) else [], 1):
        _check_keys(each, OF_READING, f"{where}: reading {number}")
    try:
        made = build(Declared, rest)
    except ValueError as error:
        raise UsageError(f"{where}: {error}") from None
    if not made.reading:
        raise UsageError(f"{where}: reading is an empty list")
    for name in made.say:
        if name not in FIELDS:
            raise UsageError(f"{where}: say: {unknown('option', name, FIELDS)}")
    _check_match(made.of, f"{where}: of")
    for number, each in enumerate(made.reading, 1):
        _check_reading(each, where if inline else f"{where}: reading {number}")
    return made


def _check_reading(one: Reading, where: str) -> None:
    if one.measure not in MEASURES:
        raise UsageError(f"{where}: {unknown('measure', one.measure, MEASURES)}")
    if one.law not in LAWS:
        raise UsageError(f"{where}: {unknown('law', one.law, LAWS)}")
    allowed = MEASURES[one.measure]
    if wrong := [name for name in one.bounds if name not in allowed]:
        raise UsageError(f"{where}: {wrong[0]} is not for the measure {one.measure}, which has {', '.join(allowed)}")
    wanted = [name for name in ("below", "at_least", "faster_than", "within") if name in allowed]
    if len([name for name in wanted if name in one.bounds]) != 1:
        raise UsageError(f"{where}: the measure {one.measure} takes {' or '.join(wanted)}")
    if one.faster_than is not None:
        _check_match(one.faster_than, f"{where}: faster_than")


def _check_match(row: Mapping[str, Any], where: str) -> None:
    """Which settings are meant: an option's value, a list of values, or { least = 2 }."""
    _check_keys(row, (*FIELDS, "nodes"), where)
    for key, value in row.items():
        if isinstance(value, Mapping) and (set(value) != {"least"} or type(value["least"]) is not int):
            raise UsageError(f"{where}: {key} is {value!r}; it takes a value, a list of values, or {{ least = 2 }}")


def matches(wanted: Mapping[str, Any], values: Mapping[str, Any]) -> bool:
    """Whether these values are the ones that `of` or `faster_than` means."""
    for name, value in wanted.items():
        mine = values.get(name)
        if isinstance(value, Mapping):
            if not isinstance(mine, int | float) or mine < value["least"]:
                return False
        elif mine not in (value if isinstance(value, list) else [value]):
            return False
    return True


def _check_keys(row: Any, allowed: tuple[str, ...], where: str) -> None:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: {row!r} is not a table")
    for key in row:
        if key not in allowed:
            raise UsageError(f"{where}: {unknown('key', key, allowed)}")

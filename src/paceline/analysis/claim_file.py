"""Claims as an experiment's file declares them: what is measured of which settings, and what is claimed of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.spec import FIELDS

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
TEXTS = ("name", "text", "source")
READING = ("measure", "figure", "below", "at_least", "faster_than", "any", "law", "within", "most_gradients")
KEYS = (*TEXTS, "of", "say", "reading", *READING)


@dataclass(frozen=True)
class Reading:
    """One interpretation of a claim; each is decided separately.

    `name` is empty if there is only one. `figure` names the number that decides, if its extremes should be shown.
    """

    measure: str
    name: str = ""
    figure: str = ""
    below: float | None = None
    at_least: float | None = None
    faster_than: Mapping[str, Any] | None = None  # which settings, as in `of`
    any: bool = False  # whether it is enough that one setting of a problem is faster
    law: str = "constant"
    within: float = 0.0  # how far, as a part, numbers may be from the law
    most_gradients: float | None = None  # times the gradient's size: more is not allowed


@dataclass(frozen=True)
class Declared:
    """A claim about the settings that `of` matches; `say` has options that a case is always named with."""

    name: str
    text: str
    source: str
    of: Mapping[str, Any]
    say: tuple[str, ...]
    readings: tuple[Reading, ...]


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
    _check_keys(row, KEYS, where)
    texts = {key: _typed(row.get(key, ""), str, "a text", f"{where}: {key}") for key in TEXTS}
    for key in ("name", "text"):
        if not texts[key]:
            raise UsageError(f"{where}: {key} is missing")
    say = tuple(_typed(row.get("say", []), list, "a list of options", f"{where}: say"))
    for name in say:
        if _typed(name, str, "a text", f"{where}: say") not in FIELDS:
            raise UsageError(f"{where}: say: {unknown('option', name, FIELDS)}")
    given, readings = row.get("reading"), tuple[Reading, ...]()
    if given is None:
        readings = (_reading({key: row[key] for key in READING if key in row}, where),)
    elif own := [key for key in READING if key in row]:
        raise UsageError(f"{where}: {own[0]} is for a claim without readings: give it in one of them")
    else:
        tables = _typed(given, list, "a list of tables", f"{where}: reading")
        readings = tuple(_reading(each, f"{where}: reading {number}") for number, each in enumerate(tables, 1))
    if not readings:
        raise UsageError(f"{where}: reading is an empty list")
    return Declared(**texts, of=_match(row.get("of", {}), f"{where}: of"), say=say, readings=readings)


def _reading(row: Any, where: str) -> Reading:
    _check_keys(row, ("name", *READING), where)
    if "measure" not in row:
        raise UsageError(f"{where}: measure is missing; it is one of {', '.join(MEASURES)}")
    measure = _typed(row["measure"], str, "a text", f"{where}: measure")
    if measure not in MEASURES:
        raise UsageError(f"{where}: {unknown('measure', measure, MEASURES)}")
    for key in row:
        if key not in ("name", "measure", "figure", *MEASURES[measure]):
            raise UsageError(
                f"{where}: {key} is not for the measure {measure}, which has {', '.join(MEASURES[measure])}"
            )
    values = {key: value for key, value in row.items() if key not in ("below", "at_least", "within", "most_gradients")}
    for key in row.keys() - values.keys():
        if type(row[key]) not in (int, float) or not row[key] >= 0:
            raise UsageError(f"{where}: {key} is {row[key]!r}; it takes a number that is not negative")
        values[key] = float(row[key])
    for key in ("name", "figure"):
        _typed(row.get(key, ""), str, "a text", f"{where}: {key}")
    _typed(row.get("any", False), bool, "true or false", f"{where}: any")
    if _typed(row.get("law", "constant"), str, "a text", f"{where}: law") not in LAWS:
        raise UsageError(f"{where}: {unknown('law', row['law'], LAWS)}")
    wanted = {"speed": ("faster_than",), "bytes": ("within",), "rate": ("within",)}.get(measure, ("below", "at_least"))
    if sum(key in row for key in wanted) != 1:
        raise UsageError(
            f"{where}: the measure {measure} takes {' or '.join(wanted)}{', not both' * (len(wanted) > 1)}"
        )
    if measure == "speed":
        values["faster_than"] = _match(row["faster_than"], f"{where}: faster_than")
    return Reading(**values)


def _match(row: Any, where: str) -> dict[str, Any]:
    """Which settings are meant: an option's value, a list of values, or { least = 2 }."""
    _check_keys(row, (*FIELDS, "nodes"), where)
    for key, value in row.items():
        if isinstance(value, Mapping) and (set(value) != {"least"} or type(value["least"]) is not int):
            raise UsageError(f"{where}: {key} is {value!r}; it takes a value, a list of values, or {{ least = 2 }}")
    return dict(row)


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


def _typed(value: Any, kind: type, what: str, where: str) -> Any:
    if not isinstance(value, kind):
        raise UsageError(f"{where}: {value!r} is not {what}")
    return value

"""An option of a run: its help, the values it takes, what it affects and how it is said in words; no torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import Field, field
from typing import Any

# What an option can affect; see `option`.
PROBLEM, LEARNING, DIVISION, LENGTH, NOTHING = AFFECTS = ("problem", "learning", "division", "length", "nothing")

Label = str | Callable[[Any], str] | None


def option(
    default: Any,
    about: str,
    *,
    affects: str = DIVISION,
    label: Label = None,
    unit: str = "",
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
    formerly: str = "",
    metavar: str = "",
    kept: bool | None = None,
) -> Any:
    """A field of options: its flag's help, the values it takes, and what other tools call it `elsewhere`.

    `formerly` is a name that it had in an earlier version, which is still accepted. `kept` says whether a run that is
    continued must keep its value; unless given, those that affect the problem or learning must.

    `affects` says what two runs that differ in it can be compared for:

    - problem: nothing. They compute something else.
    - learning: speed. They compute the same, and learn something else.
    - division: speed and learning. The same work is divided otherwise.
    - length: speed. One is longer than the other.
    - nothing: all. They are repeats of one setting.

    `label` and `unit` are for tables and legends: "learning rate" with 0.1 is said as "learning rate 0.1", the unit
    "worker" without a label as "4 workers", and a switch "encryption" that is on by default as "no encryption" where it
    is off. A function gives the words itself. Without a label and a unit it is the option's name.
    """
    assert affects in AFFECTS, affects
    metadata = {"about": about, "affects": affects, "label": label, "unit": unit, "least": least, "most": most,
                "choices": choices, "elsewhere": elsewhere, "formerly": formerly, "metavar": metavar,
                "kept": affects in (PROBLEM, LEARNING) if kept is None else kept}  # fmt: skip
    return field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """An option as people write it."""
    return "--" + name.replace("_", "-")


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("tch") else "s")


def in_words(name: str, value: Any, made: Field[Any] | None = None) -> str:
    """An option with a value as tables and legends have it; empty where there is nothing to say: no value, or a switch
    as it is by default.
    """
    default, metadata = (made.default, made.metadata) if made else (None, {})
    label, unit = metadata.get("label"), metadata.get("unit", "")
    if value is None:
        return ""
    if callable(label):
        return str(label(value))
    label = ("" if unit else name.replace("_", " ")) if label is None else label
    if isinstance(value, bool):
        return "" if value == default else label if value else f"no {label}"
    if isinstance(value, list | tuple):
        value = " and ".join(map(str, value))
    elif isinstance(value, int | float):
        short = f"{value:,}" if isinstance(value, int) else f"{value:g}"
        value = short if float(short.replace(",", "")) == value else repr(value)
        unit = plural(unit) if len(unit) > 2 and value != "1" else unit
    return " ".join(part for part in (label, str(value), unit) if part)

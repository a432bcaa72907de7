"""An option of a run: a dataclass field that knows its flag's help and the values it takes; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any


def option(
    default: Any,
    about: str,
    *,
    least: float | None = None,
    most: float | None = None,
    choices: Sequence[str] = (),
    elsewhere: Sequence[str] = (),
) -> Any:
    """A field of options: its flag's help, the values it takes, and what other tools call it `elsewhere`."""
    metadata = {"about": about, "least": least, "most": most, "choices": choices, "elsewhere": elsewhere}
    return field(default=default, metadata=metadata)


def flag(name: str) -> str:
    """An option as people write it."""
    return "--" + name.replace("_", "-")

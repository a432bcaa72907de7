"""What other packages add, by entry points; no torch."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import TypeVar

from paceline.errors import UsageError

T = TypeVar("T")


def plugins(group: str, kind: type[T]) -> list[T]:
    """The objects that installed packages offer in this group, in the order of their names."""
    found = []
    for entry in sorted(entry_points(group=group), key=lambda entry: entry.name):
        try:
            made = entry.load()
        except Exception as error:
            raise UsageError(
                f"the plug-in {entry.name} ({entry.value}) of {group} cannot be loaded: {type(error).__name__}: {error}"
            ) from error
        if not isinstance(made, kind):
            raise UsageError(f"the plug-in {entry.name} ({entry.value}) of {group} is not a {kind.__name__}")
        found.append(made)
    return found

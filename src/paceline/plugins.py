"""Tables of Paceline's own objects and of those that other packages add with entry points; no torch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cache, cached_property
from importlib.metadata import entry_points
from typing import Protocol, TypeVar

from paceline.errors import UsageError


class Named(Protocol):
    @property
    def name(self) -> str: ...


T = TypeVar("T", bound=Named)
_installed = cache(entry_points)  # cached, because reading every package's metadata is slow


class Table(Mapping[str, T]):
    """Objects by name: Paceline's own, then those of installed packages in this entry-point group, sorted by name.

    Other packages are imported when the table is first used, not when it is created, because they import its classes.
    """

    def __init__(self, group: str, kind: type[T], ours: Iterable[T]) -> None:
        self._group, self._kind, self._ours = group, kind, tuple(ours)

    @cached_property
    def _all(self) -> dict[str, T]:
        table = {each.name: each for each in self._ours}
        for entry in sorted(_installed().select(group=self._group), key=lambda entry: entry.name):
            who = f"the plug-in {entry.name} ({entry.value}) of {self._group}"
            try:
                made = entry.load()
            except Exception as error:
                raise UsageError(f"{who} cannot be loaded: {type(error).__name__}: {error}") from error
            if not isinstance(made, self._kind):
                raise UsageError(f"{who} is not a {self._kind.__name__}")
            if made.name in table:
                raise UsageError(f"{who} has the name {made.name}, which is already taken")
            table[made.name] = made
        return table

    def __getitem__(self, name: str) -> T:
        return self._all[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

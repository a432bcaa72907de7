"""Reads a paper's own numbers from an experiment file; each row says which runs to compare with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paceline.errors import UsageError, unknown
from paceline.spec import FIELDS

# Settings of our runs that a row can name.
MATCH = (*FIELDS, "nodes")
# `match`: settings that our run must have; `of`: settings of the paper's run that ours need not have.
SETTINGS = ("match", "of")
# The numbers that papers print, by our names for them; accuracies are from 0 to 1, not percentages.
NUMBERS = ("read_seconds", "update_seconds", "epoch_seconds", "total_seconds", "samples_per_second", "speedup",
           "train_loss", "train_accuracy", "test_loss", "test_accuracy")  # fmt: skip


def read_paper(rows: Any, where: str) -> tuple[dict[str, Any], ...]:
    if not isinstance(rows, list):
        raise UsageError(f"{where}: {rows!r} is not a list of tables; write [[paper]]")
    return tuple(_row(row, f"{where} {number}") for number, row in enumerate(rows, 1))


def _row(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, Mapping):
        raise UsageError(f"{where}: {row!r} is not a table")
    for name in SETTINGS:
        settings = row.get(name, {})
        if not isinstance(settings, Mapping):
            raise UsageError(f"{where}: {name} is {settings!r}; it takes a table, such as {{ workers = 2, nodes = 1 }}")
        for key in settings:
            if key not in MATCH:
                raise UsageError(f"{where}: {name}: {unknown('key', key, MATCH)}")
    for key, value in row.items():
        if key in NUMBERS:
            if type(value) not in (int, float):
                raise UsageError(f"{where}: {key} is {value!r}; it takes a number")
            if key.endswith("accuracy") and not 0 <= value <= 1:
                raise UsageError(f"{where}: {key} is {value!r}; it takes a number from 0 to 1, not a percentage")
        elif key not in (*SETTINGS, "note"):
            raise UsageError(f"{where}: {unknown('key', key, (*SETTINGS, 'note', *NUMBERS))}")
        elif key == "note" and not isinstance(value, str):
            raise UsageError(f"{where}: note is {value!r}; it takes a string")
    return {key: dict(value) if key in SETTINGS else value for key, value in row.items()}

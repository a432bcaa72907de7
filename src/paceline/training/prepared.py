"""What the training loop runs: a strategy with its model, and how to save that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from paceline.strategies.base import Strategy


@dataclass(frozen=True)
class Prepared:
    """All ranks call `save`; `fresh` are weights that a file to start from did not have."""

    strategy: Strategy
    parameters: int
    fresh: list[str]
    save: Callable[[Path], None]

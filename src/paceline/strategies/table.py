"""The strategies by name; this file is read before torch is."""

from __future__ import annotations

from dataclasses import Field
from typing import Any

from paceline.errors import UsageError
from paceline.plugins import Table
from paceline.strategies.base import Strategy
from paceline.strategies.local_sgd import LOCAL_SGD
from paceline.strategies.parameter_server import PS_ASYNC, PS_BOUNDED, PS_SYNC
from paceline.strategies.pipeline import PIPELINE
from paceline.strategies.sequential import SEQUENTIAL
from paceline.strategies.synchronous import ALLREDUCE, GATHER, REDUCE_BCAST, RING
from paceline.strategies.tensor import TENSOR

_OURS = (
    SEQUENTIAL,
    ALLREDUCE,
    RING,
    REDUCE_BCAST,
    GATHER,
    LOCAL_SGD,
    PS_SYNC,
    PS_ASYNC,
    PS_BOUNDED,
    PIPELINE,
    TENSOR,
)
TABLE = Table("paceline.strategies", Strategy, _OURS)


def describe(name: str) -> Strategy:
    """The strategy of a run; of one whose package is not installed here little is known, and it may not be exact."""
    return TABLE.get(name) or Strategy(name, "not installed here", "", exact=False)


def default(workers: int | None, *, servers: bool = False) -> Strategy:
    """What is meant where no strategy is given."""
    return PS_SYNC if servers else SEQUENTIAL if workers in (None, 1) else ALLREDUCE


def options() -> dict[str, tuple[Field[Any], Any]]:
    """The options of all strategies by name: each as a dataclass field, with its type. Shared ones are there once."""
    found: dict[str, tuple[Field[Any], Any]] = {}
    for strategy in TABLE.values():
        for name, (made, kind) in strategy.fields().items():
            known = found.setdefault(name, (made, kind))
            if (known[0].default, known[0].metadata, known[1]) != (made.default, made.metadata, kind):
                raise UsageError(f"strategy {strategy.name} has an option {name}, which another has with other values")
    return found


def having(option: str) -> tuple[str, ...]:
    """The strategies with this option."""
    return tuple(strategy.name for strategy in TABLE.values() if option in strategy.names)

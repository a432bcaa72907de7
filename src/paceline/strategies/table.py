"""All strategies by name; no torch."""

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
from paceline.strategies.sharded import SHARDED
from paceline.strategies.synchronous import ALLREDUCE, GATHER, REDUCE_BCAST, RING
from paceline.strategies.tensor import TENSOR

_OURS = (
    SEQUENTIAL,
    ALLREDUCE,
    RING,
    REDUCE_BCAST,
    GATHER,
    SHARDED,
    LOCAL_SGD,
    PS_SYNC,
    PS_ASYNC,
    PS_BOUNDED,
    PIPELINE,
    TENSOR,
)
TABLE = Table("paceline.strategies", Strategy, _OURS)


def describe(name: str) -> Strategy:
    """The strategy of a run; if its package is not installed here, a stand-in that is assumed not to be exact."""
    return TABLE.get(name) or Strategy(name, "not installed here", "", exact=False)


def default(workers: int | None, *, servers: bool = False) -> Strategy:
    """The strategy if none is given."""
    return PS_SYNC if servers else SEQUENTIAL if workers in (None, 1) else ALLREDUCE


def options() -> dict[str, tuple[Field[Any], Any]]:
    """The options of all strategies by name, each as a dataclass field with its type; shared options appear once."""
    found: dict[str, tuple[Field[Any], Any]] = {}
    for strategy in TABLE.values():
        for name, (made, kind) in strategy.fields().items():
            known = found.setdefault(name, (made, kind))
            if (known[0].default, known[0].metadata, known[1]) != (made.default, made.metadata, kind):
                raise UsageError(f"strategy {strategy.name} has an option {name} that differs from another strategy's")
    return found


def having(option: str) -> tuple[str, ...]:
    """The strategies with this option."""
    return tuple(strategy.name for strategy in TABLE.values() if option in strategy.names)

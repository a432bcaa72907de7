"""Values for several strategies, without the options that the one at hand does not have."""

from __future__ import annotations

from typing import Any

from paceline.spec import OWN
from paceline.strategies import table as strategies


def fitting(values: dict[str, Any]) -> dict[str, Any]:
    strategy = strategies.TABLE[values.get("strategy") or strategies.default(values.get("workers")).name]
    return {name: value for name, value in values.items() if name not in OWN or name in strategy.names}

"""Prices of machines, from a file of the user's; and lengths of time and sums of money in words."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from paceline.advise.advice import Pricing
from paceline.errors import UsageError, refuse_pipe
from paceline.lab.plan import MOST_PREDICTED_RATE, Table

MOST_MACHINES = 1024
MOST_PRICE = 1e6
UNITS = {"s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True)
class Kind:
    """A kind of machine that can be paid for: its price for an hour, its link in bit/s, its memory in bytes, and the
    speed of its processors as a multiple of that of the machine of the runs.
    """

    name: str
    per_hour: float
    rate: int | None = None
    memory: int | None = None
    speed: float = 1.0
    most: int = MOST_MACHINES


@dataclass(frozen=True)
class Prices:
    pricing: Pricing
    kinds: tuple[Kind, ...]

    def of_nodes(self, names: Sequence[str], where: str) -> tuple[float, ...]:
        """For an hour of each of these nodes of a cluster: by their names, or all the same."""
        by_name = {kind.name: kind.per_hour for kind in self.kinds}
        if len(by_name) == 1 and not set(names) & set(by_name):
            return tuple(by_name.values()) * len(names)
        for name in names:
            if name not in by_name:
                raise UsageError(
                    f'{where} has no price for the node {name}: add a [[machine]] with name = "{name}", or give one '
                    "machine, whose price all nodes have"
                )
        return tuple(by_name[name] for name in names)


def read_prices(path: Path) -> Prices:
    """Raises UsageError with what is wrong in the file."""
    refuse_pipe(path, "the prices")
    try:
        values = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the prices {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path}: not valid TOML: {error}") from None
    dated = values.get("dated")
    values |= {"dated": dated.isoformat()} if isinstance(dated, date) else {}
    top = Table(values, str(path), ("currency", "source", "dated", "example", "machine"))
    currency = top.text("currency")
    if not currency or not re.fullmatch(r"[A-Z]{3}", currency):
        raise UsageError(f'{path}: currency is {currency!r}; give three letters, such as currency = "EUR"')
    example = values.get("example", False)
    if not isinstance(example, bool):
        raise UsageError(f"{path}: example is {example!r}; it takes true or false")
    kinds = [_kind(each, f"{path}: machine {number}") for number, each in enumerate(top.tables("machine"), 1)]
    if not kinds:
        raise UsageError(f'{path}: no machine has a price: add [[machine]] with name = "node" and per_hour = 0.5')
    names = [kind.name for kind in kinds]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"{path}: {min(twice)} has two prices; leave one out")
    pricing = Pricing(currency, top.text("source") or "not given", top.text("dated") or "not given", example)
    return Prices(pricing, tuple(kinds))


def _kind(values: object, where: str) -> Kind:
    table = Table(values, where, ("name", "per_hour", "link", "memory", "speed", "most"))
    name, price = table.text("name"), table.number("per_hour", above=None, most=MOST_PRICE)
    if name is None or price is None:
        raise UsageError(f'{where}: it needs a name and a price, such as name = "node" and per_hour = 0.5')
    return Kind(
        name,
        price,
        table.rate("link", MOST_PREDICTED_RATE),
        table.size("memory"),
        table.number("speed", above=0, most=1e6) or 1.0,
        table.whole("most", least=1, most=MOST_MACHINES) or MOST_MACHINES,
    )


def read_length(text: str, flag: str) -> float:
    """Seconds: 6h, 90min, 2d, 45s."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text)
    seconds = float(found[1]) * UNITS.get(found[2], 0.0) if found else 0.0
    if not seconds:
        raise UsageError(f"{flag} {text}: give a length of time, such as 90min, 6h or 2d")
    return seconds


def read_money(text: str, currency: str, flag: str) -> float:
    """An amount in the currency of the prices: 50EUR, or 50 alone."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]{3})?\s*", text)
    if not found:
        raise UsageError(f"{flag} {text}: give an amount, such as 50{currency}")
    if found[2] and found[2].upper() != currency:
        raise UsageError(f"{flag} {text}: the prices are in {currency}; give an amount in {currency}")
    return float(found[1])

"""The plan of a lab: nodes, links, racks and faults, from a TOML file or a preset; checked before anything starts."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.errors import UsageError, nearest, refuse_pipe, unknown

# The environment variable that describes the lab to programs on its nodes.
LAB = "PACELINE_LAB"
MOST_NODES = 64
# A slower link could not carry a few frames in a burst; a faster one exceeds the kernel's token bucket.
LEAST_RATE, MOST_RATE = 100_000, 30_000_000_000
MOST_PREDICTED_RATE = 1_000_000_000_000  # of links that no lab has
MOST_NOISE = 2.0
NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")

PRESETS: dict[str, dict[str, Any]] = {
    "1gbit": {"rate": "1gbit"},
    "10gbit": {"rate": "10gbit", "mtu": 9000},  # jumbo frames, as usual in such networks
    "home": {"down": "100mbit", "up": "20mbit"},
    "two-racks": {"nodes": 4, "rate": "1gbit", "racks": 2, "rack_rate": "500mbit"},
}
ABOUT = {
    "1gbit": "every node at 1 Gbit/s, in both directions",
    "10gbit": "every node at 10 Gbit/s, with jumbo frames",
    "home": "100 Mbit/s down and 20 Mbit/s up, like a home connection",
    "two-racks": "two switches; nodes at 1 Gbit/s, 500 Mbit/s between the racks",
}
# They are in the environment of every command, where a variable is limited to 128 kB.
MOST_FAULTS = 500
FAULTS = ("cut", "heal", "slow", "stop", "continue", "kill")


@dataclass(frozen=True)
class Node:
    """A machine of the lab; rates in bit/s."""

    name: str
    address: str
    up: int
    down: int
    rack: int = 0
    cpu: float | None = None  # cores that it may use
    memory: int | None = None  # bytes
    speed: float = 1.0  # of its emulated device
    noise: float = 0.0  # of its emulated device: the coefficient of variation of the time of a step
    processes: int | None = None


@dataclass(frozen=True)
class Rack:
    """A switch, and its link to the others."""

    up: int
    down: int


@dataclass(frozen=True)
class Fault:
    """A fault `at` this many seconds after the start of the command."""

    at: float
    do: str
    node: str
    up: int | None = None
    down: int | None = None


@dataclass(frozen=True)
class LabPlan:
    name: str
    nodes: tuple[Node, ...]
    racks: tuple[Rack, ...] = ()  # none: all nodes are on one switch
    mtu: int = 1500
    shared: tuple[str, ...] = ()
    faults: tuple[Fault, ...] = ()

    def node(self, name: str) -> Node:
        found = next((node for node in self.nodes if node.name == name), None)
        if found is None:
            raise unknown("node", name, [node.name for node in self.nodes])
        return found

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> LabPlan:
        values = {key: value for key, value in json.loads(text).items() if key in cls.__dataclass_fields__}
        kinds = {"nodes": Node, "racks": Rack, "faults": Fault}
        lists = {key: tuple(kind(**item) for item in values.pop(key)) for key, kind in kinds.items()}
        return cls(**values | lists | {"shared": tuple(values["shared"])})


def read_plan(given: str) -> LabPlan:
    """The plan of a lab file, or of a preset: `1gbit`, or with a number of nodes, `1gbit:4`."""
    preset, _, count = given.partition(":")
    if not given.endswith(".toml") and not os.path.exists(given):
        if preset not in PRESETS:
            close = nearest(preset, PRESETS)
            raise UsageError(
                f"there is no lab file {given!r}, and no preset of that name{close} (presets: {', '.join(PRESETS)}; "
                f"PRESET:4 has 4 nodes)"
            )
        nodes = {"nodes": int(count) if count.isdecimal() and len(count) < 10 else count} if ":" in given else {}
        return make_plan({"preset": preset, **nodes}, f"lab {given}")
    refuse_pipe(given, "the lab file")
    try:
        values = tomllib.loads(Path(given).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read the lab file {given}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{given}: not valid TOML: {error}") from None
    return make_plan(values, given)


def make_plan(given: Mapping[str, Any], where: str) -> LabPlan:
    """The plan with these values; `where` they are from, for error messages."""
    top = Table(given, where, ("preset", "name", "nodes", "node", "rate", "up", "down", "racks", "rack_rate", "rack_up",
                               "rack_down", "mtu", "processes", "speed", "noise", "share", "fault"))  # fmt: skip
    if preset := top.text("preset"):
        if preset not in PRESETS:
            raise UsageError(f"{where}: {unknown('preset', preset, PRESETS)}")
        # The file's own rates override the preset's, in any form.
        values = dict(PRESETS[preset])
        for general, parts in (("rate", ("up", "down")), ("nodes", ("node",))):
            if general in given:
                values = {key: value for key, value in values.items() if key not in parts}
            if any(part in given for part in parts) and general in values:
                old = values.pop(general)
                values |= {part: old for part in parts if general == "rate"}
        top = Table(values | dict(given), where, top.allowed)
    nodes = _nodes(top, where)
    racks = top.whole("racks", least=1, most=MOST_NODES)
    if racks and racks > len(nodes):
        raise UsageError(f"{where}: {racks} racks need at least {racks} nodes; this lab has {len(nodes)}")
    if racks:
        up, down = _rates(top, "rack_", None)
        nodes = [_in_rack(node, i, len(nodes), racks) for i, node in enumerate(nodes)]
        switches = tuple(Rack(up, down) for _ in range(racks))
    elif any(f"rack_{way}" in top.values for way in ("rate", "up", "down")):
        raise UsageError(f"{where}: a rate between racks is given, but no racks; add racks = 2")
    else:
        switches = ()
    name = top.text("name") or "lab"
    check_name(name, where)
    plan = LabPlan(name, tuple(nodes), switches, top.whole("mtu", least=576, most=65_535) or 1500,
                tuple(os.path.abspath(os.path.expanduser(path)) for path in top.texts("share")))  # fmt: skip
    return replace(plan, faults=tuple(_faults(top.tables("fault"), plan, where)))


class Table:
    """A TOML table whose values are read and checked by type."""

    def __init__(self, values: Any, where: str, allowed: tuple[str, ...]) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(f"{where}: {values!r} is not a table")
        self.values, self.where, self.allowed = values, where, allowed
        for key in values:
            if key not in allowed:
                raise UsageError(f"{where}: {unknown('key', key, allowed)}")

    def _wrong(self, key: str, takes: str) -> UsageError:
        return UsageError(f"{self.where}: {key} is {self.values[key]!r}; it takes {takes}")

    def text(self, key: str) -> str | None:
        value = self.values.get(key)
        if value is not None and (not isinstance(value, str) or not value):
            raise self._wrong(key, "a string")
        return value

    def texts(self, key: str) -> list[str]:
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self._wrong(key, "a list of strings")
        return value

    def tables(self, key: str) -> list[Any]:
        value = self.values.get(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, f"tables, each under [[{key}]]")
        return value

    def whole(self, key: str, *, least: int, most: int) -> int | None:
        value = self.values.get(key)
        if value is not None and (type(value) is not int or not least <= value <= most):
            raise self._wrong(key, f"a whole number from {least} to {most}")
        return value

    def number(self, key: str, *, above: float | None, most: float) -> float | None:
        """A number above `above`, or, if that is None, from 0 on."""
        value = self.values.get(key)
        if value is None:
            return None
        enough = type(value) in (int, float) and (value >= 0 if above is None else value > above)
        if not enough or not value <= most:
            raise self._wrong(key, f"a number {'from 0' if above is None else f'above {above:g}'} to {most:g}")
        return float(value)

    def rate(self, key: str, most: int = MOST_RATE) -> int | None:
        """Bits per second."""
        value = self.values.get(key)
        return None if value is None else self._quantity(key, BITS, LEAST_RATE, most, '"100mbit" or "1gbit"')

    def size(self, key: str) -> int | None:
        """Bytes."""
        value = self.values.get(key)
        return None if value is None else self._quantity(key, BYTES, 16 * 10**6, 10**12, '"512MB" or "2GB"')

    def _quantity(self, key: str, units: Mapping[str, int], least: int, most: int, example: str) -> int:
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z/]+)\s*", str(self.values[key]))
        unit = units.get(found[2].lower()) if found else None
        value = float(found[1]) * unit if found and unit else 0.0
        if not least <= value <= most:
            unit_name = next(iter(units))
            low, high = (f"{limit / units[unit_name]:,.10g} {unit_name}" for limit in (least, most))
            raise self._wrong(key, f"a string such as {example}, from {low} to {high}")
        return round(value)


BITS = {unit + end: 1000**power for power, unit in ((2, "mbit"), (1, "kbit"), (3, "gbit")) for end in ("", "/s", "ps")}
BYTES = {"mb": 10**6, "gb": 10**9, "mib": 2**20, "gib": 2**30, "m": 2**20, "g": 2**30}


def _rates(table: Table, prefix: str, default: tuple[int, int] | None) -> tuple[int, int]:
    """The rates up and down, each by its name, or both as `rate`."""
    both = table.rate(f"{prefix}rate")
    up, down = (table.rate(prefix + way) or both or (default[i] if default else None)
                for i, way in enumerate(("up", "down")))  # fmt: skip
    if up is None or down is None:
        raise UsageError(
            f'{table.where}: the speed of the links is missing: write {prefix}rate = "1gbit", or {prefix}up and '
            f"{prefix}down" + ("" if prefix else f", or a preset ({', '.join(PRESETS)})")
        )
    return up, down


def _nodes(top: Table, where: str) -> list[Node]:
    """The nodes, given as a number or one by one."""
    listed = top.tables("node")
    count = top.whole("nodes", least=1, most=MOST_NODES)
    if listed and count:
        raise UsageError(f"{where}: nodes are given both as a number and one by one; leave one of the two out")
    if len(listed) > MOST_NODES:
        raise UsageError(f"{where}: {len(listed)} nodes; a lab has up to {MOST_NODES}")
    processes, speed = top.whole("processes", least=1, most=1024), top.number("speed", above=0, most=1e6)
    noise = top.number("noise", above=None, most=MOST_NOISE) or 0.0
    keys = ("name", "rate", "up", "down", "cpu", "speed", "noise", "memory", "processes")
    nodes: list[Node] = []
    for i, values in enumerate(listed or [{}] * (count or 2)):
        table = Table(values, f"{where}: node {i + 1}", keys)
        general = _general(top, table)
        up, down = _rates(table, "", general)
        name = table.text("name") or f"n{i + 1}"
        check_name(name, table.where)
        if any(node.name == name for node in nodes):
            raise UsageError(f"{table.where}: another node already has the name {name}")
        own = table.number("noise", above=None, most=MOST_NOISE)
        nodes.append(Node(name, f"10.0.0.{i + 1}", up, down, cpu=table.number("cpu", above=0, most=1024),
                          memory=table.size("memory"), speed=table.number("speed", above=0, most=1e6) or speed or 1.0,
                          noise=noise if own is None else own,
                          processes=table.whole("processes", least=1, most=1024) or processes))  # fmt: skip
    return nodes


def _general(top: Table, node: Table) -> tuple[int, int] | None:
    """The default rates of nodes."""
    said = {"rate", "up", "down"} & set(top.values)
    return _rates(top, "", None) if said or not {"rate", "up", "down"} & set(node.values) else None


def _in_rack(node: Node, index: int, nodes: int, racks: int) -> Node:
    return replace(node, rack=index * racks // nodes)


def check_name(name: str, where: str) -> None:
    if not NAME.fullmatch(name) or name == "localhost":
        raise UsageError(f"{where}: the name {name!r} is not a host name; use letters a–z, digits and -, up to 32")


def _faults(listed: list[Any], plan: LabPlan, where: str) -> list[Fault]:
    if len(listed) > MOST_FAULTS:
        raise UsageError(f"{where}: {len(listed)} faults; a lab has up to {MOST_FAULTS}")
    found = []
    for i, values in enumerate(listed):
        table = Table(values, f"{where}: fault {i + 1}", ("at", "do", "node", "rate", "up", "down"))
        at = table.number("at", above=None, most=1e6)
        do, node = table.text("do"), table.text("node")
        if at is None or do is None or node is None:
            raise UsageError(f'{table.where}: it needs at, do and node, such as at = 5.0, do = "cut", node = "n2"')
        found.append(check_fault(Fault(at, do, node, *_changed(table)), plan, table.where))
    return sorted(found, key=lambda fault: fault.at)


def _changed(table: Table) -> tuple[int | None, int | None]:
    both = table.rate("rate")
    return table.rate("up") or both, table.rate("down") or both


def check_fault(fault: Fault, plan: LabPlan, where: str) -> Fault:
    if fault.do not in FAULTS:
        raise UsageError(f"{where}: {unknown('fault', fault.do, FAULTS)}")
    try:
        plan.node(fault.node)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if (fault.do == "slow") != bool(fault.up or fault.down):
        raise UsageError(f"{where}: slow needs a rate, or up or down; other faults take none")
    return fault


def burst_bytes(rate: int, mtu: int) -> int:
    """Bytes that a link can send at once after it was idle.

    Enough for late wake-ups of some milliseconds on a busy machine; little compared with the bytes of a training step.
    """
    a_second = rate / 8
    return round(max(3 * (mtu + 14), min(a_second * 0.004, 128 * 1024), a_second * 0.0005))


def in_words(rate: int) -> str:
    """A rate as text."""
    for size, unit in ((10**9, "Gbit/s"), (10**6, "Mbit/s")):
        if rate >= size:
            return f"{rate / size:.4g} {unit}"
    return f"{rate / 1000:.4g} kbit/s"

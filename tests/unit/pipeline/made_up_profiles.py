"""Profiles whose best cut is evident, or found by trying all."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from paceline.pipeline.partition import Cut, Device, Node, Profile, StagePlan, find


def node(name: str, seconds: float = 1.0, **more: Any) -> Node:
    values: dict[str, Any] = dict.fromkeys(Node.__dataclass_fields__, 0)
    return Node(**values | {"name": name, "forward": seconds, "kept": frozenset()} | more)


def chain(
    seconds: Sequence[float],
    outputs: Sequence[int] | None = None,
    skips: Iterable[tuple[int, int]] = (),
    forbidden: dict[int, str] | None = None,
    nodes: Sequence[Node] | None = None,
    base: int = 0,
) -> Profile:
    """Nodes in a row: node i makes storage i of outputs[i] bytes for node i + 1, and for those that skips lead to."""
    count = len(seconds)
    sizes = tuple(outputs or [0] * count)
    edges = {(i, i + 1) for i in range(count - 1)} | set(skips)
    cuts = []
    for position in range(count + 1):
        crossing = sorted({a for a, b in edges if a < position <= b})
        size = sum(sizes[a] for a in crossing)
        names = tuple(f"n{a}" for a in crossing)
        cuts.append(Cut(size, size, (forbidden or {}).get(position), names, frozenset(crossing)))
    made = nodes or [node(f"n{i}", each) for i, each in enumerate(seconds)]
    return Profile(tuple(made), tuple(cuts), sizes, base, micro_size=4)


def best(profile: Profile, *devices: Device, bandwidth: float | None = None, schedule: str = "1f1b") -> StagePlan:
    return find(profile, devices, schedule, 4, bandwidth, recompute=False)

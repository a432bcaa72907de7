"""The devices of a pipeline's stages, from the options --memory and --speed; no torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from paceline.errors import UsageError
from paceline.pipeline.plan import Device
from paceline.pipeline.sizes import parse_bytes

T = TypeVar("T")


def stage_devices(stages: int, memory: str | None, speed: str | None) -> tuple[Device, ...]:
    """One device per stage, from strings such as `2GB,1GB` and `1,0.05`; a single value is for all stages."""
    memories = _each(stages, "--memory", memory, parse_bytes)
    speeds = _each(stages, "--speed", speed, _parse_speed)
    return tuple(Device(speeds[i] if speeds else 1.0, memories[i] if memories else None) for i in range(stages))


def _each(stages: int, flag: str, text: str | None, parse: Callable[[str, str], T]) -> list[T] | None:
    if text is None:
        return None
    values = [parse(part.strip(), flag) for part in text.split(",")]
    if len(values) not in (1, stages):
        raise UsageError(f"{flag} {text} has {len(values)} values for {stages} stages: give one for all, or {stages}")
    return values * stages if len(values) == 1 else values


def _parse_speed(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 1e-6 <= value <= 1e6:
        raise UsageError(f"{what} is {text!r}; it takes a speed relative to this machine, such as 1 or 0.05")
    return value

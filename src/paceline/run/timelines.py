"""The events of a timeline's line: what a stage of a pipeline did in a step, one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from paceline.run.records import Timeline
from paceline.strict_json import LARGEST, Bounds, Seconds, build


@dataclass(frozen=True)
class Event:
    """What a stage did, for which micro-batch (-1: none), and its start and length in seconds of the step."""

    what: str
    micro: Annotated[int, Bounds(-1, LARGEST)]
    start: Annotated[float, Bounds(-1e10, 1e10)]
    seconds: Seconds

    @property
    def end(self) -> float:
        return self.start + self.seconds


EVENT = ("what", "micro", "start", "seconds")  # in this order in a file


def events_of(line: Timeline) -> tuple[Event, ...]:
    """Raises ValueError if one cannot be."""
    if not all(len(row) == len(EVENT) for row in line.events):
        raise ValueError(f"a timeline is not a list of events, each of {', '.join(EVENT)}")
    return tuple(build(Event, dict(zip(EVENT, row, strict=True))) for row in line.events)

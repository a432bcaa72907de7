"""Clocks of ranks beside each other, as cases that run on each rank."""

from __future__ import annotations

import time
from dataclasses import asdict

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.launch.clocks import measure_clock


def measures(comm: Comm, machines: list[str | None], shifts: list[float]) -> dict[str, float] | None:
    """What a rank finds out, on a machine of this name whose clock is so many seconds ahead."""
    shift = shifts[comm.rank]
    found = measure_clock(comm, machines[comm.rank], lambda: time.time() + shift)
    return None if found is None else asdict(found)


def messages(comm: Comm, machines: list[str]) -> int:
    """How many messages a rank sends to others."""
    metered = MeteredComm(comm)
    measure_clock(metered, machines[comm.rank])
    return metered.meter.messages_sent

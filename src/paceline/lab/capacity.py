"""Measures how fast this machine can move data between nodes, and finds links of a plan that need more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.lab.plan import LabPlan, in_words
from paceline.layout import cores

SECONDS = 0.15
# Measured: a link with a limited speed takes twice the CPU time of an unlimited one, and it shares the machine.
SHAPED, TOTAL = 0.45, 0.9

Inside = Callable[[Callable[[], Any]], Any]


def pair_capacity(first: Inside, second: Inside, address: str) -> float:
    """Bits per second from one node to another, over links without a limit."""
    listener = second(lambda: socket.create_server((address, 0)))
    port = listener.getsockname()[1]
    sender = first(lambda: socket.create_connection((address, port), timeout=10))
    receiver, _ = listener.accept()
    until = time.monotonic() + SECONDS

    def send() -> None:
        chunk = bytes(1 << 20)
        with sender:
            while time.monotonic() < until:
                sender.sendall(chunk)

    thread = threading.Thread(target=send)
    begun = time.monotonic()
    thread.start()
    got, buffer = 0, bytearray(1 << 20)
    with listener, receiver:
        receiver.settimeout(10)
        while count := receiver.recv_into(buffer):
            got += count
    thread.join()
    return got * 8 / (time.monotonic() - begun)


def flags(plan: LabPlan, capacity: float | None) -> list[str]:
    """Sentences about links that the machine cannot reach."""
    if capacity is None:
        return []
    reach = f"this machine moves about {in_words(_floor(capacity))} between two nodes whose links have no limit"
    one, every = SHAPED * capacity, TOTAL * capacity * max(1.0, cores() / 2)
    advice = f"use at most {in_words(_floor(min(one, every / len(plan.nodes))))}"
    beyond = [node for node in plan.nodes if max(node.up, node.down) > one]
    if beyond:
        asked = in_words(max(max(node.up, node.down) for node in beyond))
        return [
            f"{', '.join(node.name for node in beyond)}: {asked} is out of reach: {reach}, and limiting the speed of "
            f"links costs more than half of that: {advice}"
        ]
    total = sum(node.up for node in plan.nodes)
    if total > every:
        return [f"all nodes sending at once need {in_words(total)}, which is out of reach: {reach}; {advice} for each"]
    return []


def _floor(rate: float) -> int:
    """Round down to three digits, because an advised speed must be within reach."""
    unit: int = 10 ** max(0, len(str(int(rate))) - 3)
    return int(rate) // unit * unit

"""What this machine can move between nodes at all, and which links of a plan ask for more."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from paceline.lab.plan import LabPlan, in_words
from paceline.layout import cores

SECONDS = 0.15
# Measured: a link that is kept to a speed costs twice the work of one that is not, and it is not alone on the machine.
SHAPED, TOTAL = 0.45, 0.9

Inside = Callable[[Callable[[], Any]], Any]


def pair_capacity(first: Inside, second: Inside, address: str) -> float:
    """Bits per second from one node to another, with nothing in between to slow them; the links are up, unshaped."""
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
    """What the machine will not reach, in sentences."""
    if capacity is None:
        return []
    reach = f"this machine moves about {in_words(_floor(capacity))} between two nodes whose links have no limit"
    one, every = SHAPED * capacity, TOTAL * capacity * max(1.0, cores() / 2)
    advice = f"ask for {in_words(_floor(min(one, every / len(plan.nodes))))} at most"
    beyond = [node for node in plan.nodes if max(node.up, node.down) > one]
    if beyond:
        asked = in_words(max(max(node.up, node.down) for node in beyond))
        return [
            f"{', '.join(node.name for node in beyond)}: {asked} is out of reach: {reach}, and holding links to a "
            f"speed costs more than half of that: {advice}"
        ]
    total = sum(node.up for node in plan.nodes)
    if total > every:
        return [
            f"all nodes sending at once ask for {in_words(total)}, which is out of reach: {reach}; {advice} for each"
        ]
    return []


def _floor(rate: float) -> int:
    """Three digits of it, rounded down: what is advised must be in reach."""
    unit: int = 10 ** max(0, len(str(int(rate))) - 3)
    return int(rate) // unit * unit

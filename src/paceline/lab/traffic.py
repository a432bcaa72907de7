"""Sends to other nodes as fast as possible and measures its interface: python -m paceline.lab.traffic.

    traffic START SECONDS ADDRESS...

All nodes run it with the same START, a time on the machine's monotonic clock, and each sends to its addresses. It
prints the bits per second that its interface sent and received in the last SECONDS, from the kernel's counters.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time

from paceline.lab.links import counters

PORT = 5001
WARM_SECONDS = 0.5  # TCP slow start and bursts are over by then
CHUNK = bytes(1 << 18)


def _send(address: str, until: float) -> None:
    with socket.create_connection((address, PORT), timeout=10) as connection:
        while time.monotonic() < until:
            connection.sendall(CHUNK)


def _receive(connection: socket.socket) -> None:
    buffer = bytearray(1 << 18)
    with connection:
        while connection.recv_into(buffer):
            pass


def _accept(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_receive, args=(connection,), daemon=True).start()


def flood(own: str, start: float, seconds: float, addresses: list[str]) -> dict[str, float]:
    """Bits per second sent and received."""
    with socket.create_server((own, PORT), backlog=64) as listener:
        threading.Thread(target=_accept, args=(listener,), daemon=True).start()
        time.sleep(max(0.0, start - time.monotonic()))
        # All nodes stop at the same time, so that no link is idle while another node still measures.
        until = start + WARM_SECONDS + seconds + 0.1
        for address in addresses:
            threading.Thread(target=_send, args=(address, until), daemon=True).start()
        time.sleep(max(0.0, start + WARM_SECONDS - time.monotonic()))
        before, begun = counters(), time.monotonic()
        time.sleep(seconds)
        after, ended = counters(), time.monotonic()
        time.sleep(0.2)
    return {way: (after[way] - before[way]) * 8 / (ended - begun) for way in ("tx_bytes", "rx_bytes")}


def main() -> None:
    start, seconds, own, *addresses = sys.argv[1:]
    print(json.dumps(flood(own, float(start), float(seconds), addresses)), flush=True)


if __name__ == "__main__":
    main()

"""The other servers, as the leader sees them: the orders sent to them, and the states they reported."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from paceline.server.roles import ServerState
from paceline.server.wire import Header, Kind, Message, numbers, say, take


class OtherServers:
    """Sends orders to servers 1 to `count`, repeats lost ones, and keeps the states that servers report."""

    def __init__(self, count: int, identity: Callable[[], dict[str, int]], welcome: dict[str, Any]) -> None:
        self.ranks = range(1, count + 1)
        self.states: dict[int, ServerState] = {}
        self.past: list[tuple[int, dict[str, Any]]] = []  # traffic of servers up to when they were killed
        self.outbox: list[tuple[int, Message]] = []
        self.orders = 0
        self._identity, self._welcome = identity, welcome
        self._awaited: dict[int, int] = {}  # the number of the order that a server has not confirmed yet
        self._given: dict[int, tuple[Kind, dict[str, Any]]] = {}

    @property
    def ready(self) -> bool:
        """Whether all are up and have carried out their orders."""
        return len(self.states) == len(self.ranks) and not self._awaited

    def order(self, server: int, kind: Kind, **header: Any) -> None:
        self.orders += 1
        if kind != Kind.ATTACH:
            self._awaited[server] = self.orders
            self._given[server] = kind, header
        words = self._welcome if kind == Kind.ATTACH else {}
        self.outbox.append((server, say(kind, words, sequence=self.orders, **self._identity(), **header)))

    def order_all(self, kind: Kind, **header: Any) -> None:
        for server in self.ranks:
            self.order(server, kind, **header)

    def pull(self, server: int, chunk: int) -> None:
        self.send(server, Header(Kind.PULL, chunk=chunk))

    def send(self, server: int, header: Header) -> None:
        """Send a message that is no order, and is not confirmed."""
        self.outbox.append((server, Message(replace(header, **self._identity()))))

    def heard(self, server: int, message: Message, now: float) -> ServerState | None:
        """Handle STATE of a server; return its state before, or None if it is new."""
        header = message.header
        checkpoints, saves, traffic, about = take(
            message.words(), checkpoints=list, saves=bool, traffic=dict, about=dict
        )
        known = self.states.get(server)
        state = ServerState(header.life, now, header.sequence, numbers(checkpoints), saves, traffic, about)
        self.states[server] = state
        if known and known.life != header.life:
            self.past.append((server, known.traffic))
        if header.sequence == self._awaited.get(server):
            del self._awaited[server]
        return known

    def lost_order(self, server: int) -> tuple[Kind, dict[str, Any]] | None:
        """An order that was lost with its connection: a later message has already been answered."""
        return self._given[server] if self.states[server].sequence > self._awaited.get(server, math.inf) else None

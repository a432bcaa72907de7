"""A server's loop: messages in, messages out, until the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from paceline.errors import CommTimeout
from paceline.server.core import Core
from paceline.server.lead import Leader
from paceline.server.sockets import Diallers, Listener
from paceline.server.wire import Buffer, Header, Kind, Message, WireError, read, say

TICK_SECONDS = 0.25


def serve(core: Core, listener: Listener, patience: float) -> None:
    """Of a server that does not lead: until the leader says that it is over, or says nothing any more."""
    heard, began = time.monotonic(), time.process_time()
    while not core.finished:
        listener.wait(TICK_SECONDS)
        now = time.monotonic()
        core.traffic.cpu_seconds = time.process_time() - began
        for sender, frames in listener.messages():
            heard = now
            for to, message in core.handle(sender, frames, now):
                listener.send(to, message)
        if now - heard > patience:
            raise CommTimeout(f"rank {core.rank}, a server, has heard nothing for {patience:g} s: rank 0 is gone", 0)


def lead(
    leader: Leader, listener: Listener, endpoints: list[str], secret: bytes | None, stop: Callable[[], bool]
) -> dict[int, memoryview]:
    """Of the server that leads: until the run is over and all have gone. Returns the chunks of the other servers."""
    with closing(Diallers(endpoints[1:], f"0.{leader.life:x}", secret)) as links:
        for link in links.all:
            listener.watch(link)
        ticked, over_since, began = 0.0, None, time.process_time()
        while True:
            listener.wait(TICK_SECONDS)
            now = time.monotonic()
            for sender, frames in listener.messages():
                for to, message in leader.handle(sender, frames, now):
                    listener.send(to, message)
            for server, link in enumerate(links.all, 1):
                for answer in link.messages():
                    _answered(leader, server, answer, now)
            if stop():
                leader.stop()
            if now - ticked > TICK_SECONDS:
                ticked = now
                for to, message in leader.tick(now):
                    listener.send(to, message)
            orders, leader.to_servers = leader.to_servers, []
            for server, message in orders:
                links.all[server - 1].send(message)
            if leader.finished or leader.error is not None:
                over_since = over_since or now
                leader.traffic.cpu_seconds = time.process_time() - began
                if not leader.members or now - over_since > leader.rules.silent:
                    return _finish(leader, links)


def _answered(leader: Leader, server: int, frames: Sequence[Buffer], now: float) -> None:
    try:
        message = read(frames)
    except WireError:
        leader.traffic.dropped["malformed"] += 1
        return
    if message.kind == Kind.STATE:
        leader.answered(server, message, now)


def _finish(leader: Leader, links: Diallers) -> dict[int, memoryview]:
    """Collect the other servers' weights and counts, and let them go."""
    found: dict[int, memoryview] = {}
    identity = {"run": leader.run, "generation": leader.generation, "life": leader.life}
    for server, link in enumerate(links.all, 1):
        wanted = set(leader.layout.of_server(server)) if leader.error is None else set()
        for chunk in wanted:
            link.send(Message(Header(Kind.PULL, chunk=chunk, **identity)))
        link.send(say(Kind.FINISH, **identity))
        deadline, finished = time.monotonic() + leader.rules.patience, False
        while wanted or not finished:
            if time.monotonic() > deadline:
                raise CommTimeout(f"rank {server}, a server, did not answer for {leader.rules.patience:g} s", server)
            links.wait(TICK_SECONDS)
            for message in map(read, link.messages()):
                if message.kind == Kind.WEIGHTS:
                    found[message.header.chunk] = memoryview(message.payload)
                    wanted.discard(message.header.chunk)
                elif message.kind == Kind.STATE:
                    leader.answered(server, message, time.monotonic())
                    finished = message.words().get("finished") is True
    return found

"""The message loop of a server, until the run is over."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing

from paceline.errors import CommTimeout, UsageError
from paceline.layout import peak_rss_bytes
from paceline.server.core import Core
from paceline.server.lead import Leader
from paceline.server.sockets import Diallers, Listener
from paceline.server.wire import Buffer, Kind, WireError, read, say

TICK_SECONDS = 0.25
# How long servers may take to end; and how long a server that was asked to stop waits for a silent leader.
GOODBYE_SECONDS = 3.0


def serve(core: Core, listener: Listener, patience: float, stop: Callable[[], bool]) -> bool:
    """The loop of a server that is not the leader, until the leader ends the run; true if it was asked to stop.

    If so, the leader ends the run, because the model cannot be saved without this server's part.
    """
    heard, began = time.monotonic(), time.process_time()
    while not core.finished:
        listener.wait(TICK_SECONDS)
        now = time.monotonic()
        _measure(core, listener, began)
        for sender, frames in listener.messages():
            heard = now
            for to, message in core.handle(sender, frames, now):
                listener.send(to, message)
        if core.refusal:
            raise UsageError(core.refusal)
        core.stopping = stop()
        if core.stopping and now - heard > GOODBYE_SECONDS:
            return True
        if now - heard > patience:
            raise CommTimeout(f"rank {core.rank}, a server, has received nothing for {patience:g} s: rank 0 is gone", 0)
    return core.stopping


def lead(
    leader: Leader,
    listener: Listener,
    endpoints: Sequence[str],
    secret: bytes | None,
    stop: Callable[[], bool],
    save: Callable[[], None],
    gone: Callable[[], dict[int, str]] = dict,
) -> None:
    """The loop of the leader, until the run is over and all other ranks have left.

    `save` is called when the weights are final, before the workers are released: until then, a rank that dies can be
    replaced. It makes the leader fail if the weights are not finite. `gone` returns the workers that will never join,
    and why, if a launcher knows that.
    """
    began, ticked, over_since = time.process_time(), 0.0, None
    with closing(Diallers(endpoints[1:], f"0.{leader.life:x}", secret)) as links:
        for link in links.all:
            listener.watch(link)
        while over_since is None or (leader.members and time.monotonic() - over_since < leader.rules.silent):
            listener.wait(TICK_SECONDS)
            now = time.monotonic()
            _exchange(leader, listener, links, now)
            if stop():
                leader.stop()
            if now - ticked > TICK_SECONDS:
                ticked = now
                if not leader.begun:
                    leader.will_not_come(gone())
                _measure(leader, listener, began)
                for to, message in leader.tick(now):
                    listener.send(to, message)
            if leader.trained and not leader.finished and leader.error is None and leader.collect(now):
                _measure(leader, listener, began)
                save()
                leader.finished = leader.error is None
            if over_since is None and (leader.finished or leader.error is not None):
                over_since = now
                for to, message in leader.tick(now):
                    listener.send(to, message)
        _dismiss(leader, links)


def _exchange(leader: Leader, listener: Listener, links: Diallers, now: float) -> None:
    for sender, frames in listener.messages():
        for to, message in leader.handle(sender, frames, now):
            listener.send(to, message)
    for server, link in enumerate(links.all, 1):
        for answer in link.messages():
            _answered(leader, server, answer, now)
    for to, message in leader.flush():  # to workers, for whom an answer has made the next update
        listener.send(to, message)
    orders, leader.others.outbox = leader.others.outbox, []
    for server, message in orders:
        links.all[server - 1].send(message)


def _answered(leader: Leader, server: int, frames: Sequence[Buffer], now: float) -> None:
    try:
        leader.answered(server, read(frames), now)
    except WireError:
        leader.traffic.dropped["malformed"] += 1


def _dismiss(leader: Leader, links: Diallers) -> None:
    """Release the other servers; one that does not get the message ends at its own deadline."""
    for link in links.all:
        link.send(say(Kind.FINISH, run=leader.run, generation=leader.generation, life=leader.life))
    deadline, waiting = time.monotonic() + GOODBYE_SECONDS, set(range(len(links.all)))
    while waiting and leader.error is None and (left := deadline - time.monotonic()) > 0:
        for i in links.wait(left):
            for frames in links.all[i].messages():
                message = read(frames)
                if message.kind == Kind.STATE and message.words().get("finished") is True:
                    waiting.discard(i)


def _measure(core: Core, listener: Listener, began: float) -> None:
    traffic = core.traffic
    traffic.cpu_seconds = time.process_time() - began
    traffic.peak_rss_bytes = peak_rss_bytes()
    denied = listener.denied()
    if denied:
        traffic.dropped["with another key"] += denied

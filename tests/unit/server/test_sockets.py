"""Servers on real sockets: who may speak, what they make of garbage, and of connections that break."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from live_run import until
from parity_cases import check_trained, values_for
from served import SECRET, free_ports, meeting, train_served

from paceline.errors import PacelineError, UsageError
from paceline.server.client import Client
from paceline.server.layout import Layout
from paceline.server.roles import Meeting
from paceline.server.sockets import MOST_BYTES, Diallers, Listener, key_pair
from paceline.server.wire import SIZE, Header, Kind, Message, say

SETTING = "mlp-sgd"


def come(listener: Listener, seconds: float = 1.0) -> list[bytes]:
    """The payloads that come in a while."""
    deadline, found = time.monotonic() + seconds, list[bytes]()
    while not found and (left := deadline - time.monotonic()) > 0:
        listener.wait(left)
        found += [bytes(frames[-1]) for _, frames in listener.messages()]
    return found


@pytest.mark.parametrize(
    ("theirs", "gets_in"), [(SECRET, True), (b"x" * 32, False), (None, False)], ids=["same", "other", "none"]
)
def test_only_those_who_share_the_secret_get_in(
    theirs: bytes | None, gets_in: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.sockets.LINGER_MS", 100)  # what is not taken is not waited for
    (port,) = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    with closing(Listener(endpoint, SECRET)) as listener, closing(Diallers([endpoint], "me", theirs)) as links:
        links.all[0].send(say(Kind.HELLO, {"here": "I am"}))
        if gets_in:
            assert come(listener)
            assert listener.denied() == 0
        else:
            until("it is turned away", listener.denied)
            assert come(listener, 0.1) == []


def test_knowing_the_servers_public_key_is_not_enough() -> None:
    """A key of one's own, that the run's secret does not give, is turned away at the gate."""
    (port,) = free_ports(1)
    endpoint = f"tcp://127.0.0.1:{port}"
    context: zmq.Context[Any] = zmq.Context()
    with closing(Listener(endpoint, SECRET)) as listener:
        stranger = context.socket(zmq.DEALER)
        stranger.curve_publickey, stranger.curve_secretkey = zmq.curve_keypair()
        stranger.curve_serverkey = key_pair(SECRET, "server")[0]
        stranger.connect(endpoint)
        stranger.send_multipart(say(Kind.HELLO).frames())
        until("it is turned away", listener.denied)
        assert come(listener, 0.1) == []
        stranger.close(0)
    context.term()


def test_a_place_that_is_taken_is_a_users_error() -> None:
    (port,) = free_ports(1)
    with (
        closing(Listener(f"tcp://127.0.0.1:{port}")),
        pytest.raises(UsageError, match=rf"cannot listen at tcp://127.0.0.1:{port}: Address already in use"),
    ):
        Listener(f"tcp://127.0.0.1:{port}")


def test_a_frame_that_is_too_large_ends_its_connection_and_nothing_else() -> None:
    with meeting("plain", 1) as where, closing(Listener(where.endpoints[0])) as listener:
        with closing(Diallers(where.endpoints, "large")) as links:
            links.all[0].send(Message(Header(Kind.PUSH), bytes(MOST_BYTES + 1)))
            until("the connection is lost", links.all[0].broken)
            assert come(listener, 0.1) == []
        with closing(Diallers(where.endpoints, "small")) as links:
            links.all[0].send(say(Kind.HELLO, {"still": "there"}))
            assert come(listener) == [b'{"still": "there"}']


def test_a_worker_whose_heartbeat_fails_says_so_instead_of_going_on(monkeypatch: pytest.MonkeyPatch) -> None:
    with meeting("plain", 1) as where, closing(Listener(where.endpoints[0])):
        client = Client(3, where.run, 1, Layout(4, 4, 1, 8), torch.zeros(4), where.endpoints)
        with closing(client):
            monkeypatch.setattr("paceline.server.client.Diallers", lambda *_: 1 / 0)
            client._pulse.start()
            client._pulse._thread.join()
            with pytest.raises(PacelineError, match=r"rank 3 can no longer send heartbeats .* \(ZeroDivisionError"):
                client.poll(0)


def garbage(seed: int, run: int) -> Iterator[list[bytes]]:
    """10,000 messages that no worker of ours sends: noise, cut ones, changed ones, and old ones again."""
    chance = random.Random(seed)
    kinds = [kind for kind in Kind if kind not in (Kind.FINISH, Kind.RESTORE, Kind.RECALL)]
    for _ in range(10_000):
        header = Header(chance.choice(kinds), run=run, rank=chance.randrange(9), life=chance.getrandbits(63),
                        generation=chance.choice((0, run, chance.getrandbits(63))), chunk=chance.randrange(4),
                        update=chance.choice((0, 1, 7, 2**63)), slot=chance.randrange(4), slots=chance.randrange(5),
                        version=chance.randrange(9), want=chance.choice((0, 2**62)))  # fmt: skip
        frames = [bytes(frame) for frame in Message(header, chance.randbytes(chance.randrange(200))).frames()]
        how = chance.randrange(5)
        if how == 0:
            frames = [chance.randbytes(chance.randrange(300)) for _ in range(chance.randrange(1, 4))]
        elif how == 1:
            frames[0] = frames[0][: chance.randrange(SIZE)]
        elif how == 2:
            spot = chance.randrange(SIZE)
            frames[0] = frames[0][:spot] + chance.randbytes(1) + frames[0][spot + 1 :]
        elif how == 3:
            frames[1] = frames[1][: len(frames[1]) // 2]
        yield frames


@contextmanager
def thrown_at(where: Meeting) -> Iterator[Meeting]:
    """A stranger throws garbage at the server: as much before the workers come as while they train."""
    context: zmq.Context[Any] = zmq.Context()
    stranger = context.socket(zmq.DEALER)
    stranger.setsockopt(zmq.SNDHWM, 0)
    stranger.setsockopt(zmq.RCVTIMEO, 30_000)
    stranger.connect(where.endpoints[0])
    thrown = garbage(0, where.run)
    for frames in islice(thrown, 5000):
        stranger.send_multipart(frames)
    stranger.send_multipart(
        say(Kind.HELLO, {"fingerprint": {}, "seen": 0, "about": {}}, run=where.run, rank=1).frames()
    )
    answer = b""
    while b"has a different version" not in answer:  # all before it has been read, then
        answer = stranger.recv_multipart()[1]
    for frames in thrown:
        stranger.send_multipart(frames)
    yield where
    context.destroy(0)


@pytest.mark.parametrize("strategy", ["ps-sync", "ps-bounded"])
def test_ten_thousand_wrong_messages_change_nothing(expected: Any, tmp_path: Path, strategy: str) -> None:
    values = values_for(SETTING, 2, strategy=strategy, staleness=0, log_every=0)
    summary, weights = train_served(values, tmp_path, "ipc", thrown_at)
    check_trained(summary, weights, expected(values))
    assert (
        sum(summary.own_figures["gradients"]) == 2 * summary.steps - 3
    )  # the last update of each epoch has only one sample
    # Some look right, as a beat does; of the later half, not all may be read before the run ends.
    assert sum(summary.own_figures["dropped_messages"].values()) > 3000, summary.own_figures["dropped_messages"]


class Cutter:
    """Stands between workers and a server, and cuts every connection after a while; bytes on their way are lost."""

    def __init__(self, target: tuple[str, int], seed: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port, self._target, self._chance = self._listener.getsockname()[1], target, random.Random(seed)
        self.cuts = 0
        self._stop = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    server = socket.create_connection(self._target)
                except OSError:
                    client.close()
                    continue
                for a, b in ((client, server), (server, client)):
                    threading.Thread(target=self._carry, args=(a, b), daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        left = self._chance.randrange(200_000, 1_500_000)
        with contextlib.suppress(OSError):
            while piece := source.recv(65536):
                target.sendall(piece)
                left -= len(piece)
                if left < 0 and not self._stop.is_set():
                    self.cuts += 1
                    break
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._stop.set()
        self._listener.close()


@pytest.mark.parametrize("strategy", ["ps-sync", "ps-async"])
def test_each_gradient_counts_once_although_connections_break(expected: Any, tmp_path: Path, strategy: str) -> None:
    cutters: list[Cutter] = []

    @contextmanager
    def through_cutters(where: Meeting) -> Iterator[Meeting]:
        for number, endpoint in enumerate(where.endpoints):
            host, port = endpoint.removeprefix("tcp://").split(":")
            cutters.append(Cutter((host, int(port)), number))
        yield replace(where, endpoints=tuple(f"tcp://127.0.0.1:{cutter.port}" for cutter in cutters))
        for cutter in cutters:
            cutter.close()

    values = values_for(SETTING, 2, strategy=strategy, servers=2, log_every=0)
    summary, weights = train_served(values, tmp_path, "plain", through_cutters)
    assert sum(cutter.cuts for cutter in cutters) > 3
    if strategy == "ps-sync":
        check_trained(summary, weights, expected(values))
    else:
        assert sum(summary.own_figures["gradients"]) == summary.steps == 3 * 13
    assert summary.own_figures["lost_workers"] == []

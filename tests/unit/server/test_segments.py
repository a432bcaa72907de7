"""Payloads in shared memory: read where they are, kept while they are read, refused if they are not in any memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from live_run import until
from torch import Tensor

from paceline.server.segments import _REFERENCE
from paceline.server.shard import Chunk
from paceline.server.sockets import Diallers, Listener
from paceline.server.wire import LENT, Buffer, Header, Kind, Message, WireError, read

LENGTH = 50_000


@pytest.fixture
def endpoint(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/ps0"


@pytest.fixture
def listener(endpoint: str) -> Iterator[Listener]:
    with closing(Listener(endpoint)) as listener:
        yield listener


@pytest.fixture
def links(listener: Listener) -> Iterator[Diallers]:
    with closing(Diallers([listener.endpoint], "1.a", shares=True)) as links:
        yield links


def next_message(listener: Listener) -> tuple[bytes, list[Buffer]]:
    found: list[tuple[bytes, list[Buffer]]] = []

    def came() -> bool:
        listener.wait(0.1)
        found.extend(listener.messages())
        return bool(found)

    until("a message", came)
    (message,) = found
    return message


def answer(links: Diallers) -> Message:
    found: list[Message] = []

    def came() -> bool:
        links.wait(0.1)
        found.extend(read(frames) for frames in links.all[0].messages())
        return bool(found)

    until("an answer", came)
    (message,) = found
    return message


def payload_of(values: Tensor) -> memoryview:
    return values.numpy().data.cast("B")


def push(links: Diallers, payload: Buffer) -> None:
    links.all[0].send(Message(Header(Kind.PUSH), payload), track=True)


def test_a_gradient_is_read_where_it_is(listener: Listener, links: Diallers) -> None:
    gradient = links.memory(torch.empty(LENGTH)).fill_(1)
    push(links, payload_of(gradient[7:]))
    _, frames = next_message(listener)
    message = read(frames)
    assert message.lent
    values = torch.frombuffer(message.payload, dtype=torch.float32)
    assert len(values) == LENGTH - 7
    gradient.fill_(2)
    assert values.eq(2).all()


def test_what_is_not_in_shared_memory_is_sent(listener: Listener, links: Diallers) -> None:
    push(links, payload_of(torch.ones(LENGTH)))
    message = read(next_message(listener)[1])
    assert not message.lent
    assert torch.frombuffer(message.payload, dtype=torch.float32).eq(1).all()


def test_a_gradient_outlives_its_worker(listener: Listener, endpoint: str) -> None:
    """The server has accepted it; that the worker ends before it is added up changes nothing."""
    with closing(Diallers([endpoint], "1.a", shares=True)) as links:
        push(links, payload_of(links.memory(torch.empty(LENGTH)).fill_(3)))
        message = read(next_message(listener)[1])
    assert torch.frombuffer(message.payload, dtype=torch.float32).eq(3).all()


@pytest.mark.parametrize(
    "change",
    [
        lambda number, start, length: _REFERENCE.pack(number, start, length + 1, 0),
        lambda number, start, length: _REFERENCE.pack(number, start + 4, length, 0),
        lambda number, start, length: _REFERENCE.pack(number, 2**64 - 4, length, 0),
        lambda number, start, length: _REFERENCE.pack(number ^ 1, start, length, 0),
        lambda number, start, length: _REFERENCE.pack(number, start, length, 0)[:-1],
        lambda *_: b"",
    ],
    ids=["too long", "beyond the end", "overflow", "another memory", "cut off", "empty"],
)
def test_a_reference_to_anything_else_is_refused(listener: Listener, links: Diallers, change: object) -> None:
    gradient = links.memory(torch.empty(LENGTH)).fill_(1)
    push(links, payload_of(gradient))
    sender, frames = next_message(listener)
    assert read(frames).lent
    assert links._memory is not None
    (number,) = links._memory.links[0]._given.values()
    header, _ = Message(Header(Kind.PUSH), payload_of(gradient)).frames()
    wrong = change(number, 0, gradient.nbytes)  # type: ignore[operator]
    links.all[0].socket.send_multipart([header, wrong, LENT])
    sender, frames = next_message(listener)
    assert sender == b"1.a"
    with pytest.raises(WireError):
        read(frames)


def test_a_worker_cannot_refer_to_the_memory_of_another(listener: Listener, links: Diallers, endpoint: str) -> None:
    gradient = links.memory(torch.empty(LENGTH))
    push(links, payload_of(gradient))
    next_message(listener)
    assert links._memory is not None
    (number,) = links._memory.links[0]._given.values()
    header, _ = Message(Header(Kind.PUSH), payload_of(gradient)).frames()
    with closing(Diallers([endpoint], "2.b", shares=True)) as others:
        others.all[0].socket.send_multipart([header, _REFERENCE.pack(number, 0, gradient.nbytes, 0), LENT])
        with pytest.raises(WireError):
            read(next_message(listener)[1])


def served(listener: Listener) -> Chunk:
    """Weights in the server's memory."""
    memory = listener.memory_of_weights(4 * LENGTH, 1)
    return Chunk(torch.zeros(LENGTH), LENGTH, lambda parameters: torch.optim.SGD(parameters, 1.0), memory=memory)


def fetch(listener: Listener, links: Diallers, chunk: Chunk) -> Message:
    push(links, payload_of(torch.ones(3)))
    sender, _ = next_message(listener)
    listener.send(sender, Message(Header(Kind.WEIGHTS), chunk.published()))
    return answer(links)


@pytest.mark.parametrize("how", ["confirms", "ends"])
def test_weights_stay_as_they_are_until_they_are_read(listener: Listener, links: Diallers, how: str) -> None:
    chunk = served(listener)
    message = fetch(listener, links, chunk)
    assert message.lent
    values, first = torch.frombuffer(message.payload, dtype=torch.float32), chunk._place
    chunk.apply(torch.ones(LENGTH), 1.0)
    assert chunk._place is not first
    assert values.eq(0).all()
    assert chunk.values.eq(-1).all()
    if how == "confirms":
        links.all[0].confirm()
    else:
        links.forget_memory()
    assert listener.memory is not None
    listener.memory._hear()
    assert first.free
    here = chunk._place
    chunk.apply(torch.ones(LENGTH), 1.0)
    assert chunk._place is here, "nobody reads these weights, so they are changed where they are"


def test_a_server_that_returns_is_given_the_memory_again(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/ps0"
    with closing(Diallers([endpoint], "1.a", shares=True)) as links:
        gradient = links.memory(torch.empty(LENGTH)).fill_(1)
        for _ in range(2):
            with closing(Listener(endpoint)) as listener:
                push(links, payload_of(gradient))
                assert bytes(read(next_message(listener)[1]).payload) == bytes(payload_of(gradient))
                push(links, payload_of(gradient))
                assert read(next_message(listener)[1]).lent
            until("it is noticed", links.all[0].broken)


def test_nothing_is_left(tmp_path: Path) -> None:
    def once() -> None:
        endpoint = f"ipc://{tmp_path}/ps0"
        with closing(Listener(endpoint)) as listener, closing(Diallers([endpoint], "1.a", shares=True)) as links:
            chunk = served(listener)
            fetch(listener, links, chunk)
            push(links, payload_of(links.memory(torch.empty(LENGTH))))
            assert read(next_message(listener)[1]).lent

    once()
    before = set(os.listdir("/proc/self/fd"))
    for _ in range(3):
        once()
    assert len(set(os.listdir("/proc/self/fd")) - before) == 0
    assert not list(tmp_path.glob("*.mem"))

"""Messages come back as they were sent; what no rank has sent is dropped, counted, and changes nothing."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_play import FINGERPRINT, RUN, Play, script

from paceline.server.ledger import UpdatePlan
from paceline.server.wire import (
    MAGIC,
    MOST_WORDS,
    PROTOCOL,
    SIZE,
    Header,
    Kind,
    Message,
    OtherProtocol,
    WireError,
    numbers,
    read,
    say,
    take,
)

SYNC = UpdatePlan(13, 5, 8, 0)
BITS = {"kind": 16, "rank": 32, "chunk": 32, "slot": 32, "slots": 32}
FLOATS = ("loss", "weight", "metric", "nominal")
FIELDS = [field.name for field in fields(Header) if field.name not in ("length", *FLOATS)]
STRANGER = b"stranger"
EDGES = [0, 1, 2, 7, 2**31, 2**32 - 1, 2**63, 2**64 - 1]


def whole(name: str) -> st.SearchStrategy[int]:
    most = 2 ** BITS.get(name, 64) - 1
    return st.sampled_from([edge for edge in EDGES if edge <= most]) | st.integers(0, most)


headers = st.builds(
    Header,
    **{name: whole(name) for name in FIELDS if name != "kind"},
    kind=st.sampled_from([int(kind) for kind in Kind]),
    **{name: st.floats() for name in FLOATS},
)


def frames(message: Message) -> list[bytes]:
    return [bytes(frame) for frame in message.frames()]


# To the wire and back.


@given(headers, st.binary(max_size=100))
def test_a_message_comes_back_as_it_was(header: Header, payload: bytes) -> None:
    back = read(frames(Message(header, payload)))
    for name in FIELDS:
        assert getattr(back.header, name) == getattr(header, name)
    for name in FLOATS:
        sent = getattr(header, name)
        assert getattr(back.header, name) == sent or math.isnan(sent)
    assert (back.payload, back.header.length) == (payload, len(payload))


@pytest.mark.parametrize("kind", list(Kind))
def test_every_kind_says_its_words(kind: Kind) -> None:
    back = read(frames(say(kind, {"a": [1, "é", None]}, sequence=3)))
    assert (back.kind, back.header.sequence, back.words()) == (kind, 3, {"a": [1, "é", None]})


def test_a_header_is_as_long_as_it_says() -> None:
    header, payload = frames(say(Kind.BEAT))
    assert (len(header), header[:4], header[4:6], payload) == (SIZE, MAGIC, struct.pack("<H", PROTOCOL), b"{}")


@given(st.lists(st.binary(max_size=2 * SIZE), max_size=4))
def test_random_bytes_are_no_message(found: list[bytes]) -> None:
    with pytest.raises(WireError):
        read(found)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda h, p: [h[:-1], p],
        lambda h, p: [h + b"\0", p],
        lambda h, p: [h, p[:-1]],
        lambda h, p: [h, p + b" "],
        lambda h, p: [h],
        lambda h, p: [h, p, b""],
        lambda h, p: [],
        lambda h, p: [b"PLPX" + h[4:], p],
        lambda h, p: [h[:6] + b"\0\0" + h[8:], p],
        lambda h, p: [h[:6] + b"\x13\0" + h[8:], p],
    ],
)
def test_what_is_cut_or_longer_or_strange_is_no_message(spoil: Callable[[bytes, bytes], list[bytes]]) -> None:
    with pytest.raises(WireError):
        read(spoil(*frames(say(Kind.HELLO, {"a": 1}))))


@pytest.mark.parametrize(
    "payload",
    [b"", b"{", b"[]", b"3", b"null", b'"x"', b"\xff\xfe", b"[" * 10_000, b'{"a":' * 10_000, b"9" * 10_000,
     b'{"a": "' + b"x" * MOST_WORDS + b'"}'],
    ids=lambda payload: f"{payload[:8]!r}-{len(payload)}",
)  # fmt: skip
def test_words_that_are_no_object_are_refused(payload: bytes) -> None:
    with pytest.raises(WireError):
        read(frames(Message(Header(Kind.HELLO), payload))).words()


@pytest.mark.parametrize("value", [None, "1", 1.0, True, [1], {}])
def test_words_of_another_type_are_refused(value: Any) -> None:
    with pytest.raises(WireError, match="seen is"):
        take({"seen": value}, seen=int)


@pytest.mark.parametrize("value", [-1, 2**63, 1.0, "1", None, [1], True])
def test_numbers_are_whole_and_fit(value: Any) -> None:
    with pytest.raises(WireError):
        numbers([1, value])


# At a leader in the middle of a run.


def half_way(staleness: int | None = 0, every: int = 0, **more: Any) -> Play:
    """A play that has come to its third update; then `before_step` is the caller's."""
    play = Play(UpdatePlan(13, 5, 8, staleness), 3, every=every, **more)
    play.begin_with(lambda: play.leader.tally.updates == 3, script(4))
    return play


def throw(play: Play, message: Message, sender: bytes = STRANGER) -> None:
    message.header.run = RUN
    play.arrive(0, sender, frames(message))


def test_another_protocol_is_told_so_in_words() -> None:
    play = half_way()
    header, payload = frames(say(Kind.HELLO))
    ((to, answer),) = play.leader.handle(STRANGER, [header[:4] + b"\x09\0" + header[6:], payload], play.now)
    assert (to, answer.kind) == (STRANGER, Kind.REFUSED)
    assert "protocol 9" in answer.words()["why"]
    assert play.leader.traffic.dropped["of another version"] == 1


def test_another_run_is_refused_with_a_reason() -> None:
    play = half_way()
    ((_, answer),) = play.leader.handle(STRANGER, frames(say(Kind.HELLO, run=RUN + 1)), play.now)
    assert (answer.kind, "another run" in answer.words()["why"]) == (Kind.REFUSED, True)


def test_another_fingerprint_is_refused_with_a_reason() -> None:
    play = half_way()
    for fingerprint, rank, word in (({"toy": "eleven"}, 1, "eleven"), (FINGERPRINT, 9, "not a worker")):
        hello = say(Kind.HELLO, {"fingerprint": fingerprint, "seen": 0, "about": {}}, run=RUN, rank=rank)
        ((_, answer),) = play.leader.handle(STRANGER, frames(hello), play.now)
        assert (answer.kind, word in answer.words()["why"]) == (Kind.REFUSED, True)


@pytest.mark.parametrize("kind", [Kind.RESTORE, Kind.FINISH, Kind.KEEP, Kind.RECALL])
@pytest.mark.parametrize("update", [0, 1, 2**64 - 1])
@pytest.mark.parametrize("every", [0, 2])
def test_nobody_gives_orders_to_the_server_that_leads(kind: Kind, update: int, every: int) -> None:
    play = half_way(every=every)
    throw(play, say(kind, update=update, generation=3))
    assert not play.leader.finished
    assert play.leader.tally.updates == 3
    assert not play.leader.shard.kept
    play.run(script(5))
    torch.testing.assert_close(play.weights, half_way().run(script(5)).weights, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", [Kind.RESTORE, Kind.FINISH, Kind.KEEP, Kind.RECALL, Kind.ATTACH])
def test_only_the_leader_gives_orders_to_another_server(kind: Kind) -> None:
    play = half_way(servers=2, every=2)
    before = [chunk.version for chunk in play.servers[1].shard.chunks.values()]
    play.arrive(1, STRANGER, frames(say(kind, run=RUN, rank=3, update=0, generation=5)))
    assert [chunk.version for chunk in play.servers[1].shard.chunks.values()] == before
    assert not play.servers[1].finished
    assert play.servers[1].generation == play.leader.generation
    assert not play.servers[1].shard.kept


@pytest.mark.parametrize("row", [[], [1], [1, 2], [1, 2, 3, 4], 5, "x", None, {}, ["1", 0.0, 0], [1.0, 0.0, 0],
                                 [-1, 0.0, 0], [2**70, 0.0, 0], [1, "x", 0], [1, None, 0], [1, [0], 0], [1, 0.0, -1],
                                 [1, 0.0, 1.5], [[1], 0.0, 0], [1, True, 0]])  # fmt: skip
def test_a_report_of_strange_rows_is_dropped(row: Any) -> None:
    play = half_way()
    member = play.players[1].client
    identity = {"rank": 1, "life": member.life, "generation": member.generation}
    report = say(Kind.REPORT, {"done": [row], "target": 1, "about": {}}, sequence=2**40, **identity)
    throw(play, report, play.players[1].address)
    assert play.leader.traffic.dropped["malformed"] == 1


@pytest.mark.parametrize("loss", [10**400, -(10**400), 1e308, math.nan, math.inf])
def test_a_report_of_any_loss_is_survived(loss: float) -> None:
    """10**400 is a whole number in JSON, and no float holds it."""
    play = Play(SYNC, 1, validation=8)
    play.begin_with(lambda: bool(play.leader.ledger.evaluating and play.leader.ledger.workers[1].held))
    rows = [[lease, loss, 1.0, 0.0] for lease in play.leader.ledger.workers[1].held]
    member = play.players[1].client
    identity = {"rank": 1, "life": member.life, "generation": member.generation}
    throw(play, say(Kind.REPORT, {"done": rows, "target": 1, "about": {}}, sequence=2**40, **identity))
    whole = isinstance(loss, int)
    assert play.leader.traffic.dropped["malformed"] == whole
    assert all((row[0] in play.leader.ledger.workers[1].held) == whole for row in rows)


@pytest.mark.parametrize(
    "words",
    [
        '{"fingerprint": %s, "seen": 0, "about": {}}',
        '{"fingerprint": {"toy": %s}, "seen": 0, "about": {}}',
        '{"fingerprint": {}, "seen": %s, "about": {}}',
    ],
)
def test_words_of_any_depth_are_survived(words: str) -> None:
    """What can be read at all may still be too deep to be shown."""
    play = half_way()
    for depth in range(800, 1000):
        deep = (words % ("[" * depth + "]" * depth)).encode()
        throw(play, Message(Header(Kind.HELLO, rank=1, life=99), deep))
    assert play.leader.members[1].life == play.players[1].client.life


@settings(max_examples=150)
@given(header=headers, size=st.sampled_from([0, 2, 24, 32]), member=st.booleans())
def test_no_header_breaks_a_leader(header: Header, size: int, member: bool) -> None:
    """Of ranks and lives that are known, too."""
    play = _standing()
    header.run = RUN
    header.generation = header.generation if header.generation % 2 else play.leader.generation
    if member:
        header.rank, header.life = 1, play.players[1].client.life
    for to, answer in play.leader.handle(STRANGER, frames(Message(header, b"\0" * size)), play.now):
        assert isinstance(to, bytes)
        answer.frames()


_stand: list[Play] = []


def _standing() -> Play:
    """One play for many headers: that it is not as it was is no matter here."""
    if not _stand or _stand[0].leader.error:
        _stand[:] = [half_way()]
    return _stand[0]


def test_waiting_for_versions_that_never_come_takes_no_memory() -> None:
    play = half_way()
    dice = random.Random(0)
    for _ in range(1000):
        header = Header(Kind.PULL, generation=play.leader.generation, update=dice.getrandbits(64),
                        slot=dice.getrandbits(32), want=2**64 - 1)  # fmt: skip
        throw(play, Message(header))
    assert sum(map(len, play.leader._waiting.values())) < 100


# Ten thousand frames.


def spoilt(dice: random.Random, old: list[list[bytes]]) -> list[bytes]:
    """A frame that no rank has sent, or has sent before."""
    header, payload = dice.choice(old)
    what = dice.randrange(4)
    if what == 0:
        return [dice.randbytes(dice.randrange(2 * SIZE)), dice.randbytes(dice.randrange(64))]
    if what == 1:
        cut = dice.randrange(SIZE + len(payload))
        return [header[:cut], payload] if cut < SIZE else [header, payload[: cut - SIZE]]
    if what == 2:
        flipped = bytearray(header + payload)
        bit = dice.randrange(8 * len(flipped))
        flipped[bit // 8] ^= 1 << bit % 8
        return [bytes(flipped[:SIZE]), bytes(flipped[SIZE:])]
    return [header, payload]


@pytest.mark.parametrize("staleness", [0, 2])
@pytest.mark.parametrize("member", [False, True])
def test_ten_thousand_spoilt_frames_change_nothing(staleness: int, member: bool) -> None:
    clean = Play(UpdatePlan(13, 5, 8, staleness)).run(script(4))
    play, dice, old, counts = Play(UpdatePlan(13, 5, 8, staleness)), random.Random(1), [], [0]
    arrive = play.arrive

    def keep(server: int, sender: bytes, found: Any) -> None:
        old.append(list(found))
        arrive(server, sender, found)

    def attack(play: Play) -> None:
        made = play.leader.shard.chunks[0].version
        past = [f for f in old if len(f[0]) == SIZE and (read(f).kind != Kind.PUSH or read(f).header.update + 2 < made)]
        if made < 3 or not past or counts[0] >= 10_000:
            return
        for _ in range(200):
            counts[0] += 1
            sender = play.players[1].address if member else STRANGER
            play.leader.handle(sender, [bytearray(f) for f in spoilt(dice, past)], play.now)

    play.arrive, play.before_step = keep, attack  # type: ignore[method-assign,assignment]
    play.run(script(4))
    assert counts[0] == 10_000
    assert torch.equal(play.weights, clean.weights)
    assert play.leader.traffic.dropped["malformed"] > 4000


def test_another_protocol_is_known_by_its_start_whatever_its_header_looks_like() -> None:
    for length in (6, 8, SIZE, SIZE + 40):
        with pytest.raises(OtherProtocol, match="protocol 9"):
            read([b"PLPS" + (9).to_bytes(2, "little") + bytes(length - 6), b""])

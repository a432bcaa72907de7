"""A whole run without sockets: servers, workers, and a script that says what happens next."""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from server_toy import Events, Memory, Record, ToyFlat, first_weights, layout, order, samples_of, sequential, shard
from torch import Tensor

from paceline.data.batch import Batch
from paceline.data.input import AHEAD
from paceline.server.client import Client
from paceline.server.core import Core, Reply
from paceline.server.lead import Leader
from paceline.server.ledger import TRAIN, Part, UpdatePlan
from paceline.server.roles import Rules
from paceline.server.wire import LENT, Buffer, Header, Kind, Message, read, say
from paceline.strategies.engine import StepTimer
from paceline.strategies.parameter_server.work import Work
from paceline.tasks.table import CLASSIFICATION
from paceline.tasks.validations import Validations

RUN = 7
SILENT = 5.0
# Nothing but waiting for so long is a deadlock.
STUCK = 60.0
MOST_STEPS = 20_000
# The leader's clock ticks after so many steps, also while there is much to do.
TICK = 50
FINGERPRINT = {"toy": "ten values"}
ORDINARY = 1000
MISCHIEF = ("twice", "cut", "kill", "murder", "lapse", "restart")
# What the script can also do where there are checkpoints.
SERVERS_TOO = (*MISCHIEF, "server")


def script(seed: int, events: Sequence[tuple[int, int]] = (), length: int = 400) -> list[int]:
    """An order of arrival, and what goes wrong when: at (step, which)."""
    dice = random.Random(seed)
    steps = [dice.randrange(ORDINARY) for _ in range(length)]
    for at, which in sorted(events, reverse=True):
        steps.insert(at, ORDINARY + which)
    return steps


class Link:
    """Stands for a Dialler: what is sent goes into the play's queue."""

    def __init__(self, play: Play, address: bytes, server: int) -> None:
        self._play, self._address, self._server = play, address, server
        self.inbox: deque[list[Buffer]] = deque()
        self.cut = False

    def send(self, message: Message, track: bool = False) -> Any:
        self._play.post(self._address, server_name(self._server), message)
        return SimpleNamespace(done=True)

    def messages(self) -> Iterator[list[Buffer]]:
        while self.inbox:
            yield self.inbox.popleft()

    def confirm(self) -> None:
        pass

    def broken(self) -> bool:
        cut, self.cut = self.cut, False
        return cut


class Links:
    """Stands for Diallers."""

    def __init__(self, play: Play, endpoints: Sequence[str], name: str) -> None:
        self.all = [Link(play, name.encode(), server) for server in range(len(endpoints))]

    def wait(self, _seconds: float) -> list[int]:
        return [server for server, link in enumerate(self.all) if link.inbox]

    def memory(self, like: Tensor) -> Tensor:
        return torch.zeros_like(like)

    def forget_memory(self) -> None:
        pass


def received(frames: Sequence[Buffer]) -> list[Buffer]:
    """What the other side gets: copies, and what is lent as it is by now."""
    return [frame if isinstance(frame, memoryview) else bytearray(frame) for frame in frames]


def server_name(server: int) -> bytes:
    return b"server %d" % server


class Player:
    """A worker: the real Client and the real Work, one step at a time instead of in a loop of their own."""

    def __init__(self, play: Play, rank: int, life: int) -> None:
        self.play, self.rank, self.address = play, rank, f"{rank}.{life:x}".encode()
        self.flat = ToyFlat()
        with mock.patch("paceline.server.client.Diallers", lambda ends, name, *_, **__: Links(play, ends, name)):
            self.client = Client(rank, RUN, life, play.layout, self.flat.weights, ["-"] * play.rules.servers,
                                 staleness=play.plan.staleness, beat_seconds=math.inf)  # fmt: skip
        self.links: Links = self.client._links  # type: ignore[assignment]
        flat: Any = self.flat
        recorder: Any = SimpleNamespace(step=lambda *_, **__: None, input_seconds=0.0)
        scorer: Any = partial(flat.score)
        self.work = Work(self.client, flat, self._batch, scorer, 1, 0.0, 0, lambda _: recorder, lambda: False, recorder)
        self.work._timer = StepTimer()
        self.client.target = 1 + AHEAD
        self.awake = self.gone = False
        self.hello()

    def _batch(self, part: Part) -> Batch:
        samples = self.play.plan.samples
        shuffled = order(samples, part.epoch) if part.kind == TRAIN else torch.arange(samples)
        picked = shuffled[part.start : part.stop]
        return Batch(samples_of(samples, part.epoch, picked), picked, part.total)

    def hello(self) -> None:
        """As Client.join does, which waits for the answer."""
        if not getattr(self, "joining", False):
            self.client._forget()
        self.joining = True
        self.client._send(0, say(Kind.HELLO, {"fingerprint": FINGERPRINT, "about": {}, "seen": self.client.seen}))

    def _welcomed(self, message: Message) -> None:
        self.client.generation, self.client.estranged, self.joining = message.header.generation, False, False
        self.work.coming, self.work.pushed, self.work.evaluating = {}, {}, None
        self.client.pull(0)
        self.client.report()

    def act(self) -> None:
        """As Work.run does, once round; falls asleep when there is nothing to do."""
        client, work = self.client, self.work
        if self.joining:
            for message in client._receive(0):
                assert message.kind != Kind.REFUSED, message.words()
                if message.kind == Kind.WELCOME and self.joining:
                    self._welcomed(message)
            self.awake = False
            return
        client.poll(0)
        if client.finish:
            client.leave()
            self.awake, self.gone = False, True
            return
        if client.estranged:
            self.hello()
            return
        work._settle_pushed()
        for lease, part in client.leases.items():
            if lease not in work.coming and lease not in work.pushed:
                work.coming[lease] = Future()
                work.coming[lease].set_result(self._batch(part))
        chosen = work._choose()
        self.awake = chosen is not None
        if chosen:
            used = self.flat.weights.clone()
            work._fulfil(*chosen)
            if chosen[1].kind == TRAIN:
                self.play.record.has_computed(chosen[1], used, self.flat.gradient)


class Play:
    """Plays the script to its end, then goes on fairly until the run is over."""

    def __init__(
        self,
        plan: UpdatePlan,
        workers: int = 3,
        servers: int = 1,
        every: int = 0,
        mischief: Sequence[str] = MISCHIEF,
        validation: int = 0,
        kept: int = 2,
        evaluate_every: int = 0,
        stop_after: int = 0,
        lends: bool = False,
    ) -> None:
        self.plan, self.layout, self.mischief, self.lends = plan, layout(servers), mischief, lends
        ranks = tuple(range(servers, servers + workers))
        self.rules = Rules(ranks, servers, SILENT, 100_000.0, validation, 0, evaluation_batch=4, save_every=every)
        self.validations = Validations(plan.course, plan.updates, CLASSIFICATION, every=evaluate_every,
                                       patience=stop_after, enabled=validation > 0)  # fmt: skip
        self.record, self.events = Record(plan, self.layout), Events()
        self.stores = [Memory(kept) if every else None for _ in range(servers)]
        self.queues: dict[tuple[bytes, bytes], deque[list[Buffer]]] = {}
        self.now, self.steps, self.lives = 0.0, 0, 0
        self.done: Counter[str] = Counter()  # what went wrong, how often
        self.servers: list[Core] = [self._server(server) for server in range(servers)]
        self.players = {rank: Player(self, rank, self._life()) for rank in ranks}
        self.slow = b""  # who gets messages only when there is nothing else to do
        self.before_step: Callable[[Play], None] = lambda _: None

    @property
    def leader(self) -> Leader:
        leader = self.servers[0]
        assert isinstance(leader, Leader)
        return leader

    @property
    def weights(self) -> Tensor:
        found = first_weights()
        for server in self.servers:
            for number, chunk in server.shard.chunks.items():
                self.record.of(found, number).copy_(chunk.values)
        return found

    def _life(self) -> int:
        self.lives += 1
        return self.lives

    def _server(self, server: int, restarted: bool = False) -> Core:
        own, store, life = shard(self.record, server), self.stores[server], self._life()
        if server:
            return Core(server, RUN, life, own, store)
        return Leader(RUN, life, own, self.layout, self.plan, self.rules, self.validations, FINGERPRINT, self.events,
                      store, restarted=restarted)  # fmt: skip

    # Messages.

    def post(self, sender: bytes, to: bytes, message: Message) -> None:
        frames: list[Buffer] = [bytes(frame) for frame in message.frames()]
        if self.lends and message.kind in (Kind.PUSH, Kind.WEIGHTS) and self._leader_address() not in (sender, to):
            frames[1:] = message.payload, LENT
        self.queues.setdefault((sender, to), deque()).append(frames)

    def _spoil(self) -> None:
        """Whoever lends memory writes to it as soon as nobody may be reading it."""
        for player in self.alive():
            for gradient in player.client._gradients:
                if player.client._is_free(gradient):
                    gradient.values.fill_(math.nan)
        for server in self.servers:
            for chunk in server.shard.chunks.values():
                for place in chunk._places:
                    if place.free and place is not chunk._place:
                        place.values.fill_(math.nan)

    def _post_all(self, server: int, replies: Sequence[Reply]) -> None:
        known = {player.address for player in self.players.values() if not player.gone}
        known.add(self._leader_address())
        for to, message in replies:
            if to in known:
                self.post(server_name(server), to, message)
        for other, message in self.leader.others.outbox:
            self.post(self._leader_address(), server_name(other), message)
        self.leader.others.outbox = []

    def _leader_address(self) -> bytes:
        return f"0.{self.leader.life:x}".encode()

    def arrive(self, server: int, sender: bytes, frames: Sequence[Buffer]) -> None:
        self._post_all(server, self.servers[server].handle(sender, received(frames), self.now))

    def _deliver(self, sender: bytes, to: bytes, twice: bool = False) -> None:
        frames = self.queues[sender, to][0]
        if not twice:
            self.queues[sender, to].popleft()
        if to.startswith(b"server"):
            self.arrive(int(to.split()[1]), sender, frames)
        elif to == self._leader_address():
            answer = read(received(frames))
            self.leader.answered(int(sender.split()[1]), answer, self.now)
            self._post_all(0, [])
        for player in self.players.values():
            if player.address == to and not player.gone:
                player.links.all[int(sender.split()[1])].inbox.append(received(frames))
                player.awake = True

    # What happens.

    def run(self, script: Sequence[int] = ()) -> Play:
        stuck_since, before = self.now, None
        while not (self.leader.finished and all(player.gone for player in self.players.values())):
            self.before_step(self)
            self._step(script[self.steps] if self.steps < len(script) else None)
            if self.leader.trained and not self.leader.finished and self.leader.collect(self.now):
                self.leader.finished = True
                self._post_all(0, self.leader.tick(self.now))
            self._post_all(0, [])
            assert self.leader.error is None, self.leader.error
            self.steps += 1
            progress = self.leader.tally.updates, self.leader.ledger.complete, len(self.events.returns)
            if progress != before or self.steps < len(script):
                before, stuck_since = progress, self.now
            assert self.now - stuck_since < STUCK, self._stuck("a deadlock")
            assert self.steps < MOST_STEPS, self._stuck("no end")
        return self

    def begin_with(self, until: Callable[[], bool], script: Sequence[int] = ()) -> None:
        """Only as far as this."""
        while not until():
            self._step(script[self.steps] if self.steps < len(script) else None)
            self.steps += 1
            assert self.steps < MOST_STEPS, self._stuck("no end")

    def _stuck(self, what: str) -> str:
        workers = {rank: (w.held, list(w.mine)) for rank, w in self.leader.ledger.workers.items()}
        versions = {n: c.version for server in self.servers for n, c in server.shard.chunks.items()}
        due = {rank: list(p.client._due) for rank, p in self.players.items() if not p.gone}
        free = self.leader.ledger._free
        return f"{what} at step {self.steps}: {versions=} {workers=} {free=} {due=}"

    def _step(self, number: int | None) -> None:
        if self.lends:
            self._spoil()
        if number is not None and number >= ORDINARY:
            self._mischief(number - ORDINARY)
            return
        waiting = [key for key, queue in self.queues.items() if queue]
        possible: list[Callable[[], None]] = [player.act for player in self.players.values() if player.awake]
        possible += [partial(self._deliver, *key) for key in waiting if key[1] != self.slow]
        possible = possible or [partial(self._deliver, *key) for key in waiting]
        if self.steps % TICK == TICK - 1:
            self._time_passes(0.25)
        elif possible:
            possible[(self.steps if number is None else number) % len(possible)]()
        else:
            for player in self.alive():
                player.hello() if player.joining else player.client.report()
            self._time_passes(1)

    def _time_passes(self, seconds: float) -> None:
        self.now += seconds
        self._beat(self.alive())
        self._post_all(0, self.leader.tick(self.now))

    def _beat(self, players: Sequence[Player]) -> None:
        for player in players:
            beat = Header(Kind.BEAT, run=RUN, rank=player.rank, life=player.client.life)
            self.arrive(0, player.address + b".beat", [bytes(frame) for frame in Message(beat).frames()])

    def alive(self) -> list[Player]:
        return [player for player in self.players.values() if not player.gone]

    def _mischief(self, number: int) -> None:
        if self.leader.finished:
            return
        what, which = self.mischief[number % len(self.mischief)], number // len(self.mischief)
        alive = self.alive()
        chosen = alive[which % len(alive)]
        if what == "twice" and (ready := [key for key, queue in self.queues.items() if queue]):
            self._deliver(*ready[which % len(ready)], twice=True)
        elif what == "cut":
            self.cut(chosen, which // len(alive) % self.rules.servers)
        elif what in ("kill", "murder") and len(alive) > 1 and self.leader.begun:
            self.kill(chosen, lose=what == "murder")
        elif what == "lapse":
            self.lapse(chosen)
        elif what == "restart" and (gone := [player for player in self.players.values() if player.gone]):
            self.restart(gone[which % len(gone)].rank)
        elif what == "server":
            self.restart_server(which % self.rules.servers)
        else:
            return
        self.done[what] += 1

    def cut(self, player: Player, server: int) -> None:
        """A connection breaks: what is on its way is lost."""
        self._lose(player.address, server_name(server))
        player.links.all[server].cut = player.awake = True

    def kill(self, player: Player, *, lose: bool) -> None:
        """A worker's process dies; what it has sent may be lost, or come later."""
        player.gone, player.awake = True, False
        for server in range(self.rules.servers):
            if lose:
                self._lose(player.address, server_name(server))
            self.queues.pop((server_name(server), player.address), None)

    def restart(self, rank: int) -> None:
        for server in range(self.rules.servers):
            self._lose(self.players[rank].address, server_name(server))
        self.players[rank] = Player(self, rank, self._life())

    def lapse(self, player: Player) -> None:
        """A worker says nothing for so long that it is given up."""
        self.now += SILENT + 1
        self._beat([other for other in self.alive() if other is not player])
        self._post_all(0, self.leader.tick(self.now))

    def restart_server(self, server: int) -> None:
        """A server's process dies, and another one takes its place."""
        for player in self.alive():
            self.cut(player, server)
        self._lose(self._leader_address(), server_name(server))
        if server == 0:
            for other in range(1, self.rules.servers):
                self._lose(self._leader_address(), server_name(other))
        self.servers[server] = self._server(server, restarted=True)

    def _lose(self, one: bytes, other: bytes) -> None:
        self.queues.pop((one, other), None)
        self.queues.pop((other, one), None)


# What holds of every play.


def check_samples(play: Play) -> None:
    """Every chunk has every sample of every epoch once; of the last epoch, as many as the plan has."""
    spans = [(play.plan.epoch(update), play.plan.span(update)) for update in range(play.plan.updates)]
    expected = {epoch: sum(len(span) for e, span in spans if e == epoch) for epoch, _ in spans}
    for chunk in range(play.layout.chunks):
        used = play.record.samples(chunk)
        assert set(used.values()) == {1}
        assert Counter(epoch for epoch, _ in used) == expected


def check_sequential(play: Play) -> None:
    torch.testing.assert_close(play.weights, sequential(play.plan), rtol=0, atol=1e-12)

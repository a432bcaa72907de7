"""The leader: decides who takes part and computes what, when to evaluate, to save or go back, and to end the run."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from typing import Any

from paceline.errors import CommTimeout, DivergedError, PacelineError, UsageError
from paceline.layout import share
from paceline.server.core import Address, Core, Store
from paceline.server.layout import Layout
from paceline.server.ledger import TRAIN, Ledger, UpdatePlan
from paceline.server.other_servers import OtherServers
from paceline.server.roles import WAS_INTERRUPTED, Member, Return, Rules, Watcher, mismatch
from paceline.server.shard import Shard
from paceline.server.tally import Result, Tally
from paceline.server.wire import Header, Kind, Message, WireError, numbers, say, take
from paceline.tasks.base import NOTHING_COUNTS, Sums
from paceline.tasks.validations import Validations

# How long to wait for the other servers' weights before asking again.
COLLECT_SECONDS = 5.0
# Updates whose squares are kept, for a server that asks again.
KEPT_SQUARES = 8


class Leader(Core):
    """A server that also decides for all servers and workers."""

    def __init__(
        self,
        run: int,
        life: int,
        shard: Shard,
        layout: Layout,
        plan: UpdatePlan,
        rules: Rules,
        validations: Validations,
        fingerprint: dict[str, str],
        watcher: Watcher,
        store: Store | None = None,
        welcome: dict[str, Any] | None = None,
        restarted: bool = False,
    ) -> None:
        self.layout, self.plan, self.rules, self.fingerprint, self.watcher = layout, plan, rules, fingerprint, watcher
        self.validations = validations
        self.welcome = {"fingerprint": fingerprint, **(welcome or {})}
        self.ledger, self.tally = Ledger(plan), Tally()
        self.members: dict[int, Member] = {}
        self.said: dict[tuple[int, int], dict[str, Any]] = {}  # the latest counts of each worker, by rank and process
        self.collected: dict[int, memoryview] = {}  # the other servers' chunks, at the end
        self._collecting = (-math.inf, 0)  # when it started, and by which order
        self.results: dict[str, Result] = {}  # of evaluations, current and past
        self.error: PacelineError | None = None
        self.lost: dict[int, str] = {}
        self.begun = self.recalled = self.trained = False
        self._saved = 0  # updates at the last checkpoint
        self._squares: dict[int, dict[int, float]] = {}  # by update and server: of gradients that are clipped
        super().__init__(0, run, life, shard, store)
        self.others = OtherServers(rules.servers - 1, self._identity, self.welcome)
        self.restarted = restarted
        self.returns: list[Return] = []  # to checkpoints
        self._saved_at: float | None = None  # when that was
        self._skips = 0  # updates in a row that were skipped
        self._doubles: dict[int, tuple[Address, Message, float]] = {}
        self._nonfinite: dict[int, list[int]] = {}  # by update: ranks whose loss or gradient was not finite
        self.nonfinite_place = 0  # position, from 1, of the first value of a gradient that was not finite
        self._why = ""
        self._alone_since: float | None = None
        self._first_came: float | None = None
        if rules.servers == 1 and plan.staleness is not None:
            self._go_back("rank 0 was restarted" if self.restarted else "")
        elif self.restarted and plan.staleness is None:
            self._returned(self.tally.updates, 0, "rank 0 was restarted")

    # Messages.

    def take(self, sender: Address, message: Message, now: float) -> None:
        header = message.header
        member = self.members.get(header.rank)
        if member is not None and member.life != header.life:
            member = None
        if header.kind == Kind.HELLO:
            self._hello(sender, message, now)
        elif header.kind == Kind.LEAVE:
            if member:
                self._leave(header.rank, message.words())
            self.send(sender, say(Kind.ALIVE, sequence=header.sequence))
        elif header.kind not in (Kind.BEAT, Kind.REPORT):
            super().take(sender, message, now)
            return
        elif member is None or (header.kind == Kind.REPORT and header.generation != self.generation):
            self.send(sender, say(Kind.AGAIN))
        elif header.kind == Kind.BEAT:
            self.ledger.beat(header.rank, header.update - 1 if header.update else None, now)
            self.send(sender, say(Kind.ALIVE, sequence=header.sequence))
            return
        elif header.sequence <= member.heard:
            self.traffic.dropped["replayed"] += 1
        else:
            member.heard = header.sequence
            self._report(header.rank, member, message, now)
        self.go_on(now)

    def _hello(self, sender: Address, message: Message, now: float) -> None:
        rank, words = message.header.rank, message.words()
        fingerprint, seen, about = take(words, fingerprint=dict, seen=int, about=dict)
        refusal = self._mismatch(rank, fingerprint)
        if refusal:
            self.traffic.dropped["refused"] += 1
            self.send(sender, say(Kind.REFUSED, {"why": refusal}))
            return
        if not self.others.ready:
            return  # servers are starting, or restoring a checkpoint: the worker will ask again
        member = self.members.get(rank)
        if member and member.life != message.header.life:
            self._doubles.setdefault(rank, (sender, message, now))  # until it is clear whether the other one is gone
            return
        if member is None:
            self.ledger.join(rank, now)
            self.members[rank] = Member(sender, message.header.life, about)
            back = self.lost.pop(rank, None) is not None
            # After a restart of this server, the newest weights that workers have seen tell how many updates are lost.
            if self.returns and not self.begun:
                self.returns[-1].lost = max(self.returns[-1].lost, seen - self.returns[-1].number)
            if self.begun:
                self.watcher.joined(rank, about, back=back)
        self.send(sender, say(Kind.WELCOME, self.welcome, sequence=message.header.sequence))

    def _mismatch(self, rank: int, fingerprint: dict[str, Any]) -> str | None:
        if rank not in self.rules.workers:
            allowed = f"{self.rules.workers[0]} to {self.rules.workers[-1]}"
            return f"rank {rank} is not a worker of this run: its workers are ranks {allowed}"
        return mismatch(rank, fingerprint, self.fingerprint)

    def _report(self, rank: int, member: Member, message: Message, now: float) -> None:
        done, target, about = take(message.words(), done=list, target=int, about=dict)
        self.said[rank, member.life] = about
        for row in done:
            if not isinstance(row, list) or len(row) != 4 or any(type(value) is not float for value in row[1:]):
                raise WireError("not a lease and three sums")
            part = self.ledger.done(rank, *numbers(row[:1]))
            if part and part.kind != TRAIN:
                self.results[part.kind].add(Sums(*row[1:]), part.stop - part.start)
        member.target = min(max(target, 0), 16)
        member.told = None  # answer the report
        self.ledger.beat(rank, self.ledger.workers[rank].computing, now)

    def _tell(self, rank: int, member: Member) -> None:
        held = self.ledger.workers[rank].held
        member.told = set(held)
        words = {
            "leases": {str(number): asdict(part) for number, part in held.items()},
            "finish": self.finished or self.error is not None,
            "stopping": self.stopping,
            "error": str(self.error) if self.error else None,
        }
        self.send(member.address, say(Kind.LEASES, words))

    def _leave(self, rank: int, words: dict[str, Any]) -> None:
        member = self.members.pop(rank)
        (self.said[rank, member.life],) = take(words, about=dict)
        why = words.get("why")
        parts = self.ledger.drop(rank)
        if isinstance(why, str) and not self.finished:
            self.lost[rank] = why
            self.watcher.lost(rank, why, parts)
            if self.begun and not self.members and why == WAS_INTERRUPTED:
                self.stop()

    # Gradients.

    def _push(self, sender: Address, message: Message) -> None:
        """Without a bound, servers do not change their generation, so that one can restart alone. If the leader does,
        gradients may arrive that it has not leased: a checkpoint would have them, and they would be made again.
        """
        if self.plan.staleness is None and message.header.update >= self.ledger.opened:
            self.traffic.dropped["of an older generation"] += 1
            self.send(sender, say(Kind.AGAIN, sequence=message.header.sequence))
        else:
            super()._push(sender, message)

    def gradient(self, header: Header, missed: int) -> None:
        if header.chunk == 0:
            count = len(share(len(self.plan.span(header.update)), header.slots, header.slot))
            sums = Sums(header.loss, header.weight, header.metric)
            self.tally.gradient(header.rank, header.update, missed, sums, count)
            if header.nonfinite or not math.isfinite(header.loss):
                self._not_finite(header)

    def updated(self, number: int) -> None:
        if number:
            return
        # With a staleness bound updates are made in order; without, on arrival.
        update = self.tally.updates if self.plan.staleness is not None else next(iter(self.tally.open))
        epoch, ranks = self.plan.epoch(update), [rank for rank, _ in self.tally.pending[update]]
        result = self.tally.made(update, epoch, finite=update not in self._nonfinite)
        if not result.sums.weight:
            why = f"{NOTHING_COUNTS}; use a larger batch, or leave out samples without targets"
            self.fail(UsageError(f"update {update + 1}: {why}"))
            return
        self._skips = self._skips + 1 if update in self._nonfinite else 0
        if 0 < self._skips <= self.rules.skips:
            self.watcher.skipped(self.tally.updates - 1)
        elif self._skips:
            step, others = self.tally.updates, self.rules.workers if self.plan.staleness is None else ranks
            since = {rank: step if rank in self._nonfinite[update] else None for rank in others}
            self.fail(DivergedError.found("the loss or a gradient is not finite", step, since))
            return
        else:
            self.watcher.updated(self.tally.updates - 1, epoch, result)
        if not self._left_of(epoch):
            self.watcher.epoch_ended(epoch, self.tally.epochs[epoch])

    def _left_of(self, epoch: int) -> int:
        """How many samples the epoch still has."""
        made = self.tally.epochs[epoch]
        return self.plan.samples_of(epoch) - made.count - made.skipped

    def _not_finite(self, header: Header) -> None:
        """A loss or a gradient is not finite. If the weights still are finite, the worker that sent it caused it."""
        ranks = self._nonfinite.setdefault(header.update, [])
        self.nonfinite_place = self.nonfinite_place or header.nonfinite
        if self.shard.chunks[0].values.isfinite().all():
            ranks.append(header.rank)

    # Decisions are taken after every message and at intervals, from the current state only.

    def tick(self, now: float) -> list[tuple[Address, Message]]:
        for rank, why in self.ledger.overdue(now, self.rules.silent, self.rules.patience).items():
            self.members.pop(rank)
            self.lost[rank] = why
            self.watcher.lost(rank, why, self.ledger.drop(rank))
        for rank, (sender, hello, since) in list(self._doubles.items()):
            worker = self.ledger.workers.get(rank)
            if worker is None:
                del self._doubles[rank]
                self._hello(sender, hello, now)
            elif worker.heard > since + self.rules.silent / 2:  # not a message that was still in flight
                del self._doubles[rank]
                about = self.members[rank].about
                why = f"rank {rank} is already running as process {about.get('pid')} on {about.get('host')}"
                self.send(sender, say(Kind.REFUSED, {"why": why}))
        for server, state in self.others.states.items():
            if now - state.heard > self.rules.patience:
                self.fail(
                    CommTimeout(f"rank {server}, a server, has sent nothing for {now - state.heard:.0f} s", server)
                )
        self.others.order_all(Kind.ATTACH)
        self.go_on(now)
        return super().tick(now)

    def go_on(self, now: float) -> None:
        """Take the next decision, and give every worker the leases that it may have."""
        if self.error is None and not self.finished:
            self._notice_absence(now)
            if self.others.ready and self._has_begun(now):
                self._choose_phase(now)
        over = self.finished or self.error is not None
        for rank, member in self.members.items():
            if over and member.target >= 0:
                member.target = -1  # it is sent once, and again whenever the worker asks
                self._tell(rank, member)
            elif member.told is None or (self._leased(rank, member) - member.told):
                self._leased(rank, member)
                self._tell(rank, member)

    def _leased(self, rank: int, member: Member) -> set[int]:
        """The leases of a worker, including new ones."""
        over = self.finished or self.error is not None or not self.begun
        return set(self.ledger.lease(rank, 0 if over else member.target))

    def will_not_come(self, gone: dict[int, str]) -> None:
        """Workers that ended before they joined, and why: the others start without them."""
        for rank, why in gone.items():
            if rank not in self.members and rank not in self.lost:
                self.lost[rank] = why
                self.watcher.lost(rank, why, [])

    def _notice_absence(self, now: float) -> None:
        """Fail if no worker is left, or if some have not joined in time."""
        missing = [rank for rank in self.rules.workers if rank not in self.members]
        if not self.begun:
            missing = [rank for rank in missing if rank not in self.lost] or ([] if self.members else missing)
            missing = [rank for rank in self.others.ranks if rank not in self.others.states] + missing
        if not (missing if not self.begun else not self.members):
            self._alone_since = None
        elif self._alone_since is None:
            self._alone_since = now
        elif now - self._alone_since > self.rules.patience:
            names = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
            who = f"no worker is left ({names})" if self.begun else f"{names} did not connect"
            self.fail(CommTimeout(f"{who} within {self.rules.patience:g} s", missing[0]))

    def _has_begun(self, now: float) -> bool:
        """Whether all workers that were not lost have joined; after a restart, all that have joined in time."""
        if self.members and self._first_came is None:
            self._first_came = now
        late = self.restarted and self._first_came is not None and now - self._first_came > self.rules.silent
        complete = bool(self.members) and {*self.members, *self.lost} >= {*self.rules.workers}
        if not self.begun and self.plan.start.step and not self.can_save:
            self.fail(UsageError("not all servers see the checkpoint that this run continues from"))
        elif not self.begun and (late or complete):
            self.begun = True
            servers = {rank: state.about for rank, state in self.others.states.items()}
            self.watcher.begun(servers | {rank: member.about for rank, member in self.members.items()})
        return self.begun

    def _choose_phase(self, now: float) -> None:
        """Decide from the current state only, so that training can go back at any time."""
        ledger, plan = self.ledger, self.plan
        if self.stopping and self._alone_since is not None and now - self._alone_since > self.rules.silent:
            self.trained = True  # no worker is left to complete the open updates
            return
        if ledger.evaluating:
            if not ledger.idle:
                return
            self._evaluated(ledger.evaluating)
            if self.error:
                return
        over = ledger.complete >= plan.updates or self.validations.exhausted
        if not self.others.ready:
            return
        due = self._save_due(now)
        if ledger.idle and (ledger.complete == due or (self.stopping and self._unsaved())):
            self._save_all(now)
        elif self.stopping:
            ledger.limit = ledger.opened
            self.trained = ledger.idle
        elif self.validations.is_due(ledger.complete):
            self._evaluate("validation", self.rules.validation)
        elif not over:
            ledger.limit = int(min(plan.updates, self.validations.due(ledger.complete), due))
        elif self.validations.values and not self.recalled:
            self.recalled = True
            self.shard.recall()
            self.others.order_all(Kind.RECALL)
        elif self.rules.test and "test" not in self.results:
            self._evaluate("test", self.rules.test)
        else:
            self.trained = True

    def _save_due(self, now: float) -> float:
        """After how many updates the next checkpoint is due: no update is opened beyond it before it is saved.

        One that is due while another is still being written is left out.
        """
        rules, opened = self.rules, self.ledger.opened
        if not self.can_save or self.recalled or (self.store and self.store.busy):
            return math.inf
        if self._saved_at is None:
            self._saved_at = now  # the clock starts with the training
        due: float = math.inf
        if rules.save_every:
            due = -(-max(opened, self._saved + 1) // rules.save_every) * rules.save_every
        if rules.save_seconds and now - self._saved_at > rules.save_seconds and opened > self._saved:
            due = min(due, opened)
        return due

    @property
    def can_save(self) -> bool:
        """Whether all servers see the folder for checkpoints."""
        return self.store is not None and all(state.saves for state in self.others.states.values())

    def _unsaved(self) -> bool:
        return self.ledger.complete > self._saved and not self.recalled

    def _save_all(self, now: float) -> None:
        """Let every server save its part of a checkpoint."""
        number = self.ledger.complete
        self._saved, self._saved_at = number, now
        if self.can_save:
            mark = f"{self.generation:x}.{self.life:x}"  # as the others see it in the order
            self.save(number, mark, {"tally": self.tally.state()})
            self.others.order_all(Kind.SAVE, update=number)

    def _evaluate(self, name: str, samples: int) -> None:
        self.results[name] = Result()
        # Without a bound, a server that restored a checkpoint may have fewer updates than another.
        version = self.shard.chunks[0].version if self.plan.staleness is not None else 0
        self.ledger.evaluate(name, samples, self.rules.evaluation_batch, version)

    def _evaluated(self, name: str) -> None:
        self.ledger.end_evaluation()
        result = self.results[name]
        if not result.sums.finite:
            self.fail(DivergedError.found(f"the {name} loss is {result.sums.loss}", self.tally.updates, {}))
            return
        made = self.ledger.complete
        epoch = self.plan.epoch(made - 1)
        if name == "validation" and self.validations.add(made, result.sums):
            self.shard.keep()
            self.others.order_all(Kind.KEEP)
        self.watcher.evaluated(name, epoch, made, result)
        if self.validations.exhausted and name == "validation" and self._left_of(epoch):
            self.watcher.epoch_ended(epoch, self.tally.epochs[epoch])  # training ends within it

    def fail(self, error: PacelineError) -> None:
        self.error = self.error or error

    def stop(self) -> None:
        """Complete the leased parts, and end."""
        self.stopping = True
        if not self.begun:
            self.finished = True

    # The other servers.

    def _identity(self) -> dict[str, int]:
        return {"run": self.run, "generation": self.generation, "life": self.life}

    def answered(self, server: int, message: Message, now: float) -> None:
        """Handle STATE of another server, or the weights that it sends at the end."""
        if message.kind == Kind.SQUARES and message.header.generation == self.generation:
            self._heard_squares(message.header.update, server, message.header.loss)
            self.go_on(now)
        if message.kind == Kind.WEIGHTS and message.header.generation == self.generation:
            self.collected[message.header.chunk] = memoryview(message.payload)
        if message.kind != Kind.STATE:
            return
        if refusal := message.words().get("refusal"):
            self.fail(UsageError(str(refusal)))
        if message.words().get("stopping") is True:
            self.stop()
        known = self.others.heard(server, message, now)
        if known is None or known.life != message.header.life:
            self._server_came(server, again=known is not None)
        elif lost := self.others.lost_order(server):
            kind, told = lost
            if kind == Kind.RESTORE and told["update"] not in self.others.states[server].checkpoints:
                self._go_back("")  # there are newer ones now
            else:
                self.others.order(server, kind, **told)
        self.go_on(now)

    def tell_squares(self) -> None:
        if self.shard.own:
            update, squares = self.shard.own
            self._heard_squares(update, self.rank, squares)

    def _heard_squares(self, update: int, server: int, squares: float) -> None:
        """Send the squares of a whole gradient to all servers, when they and this one have told theirs.

        A server that tells them again has not got the answer: the last ones are kept for it.
        """
        parts = self._squares.setdefault(update, {})
        again = server in parts
        parts[server] = squares
        if len(parts) <= len(self.others.ranks):
            return
        total = sum(parts[each] for each in sorted(parts))
        for other in (server,) if again else self.others.ranks:
            self.others.send(other, Header(Kind.SQUARES, update=update, loss=total))
        if not again:
            self._squares.pop(update - KEPT_SQUARES, None)
            self.take_squares(update, total)

    def _server_came(self, server: int, *, again: bool) -> None:
        """A server is up, for the first time or after it was killed."""
        others = self.others
        if again:
            self.collected = {}
            self._why = f"rank {server} was restarted"
            if self.store:
                self.store.abandon()  # it will not write its part of a checkpoint that is not complete
            if self.plan.staleness is None:  # it has restored its own part of a checkpoint, alone
                number = max(others.states[server].checkpoints)
                self._returned(number, self.tally.updates - number, self._why)
                return
            # The other servers' lists of checkpoints may be outdated: ask again.
            others.states = {server: others.states[server]}
        if len(others.states) == len(others.ranks) and self.plan.staleness is not None:
            self._go_back(self._why or ("rank 0 was restarted" if self.restarted else ""))
            self._why = ""

    def collect(self, now: float) -> bool:
        """Collect the final weights and counts of all servers; true when all have arrived."""
        missing = [chunk for chunk in range(self.layout.chunks) if chunk not in {*self.shard.chunks, *self.collected}]
        since, order = self._collecting
        if now - since > COLLECT_SECONDS:
            self._collecting = now, self.others.orders + 1
            for chunk in missing:
                self.others.pull(self.layout.server_of(chunk), chunk)
            self.others.order_all(Kind.ATTACH)
            return not self.others.ranks
        return not missing and all(state.sequence >= order for state in self.others.states.values())

    def _go_back(self, why: str) -> None:
        """Restore the latest checkpoint that all servers have; all workers start again from there."""
        theirs = (state.checkpoints for state in self.others.states.values())
        common = max(set(self.checkpoints()).intersection(*theirs))
        if common < self.plan.start.step:
            self.fail(UsageError("not all servers see the checkpoint that this run continues from"))
            return
        before = self.tally.updates
        self.generation = random.getrandbits(63) | 1
        self.restore(common)
        self.members, self.trained, self.collected = {}, False, {}
        self.others.order_all(Kind.RESTORE, update=common)
        if why:
            self._returned(common, before - common, why)

    def _returned(self, number: int, lost: int, why: str) -> None:
        self.returns.append(Return(number, max(0, lost), why))
        self.watcher.went_back(number, why)

    def restore(self, number: int) -> dict[str, Any]:
        facts = super().restore(number)
        self.ledger.restart_at(number)
        self.tally = Tally.of(facts["tally"]) if facts else Tally()
        position = self.plan.course.after(max(number, self.plan.start.step))
        ended = number > 0 and position.used == self.plan.samples
        # A validation that is due after this update is made again: it was recorded after the checkpoint, if at all.
        self.validations.forget(number)
        if ended and position.epoch in self.tally.epochs:
            self.watcher.epoch_ended(position.epoch, self.tally.epochs[position.epoch])
        self.results.clear()
        self.recalled, self._saved, self._squares = False, number, {}
        return facts

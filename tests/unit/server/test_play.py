"""Whatever comes in whatever order, and whoever is lost: what a whole run of servers and workers must come to."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from server_play import MISCHIEF, ORDINARY, SERVERS_TOO, Play, check_samples, check_sequential, script
from server_toy import Memory
from torch import Tensor

from paceline.server.ledger import UpdatePlan
from paceline.server.wire import Buffer, Kind, read

SYNC = UpdatePlan(samples=13, batch=5, updates=8, staleness=0)
LONG = UpdatePlan(samples=13, batch=5, updates=40, staleness=0)
FREE = UpdatePlan(samples=13, batch=2, updates=14, staleness=None)


def bounded(staleness: int) -> UpdatePlan:
    return UpdatePlan(13, 5, 8, staleness)


# An order of arrival, and up to six times that something goes wrong.
scripts = st.builds(
    script, st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 350), st.integers(0, 300)), max_size=6)
)


# Synchronous.


@pytest.mark.parametrize("servers", [1, 2])
@settings(max_examples=35)
@given(scripts, st.integers(1, 4))
def test_synchronous_training_is_sequential_whatever_happens(servers: int, steps: list[int], workers: int) -> None:
    play = Play(SYNC, workers, servers).run(steps)
    check_sequential(play)
    check_samples(play)


# Bounded.


@settings(max_examples=50)
@given(scripts, st.integers(0, 3), st.integers(1, 2))
def test_no_gradient_is_staler_than_the_bound(steps: list[int], staleness: int, servers: int) -> None:
    play = Play(bounded(staleness), 3, servers).run(steps)  # the record looks at every update as it is made
    check_samples(play)
    assert play.events.updates == list(range(8))
    assert [len(made) for made in play.record.made.values()] == [8] * play.layout.chunks
    assert [epoch for epoch, _ in play.events.epochs] == [0, 1, 2]
    assert [result.count for _, result in play.events.epochs] == [13, 13, 10]
    assert [result.sums.metric for _, result in play.events.epochs] == [13, 13, 10]


@settings(max_examples=30)
@given(scripts, st.integers(0, 3))
def test_the_staleness_that_is_told_is_the_staleness_there_was(steps: list[int], staleness: int) -> None:
    play = Play(bounded(staleness)).run(steps)
    assert play.leader.tally.staleness == play.record.staleness()
    assert sum(play.leader.tally.gradients.values()) == sum(len(parts) for parts in play.record.made[0])


def test_a_bound_is_used() -> None:
    """Else nothing above would say anything of staleness."""
    found = [max(Play(bounded(3)).run(script(seed)).record.staleness()) for seed in range(10)]
    assert max(found) == 3


# Unbounded.


@settings(max_examples=50)
@given(scripts, st.integers(1, 2))
def test_without_a_bound_every_part_is_in_every_chunk_once(steps: list[int], servers: int) -> None:
    play = Play(FREE, 3, servers).run(steps)  # the record refuses a part that comes twice
    check_samples(play)
    for made in play.record.made.values():
        assert sorted(one.part.update for (one,) in made) == list(range(FREE.updates))
    assert play.leader.tally.staleness == play.record.staleness()
    assert sum(play.leader.tally.gradients.values()) == FREE.updates
    assert play.events.updates == list(range(FREE.updates))


# Memory that is lent: gradients and weights are read where they are, and overwritten as soon as that is allowed.


@pytest.mark.parametrize("servers", [1, 2])
@settings(max_examples=35)
@given(scripts, st.integers(1, 4), st.integers(0, 4))
def test_lent_memory_is_read_before_it_is_used_again(servers: int, steps: list[int], workers: int, every: int) -> None:
    play = Play(SYNC, workers, servers, every, SERVERS_TOO if every else MISCHIEF, lends=True).run(steps)
    check_sequential(play)
    check_samples(play)


@settings(max_examples=50)
@given(scripts, st.sampled_from([1, 2, 3, None]), st.integers(1, 2), st.booleans())
def test_lent_memory_is_copied_where_workers_do_not_wait(
    steps: list[int], staleness: int | None, servers: int, returns: bool
) -> None:
    """The record finds every update to be the sum of gradients as they were computed."""
    plan = FREE if staleness is None else bounded(staleness)
    play = Play(plan, 3, servers, 2 * returns, SERVERS_TOO if returns else MISCHIEF, lends=True).run(steps)
    check_samples(play)
    assert bool(play.weights.isfinite().all())


@pytest.mark.parametrize("plan", [SYNC, bounded(2), FREE], ids=["sync", "bounded", "free"])
def test_lending_changes_nothing(plan: UpdatePlan) -> None:
    for seed in range(5):
        once, again = (Play(plan, 3, 2, lends=lends).run(script(seed)) for lends in (False, True))
        assert torch.equal(once.weights, again.weights)


def test_a_slow_worker_delays_nobody_who_is_within_the_bound() -> None:
    """Its weights stay as they were sent, however many updates the others make meanwhile."""
    play = Play(bounded(3), 3, lends=True)
    play.slow = play.players[1].address
    play.run(script(3))
    check_samples(play)
    assert max(play.record.staleness()) == 3


# An order is a result.


@pytest.mark.parametrize("plan", [bounded(2), FREE], ids=["bounded", "free"])
@settings(max_examples=15)
@given(steps=scripts)
def test_the_same_order_gives_the_same_bits(plan: UpdatePlan, steps: list[int]) -> None:
    once, again = Play(plan).run(steps), Play(plan).run(steps)
    assert torch.equal(once.weights, again.weights)
    assert once.steps == again.steps


@pytest.mark.parametrize("plan", [bounded(2), FREE], ids=["bounded", "free"])
def test_another_order_gives_other_weights(plan: UpdatePlan) -> None:
    assert not torch.equal(Play(plan).run(script(1)).weights, Play(plan).run(script(2)).weights)


# It always ends: Play fails where nothing but waiting is left, or after MOST_STEPS.


@pytest.mark.parametrize("staleness", [0, 1, 3, None])
@pytest.mark.parametrize("workers", [2, 3, 5])
@settings(max_examples=5)
@given(seed=st.integers(0, 2**32), at=st.integers(60, 300), lose=st.booleans())
def test_one_worker_that_is_left_finishes(workers: int, staleness: int | None, seed: int, at: int, lose: bool) -> None:
    murder = MISCHIEF.index("murder" if lose else "kill")
    play = Play(bounded(0) if staleness == 0 else UpdatePlan(13, 5, 8, staleness), workers)
    play.run(script(seed, [(at + i, murder) for i in range(workers - 1)]))
    check_samples(play)


def test_a_worker_that_came_late_takes_over_what_its_pull_is_waiting_for() -> None:
    """It holds a part of the next update, waits for the weights of that, and then the others die."""
    for at in range(60, 220, 5):
        kill, restart = MISCHIEF.index("kill"), MISCHIEF.index("restart")
        lapse = MISCHIEF.index("lapse")
        events = [(at, kill), (at + 1, lapse), (at + 2, restart), (at + 60, kill), (at + 61, kill)]
        check_sequential(Play(SYNC, 3).run(script(at, events)))


# Servers that die.


@pytest.mark.parametrize("servers", [1, 2])
@settings(max_examples=25)
@given(scripts, st.integers(1, 4))
@example(script(0, [(250, ORDINARY + SERVERS_TOO.index("server"))]), 2)
def test_synchronous_training_goes_on_from_checkpoints(servers: int, steps: list[int], every: int) -> None:
    play = Play(SYNC, 3, servers, every, SERVERS_TOO).run(steps)
    check_sequential(play)
    check_samples(play)


@pytest.mark.parametrize("servers", [1, 2])
@settings(max_examples=25)
@given(scripts, st.integers(1, 4))
@example(script(0, [(250, ORDINARY + SERVERS_TOO.index("server"))]), 2)
def test_training_is_validated_and_stops_as_if_nothing_had_happened(servers: int, steps: list[int], every: int) -> None:
    """Also with servers that went back to a checkpoint; the weights at the end are the best ones."""
    quiet, play = (
        Play(LONG, 3, servers, saves, SERVERS_TOO, 8, evaluate_every=2, stop_after=2) for saves in (0, every)
    )
    quiet.run()
    play.run(steps)
    assert quiet.validations.best == max(quiet.validations.values) - 4
    assert quiet.leader.tally.updates == play.leader.tally.updates == max(quiet.validations.values) < LONG.updates
    assert play.validations.values == pytest.approx(quiet.validations.values)
    torch.testing.assert_close(play.weights, quiet.weights)
    assert [epoch for epoch, _ in quiet.events.epochs] == list(range(-(-quiet.leader.tally.updates // 3)))


@pytest.mark.parametrize("servers", [1, 2])
def test_the_best_weights_of_updates_that_are_made_again_are_kept_again(servers: int) -> None:
    quiet, play = (Play(LONG, 3, servers, 4, (), 8, evaluate_every=2, stop_after=2) for _ in range(2))
    best = quiet.run().validations.best
    assert best == 6
    play.begin_with(lambda: best in play.validations.values)
    for server in range(servers):
        play.restart_server(server)
    play.run()
    assert play.events.returns
    assert play.validations.values == pytest.approx(quiet.validations.values)
    torch.testing.assert_close(play.weights, quiet.weights)


@settings(max_examples=25)
@given(scripts, st.integers(1, 3), st.integers(1, 2))
def test_bounded_training_goes_on_from_checkpoints(steps: list[int], staleness: int, servers: int) -> None:
    play = Play(bounded(staleness), 3, servers, 2, SERVERS_TOO).run(steps)
    check_samples(play)
    assert [chunk.version for server in play.servers for chunk in server.shard.chunks.values()] == [8] * 3


@settings(max_examples=25)
@example(script(0, [(0, 0), (109, 286), (155, 188)]), 1)  # a gradient from before the restart arrives after it
@given(scripts, st.integers(1, 4))
def test_without_a_bound_a_server_that_comes_back_has_every_part_once(steps: list[int], every: int) -> None:
    play = Play(FREE, 3, 1, every, SERVERS_TOO).run(steps)
    check_samples(play)
    assert play.leader.tally.staleness.total() == play.leader.tally.gradients.total() == FREE.updates


def test_gradients_of_updates_that_are_gone_are_not_counted() -> None:
    """A checkpoint of a bounded run must not count gradients of updates that were still open."""
    for seed in range(20):
        play = Play(bounded(3), 3, 1, 2, ("server",)).run(script(seed, [(150 + 5 * seed, 0)]))
        assert play.leader.tally.gradients.total() == sum(len(parts) for parts in play.record.made[0]), seed


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_servers_that_are_far_apart_have_a_checkpoint_in_common(staleness: int) -> None:
    """One server is slow; whenever the other dies, at most one update is lost, as one is saved after each."""
    for at in range(200, 400, 50):
        play = Play(bounded(staleness), 3, 2, 1, ("server",))
        play.slow = b"server 0"
        before: list[int] = []

        def look(play: Play, at: int = at, before: list[int] = before) -> None:
            if play.steps == at:
                before.append(min(chunk.version for server in play.servers for chunk in server.shard.chunks.values()))

        play.before_step = look
        play.run(script(at, [(at, 1)]))
        for back in play.events.returns:
            assert back.number >= before[0] - 1, f"{at}: back to {back.number}, and all had had {before[0]} updates"


def test_an_order_that_is_lost_with_its_connection_is_given_again() -> None:
    """Server 1 comes back, is told to go back to a checkpoint, and the connection to the leader breaks just then."""
    lost: list[bytes] = []

    def lose(play: Play) -> None:
        for (sender, to), queue in play.queues.items():
            orders = [read([*map(bytearray, frames)]).kind for frames in queue] if to == b"server 1" else []
            if Kind.RESTORE in orders and play.events.returns and not lost:
                lost.append(sender)
                queue.clear()

    play = Play(SYNC, 3, 2, 2, ("server",))
    play.before_step = lose
    play.run(script(1, [(300, 1)]))
    assert lost
    check_sequential(play)


class Waiting(Memory):
    """The leader's: a checkpoint is being written until another server has written its part, too."""

    def __init__(self, other: Memory) -> None:
        super().__init__()
        self.other, self.awaited = other, list[int]()

    @property
    def busy(self) -> bool:
        return any(number not in self.other.files for number in self.awaited)

    def save(self, number: int, mark: str, tensors: dict[int, dict[str, Tensor]], facts: dict[str, Any]) -> None:
        super().save(number, mark, tensors, facts)
        self.awaited = [number]

    def abandon(self) -> None:
        self.awaited = []


@pytest.mark.parametrize("plan", [LONG, UpdatePlan(13, 2, 40, staleness=None)], ids=["sync", "free"])
def test_a_part_of_a_checkpoint_that_a_killed_server_did_not_write_is_not_waited_for(plan: UpdatePlan) -> None:
    """Server 1 is killed before its part of the second checkpoint is on the disk."""
    play = Play(plan, 3, 2, 4)
    other = play.stores[1]
    assert other is not None
    play.leader.store = leading = Waiting(other)
    play.begin_with(lambda: leading.awaited == [8] and play.leader.others.ready)
    del other.files[8]
    play.restart_server(1)
    play.run()
    assert [back.number for back in play.events.returns] == [4]
    assert max(other.files) == 40
    if plan.staleness == 0:
        check_sequential(play)


def test_an_answer_answers_what_was_asked_with_it() -> None:
    """An answer to a pull that was sent twice is none to the gradient that was pushed meanwhile."""
    play = Play(SYNC, 1)
    answers: list[list[Buffer]] = []

    def again(play: Play) -> None:
        client, link = play.players[1].client, play.players[1].links.all[0]
        if not answers:
            answers.extend(f for f in link.inbox if read(f).kind == Kind.WEIGHTS and read(f).header.chunk == 0)
        due = client._due.get((0, 0, 0))
        if len(answers) == 1 and due is not None and due.kind == Kind.PUSH:
            link.inbox.appendleft(answers[0])
            client._take(read(link.inbox.popleft()))
            assert (0, 0, 0) in client._due
            answers.append([])

    play.before_step = again
    play.run()
    assert len(answers) == 2

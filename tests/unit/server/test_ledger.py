"""A part is leased to one worker at a time, and done once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.server.ledger import Ledger, Part, UpdatePlan

PLAN = UpdatePlan(samples=13, batch=5, updates=9, staleness=1)


def ledger(plan: UpdatePlan = PLAN, workers: int = 3) -> Ledger:
    made = Ledger(plan)
    for rank in range(1, workers + 1):
        made.join(rank, 0.0)
    made.limit = plan.updates
    return made


def held(made: Ledger) -> list[Part]:
    return [part for worker in made.workers.values() for part in worker.held.values()]


@given(st.integers(1, 50), st.integers(1, 20), st.integers(1, 40))
def test_the_updates_of_an_epoch_have_its_samples_once(samples: int, batch: int, updates: int) -> None:
    plan = UpdatePlan(samples, batch, updates)
    for epoch in range(2):
        spans = [plan.span(update) for update in range(epoch * plan.per_epoch, (epoch + 1) * plan.per_epoch)]
        assert [place for span in spans for place in span] == list(range(samples))
        assert {plan.epoch(epoch * plan.per_epoch + i) for i in range(plan.per_epoch)} == {epoch}


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([0, 1, 3, None]), st.integers(1, 5))
def test_no_part_is_leased_twice_at_once_and_each_is_done_once(seed: int, staleness: int | None, workers: int) -> None:
    dice, made, done = random.Random(seed), ledger(UpdatePlan(13, 5, 9, staleness), workers), []
    for _ in range(3000):
        rank, what = dice.randint(1, workers), dice.randrange(20)
        if what == 0 and len(made.workers) > 1:
            made.drop(rank)
        elif what == 1 and rank not in made.workers:
            made.join(rank, 0.0)
        elif rank in made.workers:
            made.lease(rank, dice.randint(0, 3))
            worker = made.workers[rank]
            if worker.held and what > 5 and (part := made.done(rank, dice.choice(list(worker.held)))):
                done.append(part)
        parts = held(made)
        assert len(parts) == len(set(parts))
        assert not set(parts) & set(done)
        if staleness is not None:
            assert made.opened <= made.complete + staleness + made.ahead
    assert made.complete == 9
    assert len(done) == len(set(done))
    samples = sorted((part.update, place) for part in done for place in range(part.start, part.stop))
    assert samples == [(update, place) for update in range(9) for place in made.plan.span(update)]


def test_a_part_needs_weights_as_new_as_the_bound_says() -> None:
    parts = ledger(UpdatePlan(20, 5, 9, 2), 1).lease(1, 5).values()
    assert [(part.update, part.need) for part in parts] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2)]


def test_no_more_is_open_than_the_bound_and_the_window_allow() -> None:
    made = ledger(workers=1)
    assert [part.update for part in made.lease(1, 16).values()] == [0, 1, 2, 3]  # staleness 1, and 3 ahead
    made.done(1, 1)
    assert [part.update for part in made.lease(1, 16).values()] == [1, 2, 3, 4]


def test_a_lease_is_done_once_and_by_its_holder() -> None:
    made = ledger()
    (lease,) = made.lease(1, 1)
    assert made.done(2, lease) is None
    assert made.done(1, lease) is not None
    assert made.done(1, lease) is None
    assert made.done(9, lease) is None


def test_parts_of_who_is_gone_come_first() -> None:
    made = ledger(workers=2)
    made.lease(1, 2)
    made.lease(2, 2)
    orphans = made.drop(2)
    assert [(part.update, part.slot) for part in orphans] == [(0, 1), (1, 1)]
    assert orphans[0] in made.lease(1, 2).values()


def test_a_lost_worker_loses_its_leases() -> None:
    made = ledger(workers=2)
    (lease,) = made.lease(2, 1)
    made.drop(2)
    made.join(2, 0.0)
    assert made.done(2, lease) is None


def test_who_is_left_alone_is_given_all_of_the_oldest_update() -> None:
    """It has pushed its own part and waits for the others': those of two who are gone, and it holds all it wants."""
    made = ledger(UpdatePlan(15, 6, 9, 0), 3)
    for rank in (1, 2, 3):
        made.lease(rank, 3)
    made.drop(2)
    made.drop(3)
    first = [part.slot for part in made.lease(1, 3).values() if part.update == 0]
    assert sorted(first) == [0, 1, 2]


def test_who_took_over_from_others_is_still_given_its_own_of_the_oldest_update() -> None:
    made = ledger(UpdatePlan(15, 6, 9, 0), 2)
    made.lease(2, 3)  # worker 1 has not asked yet
    made.drop(2)
    first = [part.slot for part in made.lease(1, 3).values() if part.update == 0]
    assert sorted(first) == [0, 1]


def test_who_is_silent_or_stuck_is_overdue() -> None:
    made = ledger(workers=3)
    made.beat(1, 5, 1.0)
    made.beat(1, 5, 100.0)
    made.beat(2, None, 100.0)
    assert "computing" in (found := made.overdue(101.5, 5.0, 100.0))[1]
    assert "has sent nothing" in found[3]
    assert set(found) == {1, 3}
    assert not made.beat(7, None, 0.0)


@pytest.mark.parametrize("staleness", [0, None])
def test_evaluation_covers_the_samples_and_opens_nothing(staleness: int | None) -> None:
    made = ledger(UpdatePlan(10, 5, 4, staleness), 2)
    made.limit = 0
    made.evaluate("validation", 10, 4, 0)
    made.limit = 4
    parts = []
    while not made.idle:
        for rank in (1, 2):
            for lease in list(made.lease(rank, 1)):
                if part := made.done(rank, lease):
                    parts.append(part)
    assert sorted((part.start, part.stop) for part in parts) == [(0, 4), (4, 8), (8, 10)]
    assert {part.kind for part in parts} == {"validation"}
    assert made.complete == made.opened == 0
    made.end_evaluation()
    assert made.lease(1, 1)

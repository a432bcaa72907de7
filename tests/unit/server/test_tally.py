"""Each gradient and each update counts once, also after going back."""

from __future__ import annotations

import json

from paceline.server.tally import Result, Tally
from paceline.strict_json import dump
from paceline.tasks.base import Sums


def tally() -> Tally:
    made = Tally()
    made.gradient(1, 0, 0, Sums(2.0, 3, 1), 3)
    made.gradient(2, 0, 1, Sums(4.0, 2, 2), 2)
    made.gradient(1, 1, 1, Sums(8.0, 5, 3), 5)
    return made


def test_an_update_has_the_sums_of_its_gradients() -> None:
    made = tally()
    assert made.made(0, 0) == Result(Sums(6.0, 5, 3), 5)
    assert made.made(1, 0) == Result(Sums(8.0, 5, 3), 5)
    assert made.epochs == {0: Result(Sums(14.0, 10, 6), 10)}
    assert made.updates == 2


def test_gradients_count_by_worker_and_by_staleness() -> None:
    made = tally()
    made.made(0, 0)
    made.made(1, 0)
    assert (made.gradients, made.staleness) == ({1: 2, 2: 1}, {0: 1, 1: 2})


def test_a_state_comes_back_through_json() -> None:
    made = tally()
    made.made(0, 0)
    made.made(1, 1)
    assert Tally.of(json.loads(json.dumps(made.state()))) == made


def test_an_update_that_was_skipped_adds_nothing_but_its_samples() -> None:
    made = tally()
    made.gradient(2, 1, 0, Sums(float("nan"), 1, 0), 1)
    made.made(1, 0, finite=False)
    assert Tally.of(json.loads(dump(made.state()))).epochs == {0: Result(skipped=6)}


def test_a_state_is_a_copy() -> None:
    made = tally()
    made.made(0, 0)
    state = made.state()
    made.made(1, 0)
    made.gradient(1, 2, 0, Sums(1.0, 1, 1), 1)
    assert state["epochs"][0]["sums"].loss == 6.0
    assert state["updates"] == 1


def test_going_back_forgets_gradients_of_updates_that_were_not_made() -> None:
    """They will be computed again, and counted then."""
    made = tally()
    made.made(0, 0)
    back = Tally.of(json.loads(json.dumps(made.state())))
    back.gradient(1, 1, 1, Sums(8.0, 5, 3), 5)
    back.made(1, 0)
    assert back.gradients.total() == back.staleness.total() == 3
    assert back.epochs[0] == Result(Sums(14.0, 10, 6), 10)

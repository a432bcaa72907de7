"""Whatever order things happen in, living workers train what one process trains, each sample once."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from elastic_play import Play, Unrecoverable

from paceline.elastic.membership import UNHEALTHY, Reached, Registrar, choose_source

PLAYS = 300


def storm(seed: int) -> Counter[str]:
    dice = random.Random(seed)
    workers = dice.randint(2, 5)
    play = Play(dice, workers, dice.randint(1, workers), dice.randint(1, 12))
    try:
        play.run(dice.randint(0, 6))
    except Unrecoverable:
        return Counter({"all lost": 1})
    play.check()
    assert play.done["steps made again"] <= play.done["killed"]
    return play.done


def test_in_any_order_of_events_living_workers_have_the_weights_of_one_process() -> None:
    done = Counter[str]()
    for seed in range(PLAYS):
        try:
            done += storm(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise
    assert min(done[what] for what in ("killed", "generations", "states taken", "steps made again", "all lost")) > 0, (
        done
    )


@pytest.mark.parametrize("wrong", [min, lambda table: UNHEALTHY if UNHEALTHY in table else min(table)])
def test_the_simulation_notices_a_source_that_is_not_the_furthest(wrong: object) -> None:
    def fails(seed: int) -> bool:
        dice = random.Random(seed)
        play = Play(dice, 4, 2, 8, lambda table: table.index(wrong(table)))  # type: ignore[operator]
        try:
            play.run(4)
            play.check()
        except Unrecoverable:
            return False
        except AssertionError:
            return True
        return False

    assert any(map(fails, range(30)))


def test_the_source_is_the_first_of_those_that_are_furthest() -> None:
    assert choose_source([Reached(3), Reached(4), UNHEALTHY, Reached(4)]) == 1
    assert choose_source([Reached(4, 1), Reached(4, 1, 1), Reached(3, 9, 9)]) == 1
    assert choose_source([UNHEALTHY, UNHEALTHY]) is None


def registrar(workers: int, least: int) -> Registrar:
    made = Registrar(range(workers), least)
    for worker in range(workers):
        made.ready(worker)
    return made


def test_the_longest_serving_member_is_rank_0_and_newcomers_are_last() -> None:
    made = registrar(3, 1)
    first = made.due()
    assert first is not None
    assert (first.members, first.fresh, first.at_once) == ((0, 1, 2), True, False)
    made.ended(0, "killed")
    second = made.due()
    assert second is not None
    assert (second.members, second.fresh, second.at_once) == ((1, 2), False, True)
    made.ready(0)
    assert made.due() is None  # not before all members train again
    for worker in (1, 2):
        made.entered(worker, second.number)
    third = made.due()
    assert third is not None
    assert (third.members, third.at_once) == ((1, 2, 0), False)


def test_below_the_least_number_members_wait_and_then_stop() -> None:
    made = registrar(2, 2)
    made.due()
    made.ended(1, "killed")
    assert made.due() is None
    assert made.short
    made.give_up()
    last = made.due()
    assert last is not None
    assert (last.members, last.last) == ((0,), True)


def test_a_newcomer_alone_never_begins_a_generation() -> None:
    made = registrar(2, 1)
    made.due()
    made.ended(0, "killed")
    made.ready(0)
    made.ended(1, "killed")
    assert made.lost_all
    assert made.due() is None


def test_what_a_member_says_of_an_earlier_generation_does_not_count() -> None:
    made = registrar(2, 1)
    first = made.due()
    assert first is not None
    made.ended(1, "killed")
    made.ready(1)
    second = made.due()
    assert second is not None
    assert second.members == (0, 1)
    made.entered(1, first.number)
    made.ended(0, "killed")
    assert made.lost_all

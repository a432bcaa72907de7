"""The fluid simulation: rates are max-min fair, and time passes as it would on such links."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from paceline.predict.fluid import Activity, Delay, Done, Fluid, Process, Uses, _fair_rates_of_many, fair_rates


def activities(dice: random.Random, count: int, resources: int) -> list[Activity]:
    return [
        Activity(1.0, dice.choice([1.0, 1.0, 3.0]), dice.choice([float("inf"), dice.uniform(0.1, 5)]),
                 tuple((each, dice.uniform(0.2, 2)) for each in dice.sample(range(resources), dice.randint(1, 3))),
                 Done())
        for _ in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("rates_of", [fair_rates, _fair_rates_of_many])
def test_no_rate_can_grow_without_taking_from_a_smaller_one(seed: int, rates_of: object) -> None:
    """The definition of max-min fairness: everybody has a bottleneck, where nobody has more for its weight."""
    assert callable(rates_of)
    dice = random.Random(seed)
    active, capacities = activities(dice, dice.randint(1, 11), 5), [dice.uniform(0.5, 5) for _ in range(5)]
    rates = rates_of(active, capacities)
    used = [0.0] * 5
    for each, rate in zip(active, rates, strict=True):
        for resource, units in each.uses:
            used[resource] += units * rate
    assert all(load <= capacity * (1 + 1e-9) for load, capacity in zip(used, capacities, strict=True))
    levels = [rate / each.weight for each, rate in zip(active, rates, strict=True)]
    for each, rate, level in zip(active, rates, levels, strict=True):
        full = [resource for resource, _ in each.uses if used[resource] >= capacities[resource] * (1 - 1e-6)]
        highest = [all(level >= other * (1 - 1e-6) for one, other in zip(active, levels, strict=True)
                       if resource in dict(one.uses)) for resource in full]  # fmt: skip
        assert rate >= each.most * (1 - 1e-9) or any(highest)


def test_both_ways_to_compute_rates_agree() -> None:
    dice = random.Random(1)
    for _ in range(30):
        active = activities(dice, 11, 6)
        assert fair_rates(active, [2.0] * 6) == pytest.approx(_fair_rates_of_many(active, [2.0] * 6))


def test_two_transfers_share_a_link_until_one_has_ended() -> None:
    fluid, ends = Fluid([10.0]), dict[str, float]()

    def transfer(name: str, amount: float, after: float) -> Process:
        yield Delay(after)
        yield fluid.work(amount, ((0, 1.0),))
        ends[name] = fluid.now

    fluid.start(transfer("first", 100.0, 0.0))
    fluid.start(transfer("second", 20.0, 4.0))
    # The first is alone for 4 s (40), shares for 4 s (20 each), and is alone for another 4 s.
    assert fluid.run() == pytest.approx(12.0)
    assert ends == pytest.approx({"second": 8.0, "first": 12.0})


class Anew(Fluid):
    """Computes all rates anew for each event."""

    def _share(self) -> None:
        self._ended.clear()
        self._begun.clear()
        for each, rate in zip(self._active, fair_rates(self._active, self._capacities), strict=True):
            each.rate = rate


@pytest.mark.parametrize("seed", range(20))
def test_rates_that_are_kept_are_those_that_would_be_computed(seed: int) -> None:
    ends: dict[type[Fluid], list[float]] = {Fluid: [], Anew: []}
    for kind, seen in ends.items():
        dice = random.Random(seed)
        uses = [tuple((each, dice.choice([0.01, 1.0])) for each in dice.sample(range(3), 2)) for _ in range(4)]
        fluid = kind([dice.uniform(0.5, 3) for _ in range(3)])

        def worker(number: int, fluid: Fluid, uses: list[Uses], seen: list[float]) -> Process:
            own = random.Random(number)
            for _ in range(20):
                yield Delay(own.choice([0.0, own.random()]))
                for _ in range(own.randint(1, 3)):  # one after the other: the next begins where one has just ended
                    yield fluid.work(own.random(), own.choice(uses), own.choice([1.0, 2.0]), own.choice([0.4, 10.0]))
                    seen.append(fluid.now)

        for number in range(5):
            fluid.start(worker(number, fluid, uses, seen))
        fluid.run()
    assert ends[Fluid] == pytest.approx(ends[Anew], rel=1e-6)


def test_a_simulation_ends_when_what_it_is_for_has_happened() -> None:
    fluid, over = Fluid([1.0]), Done()

    def works() -> Process:
        for number in range(5):
            yield fluid.work(1.0, ((0, 1.0),))
            if number == 2:
                fluid.set(over)

    fluid.start(works())
    assert fluid.run(over) == pytest.approx(3.0)


def test_processes_that_wait_for_each_other_are_an_error() -> None:
    fluid, never = Fluid([1.0]), Done()

    def waits() -> Process:
        yield never

    fluid.start(waits())
    with pytest.raises(RuntimeError, match="1 processes wait for something that never happens"):
        fluid.run()


def test_events_happen_in_the_order_of_time() -> None:
    fluid, seen, dice = Fluid([1.0]), list[float](), random.Random(3)

    def worker() -> Process:
        for _ in range(20):
            yield Delay(dice.random())
            yield fluid.work(dice.random(), ((0, 1.0),))
            seen.append(fluid.now)

    for _ in range(5):
        fluid.start(worker())
    fluid.run()
    assert len(seen) == 100
    assert all(one <= other for one, other in pairwise(seen))

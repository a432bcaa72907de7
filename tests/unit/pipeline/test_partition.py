"""The best cut, against trying them all; examples whose answer is evident; what a plan is."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf

import pytest
from made_up_profiles import best, chain, node

from paceline.errors import UsageError
from paceline.pipeline.partition import (
    Device,
    Node,
    Profile,
    StagePlan,
    after_layers,
    check_fits,
    equal_layers,
    equal_parameters,
    find,
    plan_at,
)
from paceline.pipeline.plan import Copied
from paceline.pipeline.schedule import in_flight
from paceline.pipeline.sizes import in_bytes

SCHEDULES = ("one-at-a-time", "gpipe", "1f1b")


# Against brute force


@dataclass(frozen=True)
class Case:
    profile: Profile
    devices: list[Device]
    schedule: str
    micros: int
    bandwidth: float | None
    recompute: bool

    def find(self) -> StagePlan:
        return find(self.profile, self.devices, self.schedule, self.micros, self.bandwidth, self.recompute)

    def price(self, stage: int, start: int, stop: int) -> tuple[float, int]:
        """Seconds and bytes of one stage, word by word as they are defined."""
        nodes, ends = self.profile.nodes[start:stop], (self.profile.cuts[start], self.profile.cuts[stop])
        sizes = self.profile.storage_bytes
        held = in_flight(self.schedule, len(self.devices), self.micros, stage)
        again = self.recompute and held > 1
        seconds = sum(n.forward * (1 + again) + n.backward + n.update / self.micros for n in nodes)
        seconds /= self.devices[stage].speed
        if self.bandwidth:
            seconds += sum(cut.forward_bytes + cut.backward_bytes for cut in ends) / self.bandwidth
        storages = frozenset[int]().union(*(n.kept for n in nodes), ends[0].storages, ends[1].storages)
        micro = sum(sizes[s] for s in storages) + sum(n.internal_bytes for n in nodes)
        inputs = sum(sizes[s] for s in ends[0].storages)
        memory = self.profile.base_bytes + sum(n.weight_bytes + n.gradient_bytes + n.optimizer_bytes for n in nodes)
        memory += sum(round(self.profile.copies * n.weight_bytes) for n in nodes)
        memory += inputs * held + micro if again else micro * held
        memory += 4 * self.profile.batch_bytes if start == 0 else 0
        messages = ends[0].forward_bytes + 2 * ends[0].backward_bytes + ends[1].backward_bytes
        return seconds, memory + max(n.working_bytes for n in nodes) + messages

    def pace(self, seconds: Iterable[float]) -> float:
        """What a step's time is a multiple of: the slowest stage's, or all of them where one works at a time."""
        return sum(seconds) if self.schedule == "one-at-a-time" else max(seconds)

    def all_cuts(self) -> list[tuple[float, int, float]]:
        """Of every cut that is valid: its pace, the bytes it sends, the worst shortage of memory."""
        count, found = len(self.profile.nodes), []
        valid = [p for p in range(1, count) if self.profile.cuts[p].reason is None]
        for positions in combinations(valid, len(self.devices) - 1):
            ends = pairwise((0, *positions, count))
            stages = [self.price(stage, start, stop) for stage, (start, stop) in enumerate(ends)]
            short = [-inf if device.memory is None else memory - device.memory
                     for (_, memory), device in zip(stages, self.devices, strict=True)]  # fmt: skip
            sent = sum(self.profile.cuts[p].bytes for p in positions)
            found.append((self.pace(seconds for seconds, _ in stages), sent, max(short)))
        return found


def random_case(seed: int) -> Case:
    """Times are small numbers of sixteenths, so that many cuts are as fast as each other."""
    r = random.Random(seed)
    count = r.randint(2, 8)
    nodes = [
        Node(f"n{i}", forward=r.randint(0, 8) / 16, backward=r.randint(0, 8) / 16, update=r.randint(0, 4) / 16,
             parameters=r.randint(0, 99), weight_bytes=r.randint(0, 50), gradient_bytes=r.randint(0, 50),
             optimizer_bytes=r.randint(0, 50), working_bytes=r.randint(0, 50), internal_bytes=r.randint(0, 50),
             kept=frozenset(r.sample(range(count), r.randint(0, min(3, count)))))
        for i in range(count)
    ]  # fmt: skip
    skips = [(min(pair), max(pair)) for pair in (r.sample(range(count), 2) for _ in range(r.randint(0, 3)))]
    forbidden = {p: "so" for p in range(1, count) if r.random() < 0.25}
    outputs = [r.randint(0, 40) for _ in range(count)]
    profile = chain([0.0] * count, outputs, skips, forbidden, nodes, base=r.randint(0, 50))
    profile = replace(profile, batch_bytes=r.choice([0, 0, 3, 20]), copies=r.choice([0.0, 1.0, 0.5]))
    limits = r.choice([(10**9,), (250, 400, 700), (400, 700, 1000), (1000, 2000)])
    speeds = [1.0, 1.0, 0.5, 2.0, 0.05]
    devices = [Device(r.choice(speeds), r.choice([None, *limits])) for _ in range(r.randint(1, min(4, count)))]
    return Case(profile, devices, r.choice(SCHEDULES), r.randint(1, 6), r.choice([None, 64.0, 1024.0]),
                recompute=r.random() < 0.4)  # fmt: skip


def test_the_plan_is_as_good_as_the_best_of_all_cuts_and_fits() -> None:
    found = dict.fromkeys(SCHEDULES, 0)
    for seed in range(800):
        case = random_case(seed)
        fitting = [(seconds, sent) for seconds, sent, short in case.all_cuts() if short <= 0]
        if not fitting:
            continue
        plan = case.find()
        fastest = min(seconds for seconds, _ in fitting)
        pace = case.pace(stage.total_seconds for stage in plan.stages)
        assert pace == pytest.approx(fastest, rel=1e-9), seed
        fewest = min(sent for seconds, sent in fitting if seconds <= fastest * (1 + 1e-9))
        assert sum(case.profile.cuts[p].bytes for p in plan.positions()) == fewest, seed
        for number, stage in enumerate(plan.stages):
            seconds, memory = case.price(number, stage.start, stage.stop)
            assert stage.total_seconds == pytest.approx(seconds, rel=1e-9), seed
            assert stage.memory_bytes == memory, seed
        check_fits(plan, case.devices)
        found[case.schedule] += 1
    assert min(found.values()) > 100, "the cases are too much alike"


def test_where_nothing_fits_the_shortage_is_the_smallest_there_is() -> None:
    short_of_memory = short_of_cuts = 0
    for seed in range(800):
        case = random_case(seed)
        cuts = case.all_cuts()
        if any(short <= 0 for *_, short in cuts):
            continue
        with pytest.raises(UsageError) as caught:
            case.find()
        if cuts:
            assert f", {in_bytes(min(short for *_, short in cuts))} more than it has" in str(caught.value), seed
            short_of_memory += 1
        else:
            assert f"{len(case.devices)} stages: the model has" in str(caught.value), seed
            short_of_cuts += 1
    assert min(short_of_memory, short_of_cuts) > 50, "the cases are too much alike"


# Evident examples


def test_a_lopsided_chain_is_cut_by_time_and_not_by_layers() -> None:
    profile = chain([1, 1, 1, 1, 1, 1, 6])
    assert best(profile, Device(), Device()).positions() == (6,)
    assert equal_layers(profile, 2) == (3,)
    assert plan_at(profile, (3,), [Device()] * 2, "1f1b", 4, None, False, "layers").slowest == 9
    assert best(profile, Device(), Device()).slowest == 6


def test_a_device_twenty_times_slower_gets_a_twentieth() -> None:
    profile = chain([1.0] * 42)
    first, second = best(profile, Device(), Device(speed=0.05)).stages
    assert (len(first.layers), len(second.layers)) == (40, 2)
    assert first.seconds == second.seconds == pytest.approx(40)
    assert best(profile, Device(speed=0.05), Device()).positions() == (2,)


def test_a_narrow_waist_is_preferred_where_the_link_is_slow() -> None:
    profile = chain([1, 1, 1, 1], outputs=[2, 100, 100, 0])
    assert best(profile, Device(), Device()).positions() == (2,)
    slow = best(profile, Device(), Device(), bandwidth=10.0)
    assert slow.positions() == (1,)
    assert [stage.transfer_seconds for stage in slow.stages] == pytest.approx([0.4, 0.4])  # 2 bytes each way
    assert [stage.forward_bytes for stage in slow.stages] == [2, 0]


def test_of_cuts_that_are_as_fast_the_one_that_sends_least_is_taken() -> None:
    # The last layer sets the pace: the first five need not be cut where that is fastest.
    profile = chain([1, 1, 1, 1, 1, 9], outputs=[5, 50, 50, 7, 1, 0])
    assert best(profile, *[Device()] * 3).positions() == (1, 5)


def test_one_at_a_time_is_cut_where_the_sum_is_least() -> None:
    """Even stages are of no use there: what counts is what is sent, and how much the slower device has to do."""
    profile = chain([1.0] * 6, outputs=[1, 9, 9, 9, 5, 0])
    assert best(profile, Device(), Device()).positions() == (3,)
    assert best(profile, Device(), Device(), schedule="one-at-a-time").positions() == (1,), "sums are equal"
    assert best(profile, Device(), Device(), schedule="one-at-a-time", bandwidth=1.0).positions() == (1,)
    assert best(profile, Device(), Device(speed=0.5), schedule="one-at-a-time").positions() == (5,)
    assert best(profile, Device(), Device(speed=0.5)).positions() == (4,)


def test_of_equal_sums_the_fewest_bytes_however_many_there_are() -> None:
    outputs = [10**8 + 5 - abs(i - 150) % 7 for i in range(300)]
    profile = chain([0.1 + i / 3e3 for i in range(300)], outputs=outputs)
    plan = best(profile, *[Device()] * 3, schedule="one-at-a-time")
    assert [outputs[p - 1] for p in plan.positions()] == [min(outputs[:-1])] * 2


def test_a_skip_over_several_cuts_counts_at_each() -> None:
    profile = chain([1, 1, 1, 1], outputs=[10, 1, 1, 1], skips=[(0, 3)])
    plan = best(profile, *[Device()] * 4, bandwidth=1.0)
    assert [stage.forward_bytes for stage in plan.stages] == [10, 11, 11, 0]
    assert [stage.transfer_seconds for stage in plan.stages] == [20, 42, 44, 22]
    # Whoever only passes it on holds it, too: in flight are 4, 3, 2 and 1 micro-batches.
    assert [stage.memory["activations"] for stage in plan.stages] == [4 * 10, 3 * 11, 2 * 12, 11]


def test_a_stage_that_is_short_of_memory_gets_less_even_if_it_is_slower_so() -> None:
    nodes = [node(f"n{i}", weight_bytes=100, gradient_bytes=100, optimizer_bytes=200) for i in range(6)]
    profile = chain([1.0] * 6, nodes=nodes, base=50)
    assert best(profile, Device(), Device()).positions() == (3,)
    assert best(profile, Device(), Device(memory=500)).positions() == (5,)
    assert best(profile, Device(memory=900), Device()).positions() == (2,)


def test_memory_comes_apart() -> None:
    nodes = [
        node("a", weight_bytes=1, gradient_bytes=2, optimizer_bytes=4, working_bytes=70, internal_bytes=8,
             kept=frozenset({0})),
        node("b", weight_bytes=10, gradient_bytes=20, optimizer_bytes=40, working_bytes=80, internal_bytes=5,
             kept=frozenset({0, 1})),
        node("c", kept=frozenset({1})),
    ]  # fmt: skip
    profile = chain([1, 1, 1], outputs=[100, 1000, 0], nodes=nodes, base=7)
    stage, last = plan_at(profile, (2,), [Device()] * 2, "gpipe", 3, None, False, "given").stages
    expected = {"base": 7, "weights": 11, "gradients": 22, "optimizer": 44, "activations": 3 * 1113, "working": 1080}
    assert stage.memory == expected
    assert stage.memory_bytes == sum(expected.values())
    assert last.memory["activations"] == 3 * 1000  # one storage, its input and kept, counts once
    again = plan_at(profile, (2,), [Device()] * 2, "gpipe", 3, None, True, "given").stages
    assert again[0].memory["activations"] == 1113
    assert again[1].memory["activations"] == 3 * 1000 + 1000
    assert [stage.seconds for stage in again] == [4, 2]  # forward twice


def test_the_first_stage_has_batches_and_every_stage_copies_of_its_weights() -> None:
    nodes = [node(f"n{i}", weight_bytes=100 + i, gradient_bytes=7) for i in range(3)]
    profile = chain([1, 1, 1], outputs=[10, 10, 0], nodes=nodes)
    devices = [Device()] * 3
    plain, more = (
        plan_at(each, (1, 2), devices, "1f1b", 4, None, False, "given").stages
        for each in (profile, replace(profile, batch_bytes=1000, copies=1.0))
    )
    assert [stage.memory["weights"] for stage in plain] == [100, 101, 102]
    assert [stage.memory["weights"] for stage in more] == [200, 202, 204]
    added = [b.memory["activations"] - a.memory["activations"] for a, b in zip(plain, more, strict=True)]
    assert added == [4 * 1000, 0, 0]
    tight = [Device(), Device(memory=350)]
    assert find(profile, tight, "1f1b", 4, None, False).positions() == (1,)
    assert find(replace(profile, copies=1.0), tight, "1f1b", 4, None, False).positions() == (2,)


def test_a_stage_that_holds_one_micro_batch_does_not_compute_it_again() -> None:
    nodes = [node(f"n{i}", 1.0, backward=2.0, internal_bytes=7) for i in range(3)]
    profile = chain([0.0] * 3, outputs=[10, 10, 0], nodes=nodes)
    plan = find(profile, [Device()] * 3, "1f1b", 8, None, recompute=True)
    assert [stage.seconds for stage in plan.stages] == [4, 4, 3]
    assert [stage.memory["activations"] for stage in plan.stages] == [17, 2 * 10 + 27, 17]


def test_the_optimizer_step_counts_once_for_all_micro_batches() -> None:
    profile = chain([0, 0], nodes=[node("a", 1.0, backward=2.0, update=8.0), node("b", 1.0)])
    assert [stage.seconds for stage in best(profile, Device(), Device()).stages] == [5, 1]


def test_equal_parameters_are_by_count_and_equal_layers_by_number() -> None:
    nodes = [node(f"n{i}", parameters=count) for i, count in enumerate([10, 0, 10, 20, 40, 0])]
    profile = chain([1.0] * 6, outputs=[9, 5, 9, 9, 9, 9], nodes=nodes, forbidden={3: "no"})
    assert equal_layers(profile, 3) == (2, 4)
    assert equal_parameters(profile, 2) == (4,)
    assert equal_parameters(profile, 3) == (2, 4)
    assert equal_layers(profile, 2) == (2,)  # 3 cannot be cut; 2 is as near as 4, and sends less
    assert equal_layers(profile, 1) == ()


def test_equal_parts_are_as_near_as_the_best_of_all_cuts() -> None:
    for seed in range(200):
        case = random_case(seed)
        profile, stages, count = case.profile, len(case.devices), len(case.profile.nodes)
        if not case.all_cuts():
            continue
        for found, amounts in (
            (equal_layers(profile, stages), list(range(count + 1))),
            (
                equal_parameters(profile, stages),
                [sum(n.parameters for n in profile.nodes[:p]) for p in range(count + 1)],
            ),
        ):
            assert all(profile.cuts[p].reason is None for p in found), seed

            def away(positions: Sequence[int], amounts: Sequence[int] = amounts, stages: int = stages) -> float:
                return sum(abs(amounts[p] - amounts[-1] * (i + 1) / stages) for i, p in enumerate(positions))

            valid = profile.valid()[1:-1]
            assert away(found) == pytest.approx(min(map(away, combinations(valid, stages - 1)))), seed


def test_a_cut_is_found_by_the_name_of_a_layer_or_of_what_it_is_in() -> None:
    names = ["stem.conv", "layer1.0.conv", "layer1.1.conv", "layer10.conv", "add"]
    profile = chain([1.0] * 5, nodes=[node(name) for name in names])
    assert after_layers(profile, ["stem", "layer1"]) == (1, 3)
    assert after_layers(profile, ["layer1.0", "layer10.conv"]) == (2, 4)
    tied = chain([1.0] * 3, nodes=[node(name) for name in ("tokens", "norm", "tokens.weight")])
    assert after_layers(tied, ["tokens"]) == (1,)
    with pytest.raises(UsageError) as caught:
        after_layers(profile, ["layer2.conv"])
    assert str(caught.value) == (
        "no layer of the model is called 'layer2.conv'; did you mean 'layer10.conv'? (it can be cut after stem.conv, "
        "layer1.0.conv, layer1.1.conv, layer10.conv)"
    )


def test_a_plan_survives_json() -> None:
    profile = chain([1, 2, 3], outputs=[3, 4, 5])
    for bandwidth in (None, 1e6):
        plan = best(profile, Device(), Device(), bandwidth=bandwidth)
        assert StagePlan.from_dict(json.loads(json.dumps(plan.as_dict()))) == plan


def test_a_weight_on_several_stages_needs_memory_on_each_and_time_of_the_optimizer() -> None:
    """The first and the last node share 100 bytes, so that wherever the cut is both stages have them."""
    profile = replace(chain([1.0] * 4), copied=(Copied((0, 3), 25, 100, 100, 200, 8.0),))
    for position in (1, 2, 3):
        plan = plan_at(profile, [position], [Device()] * 2, "1f1b", 4, None, False, "given")
        assert [stage.memory_bytes for stage in plan.stages] == [400, 400]
        assert [stage.seconds for stage in plan.stages] == [position + 2.0, 4 - position + 2.0]
        assert [stage.parameters for stage in plan.stages] == [25, 25]
    three = plan_at(profile, [1, 2], [Device()] * 3, "1f1b", 4, None, False, "given")
    assert [stage.memory_bytes for stage in three.stages] == [400, 0, 400]
    assert best(profile, Device(memory=400), Device(memory=400)).positions() == (2,)
    with pytest.raises(UsageError, match="stage 1 has 399 B and needs at best 400 B"):
        best(profile, Device(memory=400), Device(memory=399))
    assert equal_parameters(replace(profile, copied=(Copied((0, 1), 25, 0, 0, 0, 0.0),)), 2) == (1,)

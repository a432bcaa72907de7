"""Steps of models in parts: schedules take what arithmetic says, and messages are those that runs send."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from paceline.emulation.counted import Amount, Chain, Exchange, Point, Shard, Value
from paceline.errors import UsageError
from paceline.pipeline.plan import Cut, Node, Profile
from paceline.pipeline.schedule import SCHEDULES
from paceline.predict.anatomy import Anatomy, anatomy_of
from paceline.predict.cluster import Cluster, Machine, alike
from paceline.predict.collective import Group, seconds
from paceline.predict.network import TURN, Costs
from paceline.predict.partitioned import bytes_of_parts, divide, pipelined, sharded, simulate_stages, totals_seconds
from paceline.predict.probes import options_of
from paceline.predict.steps import Array, Case
from paceline.spec import resolve

RATE, FREE = 1e8, Costs()


def chain(parts: list[float], crossing: int = 1, weights: int = 1000) -> Chain:
    """Nodes that take these parts of a step, a third of it forward; so many values cross each cut for a sample."""
    nodes = tuple(Node(f"n{i}", 0.0, 0.0, 0.0, weights, 0, 0, 0, 0, 0, frozenset()) for i in range(len(parts)))
    cuts = tuple(Cut(0, 0, None, (), frozenset()) for _ in range(len(parts) + 1))
    values = [()] + [(Value(Amount(crossing, 0, 4), grad=True),)] * (len(parts) - 1) + [()]
    names = [f"w{i}" for i in range(len(parts))]
    return Chain(
        Profile(nodes, cuts, (), 0, 1),
        tuple(part / 3 for part in parts),
        tuple(2 * part / 3 for part in parts),
        tuple(values),
        dict.fromkeys(names, weights),
        {name: (i,) for i, name in enumerate(names)},
        4,
        1.0,
    )


@dataclass(frozen=True)
class Made:
    """A made-up model."""

    chain: Chain
    last: Shard | None = None

    def shard(self, shards: int) -> Shard:
        assert self.last is not None
        assert self.last.shards == shards
        return self.last


@dataclass(frozen=True)
class Given:
    """Compute times of each draw and worker, the same in all steps."""

    times: Array

    def __call__(self, steps: int, workers: int | None = None, mean_of: int = 1) -> Array:
        return np.repeat(self.times[:, None, :workers], steps, axis=1)

    def slowest(self, mean_of: int = 1) -> Array:
        found: Array = self.times.max(axis=1)
        return found


def case(
    model: Chain,
    stages: int,
    times: list[float],
    *,
    rate: float = 1e15,
    costs: Costs = FREE,
    **more: Any,
) -> Case:
    ranks = len(times)
    nodes = tuple(Machine(rate, rate, host=host) for host in range(ranks))
    options = {
        "strategy": "pipeline", "workers": ranks, "stages": stages, "servers": 0, "averaging": "ring", "bucket_mb": 4.0,
        "shrink": 1, "accumulate": 1, "microbatches": 8, "batch_size": 32, "schedule": "gpipe", "cut": "layers",
        "speed": None, "recompute": False,
    }  # fmt: skip
    anatomy = Anatomy((1,), (1.0,), parts=Made(model))
    return Case(options | more, anatomy, Cluster(nodes), tuple(range(ranks)), Given(np.array([times])), costs)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("stages", "micros"), [(1, 8), (2, 8), (4, 8), (4, 2), (8, 32)])
def test_equal_stages_take_what_the_schedule_says(schedule: str, stages: int, micros: int) -> None:
    """Without costs, (m + s - 1) / m of a stage's time; one at a time, as long as one worker."""
    setting = case(chain([1 / stages] * stages), stages, [1.0] * stages, schedule=schedule, microbatches=micros)
    expected = (micros + stages - 1) / micros / stages if SCHEDULES[schedule].overlaps else 1.0
    assert pipelined(setting) == pytest.approx([expected], rel=1e-3)


def test_the_slowest_stage_sets_the_pace() -> None:
    """Of gpipe: the first micro-batch goes through all stages; all others wait for the slowest."""
    parts = [0.2, 0.5, 0.3]
    (step,) = pipelined(case(chain(parts), 3, [1.0] * 3))
    assert step == pytest.approx((1 + 7 * 0.5) / 8, rel=1e-3)
    (slow,) = pipelined(case(chain(parts), 3, [1.0, 1.0, 4.0]))  # a slower machine
    assert slow == pytest.approx((0.2 + 0.5 + 1.2 + 7 * 1.2) / 8, rel=1e-3)


def test_recomputing_takes_another_forward_pass_on_stages_that_hold_several_micro_batches() -> None:
    model = chain([0.5, 0.5])
    (once,) = pipelined(case(model, 2, [1.0] * 2))
    (again,) = pipelined(case(model, 2, [1.0] * 2, recompute=True))
    assert again == pytest.approx(once * 4 / 3, rel=1e-3)
    (last,) = pipelined(case(model, 2, [1.0] * 2, recompute=True, schedule="1f1b"))  # its last stage holds one
    assert once < last < again


@pytest.mark.parametrize("micros", [1, 4])
def test_one_at_a_time_adds_every_message(micros: int) -> None:
    """Without overlap, arithmetic is exact: each message is on the way between two computations."""
    costs = Costs(message=1e-3, latency=2e-3)
    model = chain([0.4, 0.3, 0.3], crossing=50_000)
    setting = case(model, 3, [1.0] * 3, rate=RATE, costs=costs, schedule="one-at-a-time", microbatches=micros)
    message = 32 / micros * 50_000 * 4 / RATE + 2e-3 + 2 * 1e-3
    assert pipelined(setting) == pytest.approx([1.0 + micros * 4 * message + totals_seconds(setting)], rel=1e-3)


def test_messages_are_hidden_behind_computing() -> None:
    costs, model = Costs(latency=1e-4), chain([0.5, 0.5], crossing=1000)
    (step,) = pipelined(case(model, 2, [1.0] * 2, rate=RATE, costs=costs, microbatches=32))
    on_the_way = 1000 * 4 / RATE + 1e-4
    free = 33 / 64
    assert free < step < free + 2 * on_the_way + 3e-3


@pytest.mark.parametrize("averaging", ["ring", "allreduce"])
def test_replicas_average_what_each_stage_has(averaging: str) -> None:
    model = chain([0.5, 0.5], weights=500_000)
    setting = case(model, 2, [1.0] * 6, rate=RATE, averaging=averaging, bucket_mb=1.0)
    group = Group(setting.cluster, (0, 2, 4), Costs())
    expected = 9 / 16 + seconds(averaging, group, 500_000) + totals_seconds(setting)
    assert pipelined(setting) == pytest.approx([expected], rel=1e-3)
    pipeline, sums = divide(setting.options, setting.anatomy)
    assert [each.lengths for each in sums] == [(500_000,), (500_000,)]
    assert pipeline.count == 2


def test_a_step_takes_as_long_as_the_slowest_of_its_replicas() -> None:
    model = chain([0.5, 0.5])
    dice = np.random.default_rng(0)
    times = np.exp(0.1 * dice.standard_normal((50, 4)))
    setting = case(model, 2, [1.0] * 4)
    many = pipelined(Case(**vars(setting) | {"compute": Given(times)}))
    single = [
        max(pipelined(case(model, 2, times[draw, ranks].tolist()))[0] for ranks in (slice(0, 2), slice(2, 4)))
        for draw in range(50)
    ]
    assert many == pytest.approx(single, rel=1e-3)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_what_noise_changes_is_what_simulating_it_changes(schedule: str) -> None:
    """The longest path is used for single draws; here, each is also simulated, with messages that compete."""
    model, dice = chain([0.3, 0.4, 0.3], crossing=20_000), np.random.default_rng(1)
    times = np.exp(0.1 * dice.standard_normal((20, 3)))
    costs = Costs(message=1e-4, latency=2e-4)
    setting = case(model, 3, [1.0] * 3, rate=RATE, costs=costs, schedule=schedule)
    found = pipelined(Case(**vars(setting) | {"compute": Given(times)})) - totals_seconds(setting)
    pipeline, _ = divide(setting.options, setting.anatomy)
    each = [max(simulate_stages(pipeline, tuple(row), setting.cluster, setting.places, costs)) for row in times]
    assert found.mean() == pytest.approx(np.mean(each), rel=0.01)
    assert found == pytest.approx(each, rel=0.05)


def test_many_replicas_are_predicted_from_one() -> None:
    model = chain([0.5, 0.5], weights=500_000)
    setting = case(model, 2, [1.0] * 1024, rate=RATE, averaging="ring")
    group = Group(setting.cluster, tuple(range(0, 1024, 2)), Costs())
    expected = 9 / 16 + seconds("ring", group, 500_000) + totals_seconds(setting)
    assert pipelined(setting) == pytest.approx([expected], rel=1e-3)


def test_what_cannot_be_predicted_is_refused() -> None:
    model = chain([1 / 70] * 70)
    with pytest.raises(UsageError, match="70 parts of a model: up to 64"):
        pipelined(case(model, 70, [1.0] * 70, microbatches=1))
    setting = case(model, 35, [1.0] * 70, microbatches=1)
    unequal = Cluster((Machine(2 * RATE, RATE), *setting.cluster.nodes[1:]))
    with pytest.raises(UsageError, match="machines that are all alike"):
        pipelined(Case(**vars(setting) | {"cluster": unequal}))
    with pytest.raises(UsageError, match="can be cut into up to 3"):
        pipelined(case(chain([0.5, 0.3, 0.2]), 4, [1.0] * 4, cut="measured"))


def shard(shards: int, forward: float = 0.2, end: float = 0.5) -> Shard:
    """A gather of 1,000 numbers of each shard forward, and a sum of 6,000 backward, for each sample."""
    part = Amount(1000, 0, 4)
    others = tuple((other, part) for other in range(shards - 1))
    exchanges = (Exchange(forward / 2, receives=others, sends=others), Exchange(0.3, summed=Amount(6000, 0, 4)))
    ready = (Point(2, end), Point(2, 0.4), Point(1, 0.25))
    return Shard(shards - 1, shards, exchanges, Point(1, forward), Point(2, end), (300_000, 200_000, 100_000), ready,
                 4, 1.0)  # fmt: skip


def shards_case(shards: int, times: list[float], **more: Any) -> Case:
    options: dict[str, Any] = {"rate": RATE, "tensor": shards, "overlap": "on", "strategy": "tensor"}
    found = case(chain([1.0]), 1, times, **options | more)
    return Case(**vars(found) | {"anatomy": Anatomy((1,), (1.0,), parts=Made(chain([1.0]), shard(shards)))})


@pytest.mark.parametrize("shards", [2, 3, 5])
def test_shards_compute_and_exchange_in_turns(shards: int) -> None:
    """Without other costs: a shard sends its part to all others over its link, and then takes part in an all-reduce.
    Connections of a shard begin one after the other, and several shards may send to the same one.
    """
    setting = shards_case(shards, [1.0] * shards)
    gather = (shards - 1) * 32 * 1000 * 4 / RATE
    expected = 0.5 + gather + seconds("allreduce", setting.group, 32 * 6000) + totals_seconds(setting)
    assert 0.999 * expected < sharded(setting) < 1.001 * expected + (shards - 2) * (TURN / RATE + gather / 2)
    assert sharded(shards_case(shards, [1.0] * shards, shrink=8)) < expected


def test_the_slowest_shard_holds_up_all() -> None:
    (equal,), (slow,) = sharded(shards_case(3, [1.0] * 3)), sharded(shards_case(3, [1.0, 2.0, 1.0]))
    assert slow == pytest.approx(equal + 0.5, rel=1e-3)


def test_accumulated_passes_follow_each_other() -> None:
    once, twice = shards_case(2, [1.0] * 2), shards_case(2, [2.0] * 2, accumulate=2)
    assert sharded(twice) - totals_seconds(once) == pytest.approx(2 * (sharded(once) - totals_seconds(once)), rel=1e-3)


def test_a_whole_simulation_agrees_with_the_sum_of_its_exchanges() -> None:
    """Bursts make every exchange depend on those before it: all are simulated. Very small ones change nothing."""
    costs = Costs(message=1e-4, byte=1e-9, latency=1e-4)
    setting = shards_case(4, [1.0] * 4, costs=costs)
    nodes = tuple(replace(node, burst=1.0) for node in setting.cluster.nodes)
    assert sharded(Case(**vars(setting) | {"cluster": Cluster(nodes)})) == pytest.approx(sharded(setting), rel=3e-3)
    full = tuple(replace(node, burst=1e7) for node in setting.cluster.nodes)
    assert sharded(Case(**vars(setting) | {"cluster": Cluster(full)})) < 0.99 * sharded(setting)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_replicas_of_shards_average_their_buckets(overlap: str) -> None:
    setting = shards_case(2, [1.0] * 4, bucket_mb=0.1, overlap=overlap)
    alone = sharded(shards_case(2, [1.0] * 2))[0] - totals_seconds(shards_case(2, [1.0] * 2))
    group = Group(setting.cluster, (0, 2), FREE)
    three, two, one = (seconds("ring", group, length) for length in (100_000, 200_000, 300_000 + 3 + 2))
    # The first two buckets are ready before the end, and summed meanwhile.
    expected = alone + (one if overlap == "on" else one + two + three)
    assert sharded(setting) == pytest.approx([expected + totals_seconds(setting)], rel=1e-3)


@lru_cache
def counted(model: str, data: str) -> Anatomy:
    return anatomy_of(resolve(("test", {"model": model, "data": data})).spec)


def sent(**values: Any) -> int:
    """What the rank that sends most sends for an update."""
    spec = resolve(("test", {"batch_size": 32, "compute": "emulated:0", **values})).spec
    return bytes_of_parts(options_of(spec), counted(spec.model, spec.data).shrunk(spec.shrink), spec.grid)


RESNET: dict[str, Any] = {"model": "resnet18", "data": "cifar10", "shrink": 16}
# Of emulated runs with these options: the largest of `bytes_sent` in summary.json, divided by the steps.
MEASURED = [
    ({"model": "mnist-cnn", "data": "mnist", "strategy": "pipeline", "workers": 4, "stages": 2}, 120908480 // 40),
    ({**RESNET, "strategy": "pipeline", "workers": 3}, 1_048_576),
    ({**RESNET, "strategy": "pipeline", "workers": 6}, 1_310_720),
    ({**RESNET, "strategy": "pipeline", "workers": 6, "stages": 3}, 2_509_572),
    ({**RESNET, "strategy": "tensor", "workers": 3}, 7_589_632),
    ({**RESNET, "strategy": "tensor", "workers": 6, "tensor": 3}, 8_528_612),
]


@pytest.mark.parametrize(("values", "measured"), MEASURED, ids=lambda each: str(each)[-40:])
def test_bytes_are_those_that_runs_have_counted(values: dict[str, Any], measured: int) -> None:
    assert sent(**values) == measured


def test_machines_of_a_link_are_enough() -> None:
    setting = case(chain([0.5, 0.5], crossing=1000), 2, [1.0, 1.0])
    (step,) = pipelined(Case(**vars(setting) | {"cluster": alike(2, 1e9)}))
    assert 9 / 16 < step < 0.6

"""Steps of models in parts: stages that carry out their instructions, and shards that exchange their layers' values."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np

from paceline.collectives.native import NATIVE
from paceline.collectives.plan import Plan, Recv, Send
from paceline.emulation.counted import Chain, Exchange, Point, Shard, Value
from paceline.errors import UsageError
from paceline.layout import Grid, share
from paceline.pipeline.devices import stage_devices
from paceline.pipeline.schedule import AHEAD, Instruction, Op, instructions, recomputes
from paceline.predict.anatomy import Anatomy, bucket_bytes
from paceline.predict.cluster import Cluster
from paceline.predict.collective import MOST_SIMULATED, Group, finished, seconds
from paceline.predict.fluid import Delay, Done, Process
from paceline.predict.network import Costs, Network, follow
from paceline.predict.steps import Array, Case
from paceline.predict.traffic import averaged_bytes
from paceline.strategies.bucket_layout import assign, tail, together

TOTALS, TOTALS_ITEMSIZE = 6, 8  # numbers that all ranks sum at the end of a step
# Shards begin an exchange up to so many seconds apart. If all began at once, no two of them would ever send to the same
# one at the same time, which makes gathers of four shards a third faster than they are in a lab.
APART = 3e-4
MOST_SHARDS = 16  # each sends to all others: simulating more takes minutes
STEPS = 8  # of which the typical one is taken
RECEIVES = (Op.RECV_ACTIVATION, Op.RECV_GRADIENT)


@dataclass(frozen=True)
class Stages:
    """A pipeline: what its stages compute and send.

    `compute` are the parts of a step's compute that each stage has, forward and backward, of which recomputing is a
    part. `ahead[s]` and `back[s]` are the values that cross the cut after stage s. `micros` are the samples of each
    micro-batch, in each part of a batch that is accumulated.
    """

    schedule: str
    compute: tuple[tuple[float, float], ...]
    crossing: tuple[tuple[Value, ...], ...]
    micros: tuple[int, ...]
    accumulate: int
    shrink: int

    @property
    def count(self) -> int:
        return len(self.compute)

    def program(self, stage: int) -> list[Instruction]:
        """Its instructions up to the update."""
        found = instructions(self.schedule, self.count, len(self.micros), stage)
        return [each for each in found if each.op != Op.STEP] * self.accumulate

    def part(self, stage: int, instruction: Instruction) -> float:
        """The part of a step's compute that an instruction takes."""
        share_of = self.micros[instruction.micro] / (sum(self.micros) * self.accumulate)
        return self.compute[stage][instruction.op == Op.BACKWARD] * share_of

    def messages(self, stage: int, instruction: Instruction) -> tuple[int, list[int]]:
        """The other stage of a send or a receive, and the bytes of each message."""
        gradients = instruction.op in (Op.SEND_GRADIENT, Op.RECV_GRADIENT)
        after = instruction.op in (Op.SEND_ACTIVATION, Op.RECV_GRADIENT)
        values = self.crossing[stage if after else stage - 1]
        samples = self.micros[instruction.micro]
        sizes = [v.amount.nbytes(samples, self.shrink) for v in values if v.grad or not gradients]
        return stage + 1 if after else stage - 1, [size for size in sizes if size]

    def sent(self, stage: int) -> int:
        """Bytes that a stage sends to other stages in a step."""
        sends = [each for each in self.program(stage) if each.op in (Op.SEND_ACTIVATION, Op.SEND_GRADIENT)]
        return sum(sum(self.messages(stage, each)[1]) for each in sends)


@dataclass(frozen=True)
class Sums:
    """Gradients that some stages sum with each other and with other replicas: the values of each all-reduce."""

    stages: tuple[int, ...]
    lengths: tuple[int, ...]


def divide(options: Mapping[str, Any], anatomy: Anatomy) -> tuple[Stages, list[Sums]]:
    """The pipeline of a setting, cut as an emulated run is, and what is averaged after it."""
    assert anatomy.parts is not None
    return _divided(
        anatomy.parts.chain,
        options["stages"] or options["workers"],
        options["schedule"],
        options["microbatches"],
        options["batch_size"],
        options["accumulate"],
        options["cut"],
        options["speed"],
        options["recompute"],
        options["shrink"],
        bucket_bytes(options),
    )


@lru_cache(maxsize=256)
def _divided(
    chain: Chain,
    stages: int,
    schedule: str,
    micros: int,
    batch: int,
    accumulate: int,
    cut: str,
    speed: str | None,
    recompute: bool,
    shrink: int,
    limit: int,
) -> tuple[Stages, list[Sums]]:
    devices = stage_devices(stages, None, speed)
    plan = chain.plan(cut, -(-batch // micros), 1.0, devices, schedule, micros, recompute)
    edges = (0, *plan.positions(), len(chain.forward))
    compute = [
        (ahead, back + ahead * (recompute and recomputes(schedule, stages, micros, stage)))
        for stage, (ahead, back) in enumerate(chain.compute(edges))
    ]
    sizes = tuple(len(share(batch, micros, number)) for number in range(micros))
    crossing = tuple(chain.values[edge] for edge in edges[1:-1])
    pipeline = Stages(schedule, tuple(compute), crossing, sizes, accumulate, shrink)
    having: dict[tuple[int, ...], list[int]] = {}
    for name, stages_with in chain.stages_of(edges).items():
        having.setdefault(tuple(stages_with), []).append(-(-chain.sizes[name] // shrink))
    sums = []
    for holders, values in sorted(having.items()):
        groups = together([value * chain.itemsize for value in values], limit)
        sums.append(Sums(holders, tuple(sum(values[number] for number in group) for group in groups)))
    return pipeline, sums


def pipelined(case: Case) -> Array:
    """Stages carry out their instructions; then weights that several ranks have are averaged, and all ranks sum a few
    numbers. Simulated with mean compute times; what single times change follows from the longest path.
    """
    pipeline, sums = divide(case.options, case.anatomy)
    grid = Grid(case.options["workers"] // pipeline.count, stages=pipeline.count)
    _check_size(case, grid)
    drawn = case.compute(STEPS if case.options["workers"] <= MOST_SIMULATED else 1)
    times = drawn.reshape(-1, grid.replicas, grid.stages)
    means = times.mean(axis=0, keepdims=True)
    paths = [_longest(pipeline, case, each) for each in (times, means)]
    longer = np.divide(paths[0], paths[1], out=np.ones_like(paths[0]), where=paths[1] > 0)
    ends = _simulated_ends(pipeline, case, grid, means[0]) * longer
    averaging = case.options["averaging"]
    for each in sums:
        ranks = [grid.rank(replica, stage, 0) for replica in range(grid.replicas) for stage in each.stages]
        if len(ranks) == 1:
            continue
        group = Group(case.cluster, tuple(case.places[rank] for rank in ranks), case.costs)
        took = sum(seconds(averaging, group, length, case.anatomy.itemsize) for length in each.lengths)
        own = list(each.stages)
        ends[:, :, own] = ends[:, :, own].max(axis=(1, 2), keepdims=True) + took
    typical: Array = np.median(ends.max(axis=(1, 2)).reshape(drawn.shape[:2]), axis=1)
    return typical + totals_seconds(case) + case.overhead


def totals_seconds(case: Case) -> float:
    """Of the sum over all ranks at the end of a step."""
    return seconds(NATIVE.name, case.group, TOTALS, TOTALS_ITEMSIZE)


def _check_size(case: Case, grid: Grid) -> None:
    parts, most = grid.stages * grid.shards, MOST_SHARDS if grid.shards > 1 else MOST_SIMULATED
    if parts > most:
        raise UsageError(f"{parts} parts of a model: up to {most} can be predicted; use replicas")
    if grid.replicas * parts > MOST_SIMULATED and not case.group.uniform:
        raise UsageError(
            f"more than {MOST_SIMULATED} ranks can be predicted only on machines that are all alike, one for each: "
            "give --link"
        )


def _simulated_ends(pipeline: Stages, case: Case, grid: Grid, times: Array) -> Array:
    """When each stage of each replica has ended, without averaging. Of many replicas, one is simulated."""
    replicas = grid.replicas if grid.replicas * grid.stages <= MOST_SIMULATED else 1
    used = times if replicas > 1 else times.mean(axis=0, keepdims=True)
    places = case.places[: replicas * grid.stages]
    ends = simulate_stages(pipeline, tuple(map(float, used.ravel())), case.cluster, places, case.costs)
    return np.broadcast_to(np.array(ends).reshape(1, replicas, grid.stages), (1, *times.shape)).copy()


@lru_cache(maxsize=1024)
def simulate_stages(
    pipeline: Stages, times: tuple[float, ...], cluster: Cluster, places: tuple[int, ...], costs: Costs
) -> list[float]:
    """When each rank has ended; `times` are the seconds of a whole batch on its device."""
    pairs = [(a, b) for a, b in pairwise(range(len(places))) if b % pipeline.count]
    network = Network(cluster, places, costs, [*pairs, *((b, a) for a, b in pairs)])
    ends = [0.0] * len(places)
    for rank, each in enumerate(times):
        network.fluid.start(_stage(pipeline, network, rank, each, ends))
    network.fluid.run()
    return ends


def _stage(pipeline: Stages, network: Network, rank: int, seconds: float, ends: list[float]) -> Process:
    """A stage that carries out its instructions, as `pipeline.executor` does."""
    stage = rank % pipeline.count
    first, program = rank - stage, pipeline.program(stage)
    coming: Iterator[Instruction] = (each for each in program if each.op in RECEIVES)
    posted, leaving = deque[list[Done]](), deque[list[Done]]()
    for instruction in program:
        while len(posted) < AHEAD and (receive := next(coming, None)):
            source, sizes = pipeline.messages(stage, receive)
            posted.append([network.receive(first + source, rank) for _ in sizes])
        if instruction.op in (Op.FORWARD, Op.BACKWARD):
            yield Delay(seconds * pipeline.part(stage, instruction))
        elif instruction.op in RECEIVES:
            for arrived in posted.popleft():
                yield arrived
                yield network.compute(rank, network.costs.message)
        else:
            to, sizes = pipeline.messages(stage, instruction)
            sent = []
            for size in sizes:
                yield network.compute(rank, network.costs.message)
                sent.append(network.send(rank, first + to, size))
            if instruction.op == Op.SEND_GRADIENT:  # while one is being sent the next is computed
                leaving.append(sent)
                for each in leaving.popleft() if len(leaving) > 1 else ():
                    yield each
    for each in (done for sent in leaving for done in sent):
        yield each
    ends[rank] = network.fluid.now


def _longest(pipeline: Stages, case: Case, times: Array) -> Array:
    """When each stage has ended if messages do not compete: times are draws × replicas × stages, and so is the result.

    A message is sent when the one before it is sent and its receive is posted.
    """
    costs, stages = case.costs, pipeline.count
    programs = [deque(pipeline.program(stage)) for stage in range(stages)]
    now = [np.zeros(times.shape[:2]) for _ in range(stages)]
    posted: dict[tuple[int, int], list[Array]] = {}  # by connection: when receives were posted
    sends: dict[tuple[int, int], deque[tuple[Array, list[int]]]] = {}
    free = dict[tuple[int, int], Array]()
    for stage, other in pairwise(range(stages)):
        for link in ((stage, other), (other, stage)):
            posted[link], sends[link], free[link] = [now[0]] * AHEAD, deque(), now[0]
    while any(programs):
        for stage, program in enumerate(programs):
            while program:
                instruction = program[0]
                if instruction.op in (Op.FORWARD, Op.BACKWARD):
                    now[stage] = now[stage] + times[:, :, stage] * pipeline.part(stage, instruction)
                elif instruction.op in RECEIVES:
                    source, sizes = pipeline.messages(stage, instruction)
                    link = source, stage
                    if not sends[link]:
                        break
                    begun, sizes = sends[link].popleft()
                    rate = _rate(case, source, stage)
                    free[link] = np.maximum(np.maximum(begun, free[link]), posted[link].pop(0)) + sum(sizes) / rate
                    now[stage] = np.maximum(now[stage], free[link] + costs.latency) + len(sizes) * costs.message
                    posted[link].append(now[stage])
                else:
                    to, sizes = pipeline.messages(stage, instruction)
                    now[stage] = now[stage] + len(sizes) * costs.message
                    sends[stage, to].append((now[stage], sizes))
                program.popleft()
    return np.stack(now, axis=2)


def _rate(case: Case, source: int, to: int) -> float:
    """Bytes per second from one stage to another, of the first replica."""
    one, other = (case.places[stage] for stage in (source, to))
    fastest = 1 / case.costs.byte if case.costs.byte else float("inf")
    if one == other:
        return fastest
    return min(case.cluster.nodes[one].up, case.cluster.nodes[other].down, fastest)


def bytes_of_stages(options: Mapping[str, Any], anatomy: Anatomy) -> int:
    pipeline, sums = divide(options, anatomy)
    replicas = options["workers"] // pipeline.count
    sent = [float(pipeline.sent(stage)) for stage in range(pipeline.count)]
    for each in sums:
        ranks = len(each.stages) * replicas
        for stage in each.stages:
            sent[stage] += averaged_bytes(options["averaging"], ranks, each.lengths, anatomy.itemsize)
    return round(max(sent))


def sharded(case: Case) -> Array:
    """Shards compute and exchange values in turns; replicas average buckets meanwhile, and all ranks sum a few numbers.

    The slowest shard holds up all exchanges. Its exchanges are simulated with its mean compute time.
    """
    options, slowest = case.options, case.compute.slowest()
    grid = _shards(options)
    _check_size(case, grid)
    shard = _shard_of(options, case.anatomy)
    mean, parts = float(slowest.mean()), int(options["accumulate"])
    ends = _exchange_ends(shard, case, grid, mean / parts)
    last = shard.exchanges[-1].done if shard.exchanges else 0.0
    whole = (ends[-1] if ends else 0.0) + (shard.end.done - last) * mean / parts
    if grid.replicas > 1:
        whole += _exposed(case, grid, shard, mean / parts)
    found: Array = whole + (slowest - mean) * shard.end.done + totals_seconds(case) + case.overhead
    return found


def _exposed(case: Case, grid: Grid, shard: Shard, seconds: float) -> float:
    """What averaging over replicas adds to a step, in whose last pass a whole model would compute for some seconds.

    It is hidden only while shards compute, because exchanges need the same links.
    """
    lengths, points = _buckets(case.options, shard)
    end = shard.end.done * seconds
    ready = tuple(end if case.options["overlap"] == "off" else point.done * seconds for point in points)
    group = Group(case.cluster, tuple(case.places[:: grid.shards]), case.costs)
    return max(0.0, finished(case.options["averaging"], group, lengths, ready, shard.itemsize) - end)


def _shards(options: Mapping[str, Any]) -> Grid:
    shards = options["tensor"] or options["workers"]
    return Grid(options["workers"] // shards, shards=shards)


def _shard_of(options: Mapping[str, Any], anatomy: Anatomy) -> Shard:
    """The last one, which has the largest parts."""
    assert anatomy.parts is not None
    return anatomy.parts.shard(_shards(options).shards)


def _buckets(options: Mapping[str, Any], shard: Shard) -> tuple[tuple[int, ...], list[Point]]:
    """The values of each bucket that replicas average, and where it can be sent; the last one at the end."""
    sizes = [-(-size // options["shrink"]) for size in reversed(shard.sizes)]
    numbers = assign([("", size, shard.itemsize) for size in sizes], bucket_bytes(options))
    lengths = [0] * (numbers[-1] + 1)
    for number, size in zip(numbers, sizes, strict=True):
        lengths[number] += size
    lengths[-1] += tail(len(sizes), 0)
    return tuple(lengths), [*shard.bucket_points(numbers)[:-1], shard.end]


def _exchange_ends(shard: Shard, case: Case, grid: Grid, seconds: float) -> list[float]:
    """When each exchange of a step has ended, if a pass of the whole model takes so many seconds."""
    steps, computed = list[tuple[float, Traffic]](), 0.0
    for _ in range(case.options["accumulate"]):
        for exchange in shard.exchanges:
            steps.append(((exchange.done - computed) * seconds, _traffic(shard, exchange, case.options)))
            computed = exchange.done
        computed -= shard.end.done  # the rest of this pass is computed before the next one
    if any(node.burst for node in case.cluster.nodes):
        replicas = grid.replicas if len(case.places) <= MOST_SIMULATED else 1
        places = case.places[: replicas * grid.shards]
        return simulate_shards(tuple(steps), grid.shards, case.cluster, places, case.costs)
    group, now, ends = Group(case.cluster, case.places[: grid.shards], case.costs), 0.0, []
    for delay, traffic in steps:
        now += delay + traffic.seconds(group)
        ends.append(now)
    return ends


@dataclass(frozen=True)
class Traffic:
    """An exchange for some samples: an all-reduce of so many numbers, or what each shard sends to all others."""

    summed: int
    parts: tuple[int, ...]
    itemsize: int

    def plan(self, shard: int, shards: int) -> Plan:
        if not self.parts:
            return NATIVE.plan(shard, shards, self.summed)
        others = [(shard - i) % shards for i in range(1, shards)]
        sends: Plan = [Send(other, 0, self.parts[shard]) for other in reversed(others)]
        return [*sends, *(Recv(other, 0, self.parts[other], add=False) for other in others)]

    def seconds(self, group: Group) -> float:
        if not self.parts:
            return seconds(NATIVE.name, group, self.summed, self.itemsize)
        return simulate_shards(((0.0, self),), group.ranks, group.cluster, group.places, group.costs)[0]


def _traffic(shard: Shard, exchange: Exchange, options: Mapping[str, Any]) -> Traffic:
    samples, shrink = options["batch_size"], options["shrink"]
    itemsize = exchange.amounts[0].itemsize
    if exchange.summed:
        return Traffic(exchange.summed.count(samples, shrink), (), itemsize)
    known = dict(exchange.receives) | {shard.rank: exchange.sends[0][1]}
    return Traffic(0, tuple(known[each].count(samples, shrink) for each in range(shard.shards)), itemsize)


@lru_cache(maxsize=1024)
def simulate_shards(
    steps: tuple[tuple[float, Traffic], ...], shards: int, cluster: Cluster, places: tuple[int, ...], costs: Costs
) -> list[float]:
    """When each exchange has ended on all ranks; before each, shards compute for some seconds."""
    plans = {traffic: [traffic.plan(shard, shards) for shard in range(shards)] for _, traffic in steps}
    connections = {(rank, rank - rank % shards + each.to) for rank in range(len(places)) for own in plans.values()
                   for each in own[rank % shards] if isinstance(each, Send)}  # fmt: skip
    network, ends = Network(cluster, places, costs, connections), [0.0] * len(steps)
    late = np.random.default_rng(0).uniform(0, APART, (len(places), len(steps)))
    for rank in range(len(places)):
        network.fluid.start(_follow_shard(network, rank, shards, steps, late[rank].tolist(), ends))
    network.fluid.run()
    return ends


def _follow_shard(
    network: Network,
    rank: int,
    shards: int,
    steps: Sequence[tuple[float, Traffic]],
    late: Sequence[float],
    ends: list[float],
) -> Process:
    shard = rank % shards
    for number, (delay, traffic) in enumerate(steps):
        yield Delay(delay + late[number])
        yield from follow(network, rank, _moved(traffic.plan(shard, shards), rank - shard), traffic.itemsize)
        ends[number] = max(ends[number], network.fluid.now)


def _moved(plan: Plan, first: int) -> Plan:
    """For a group of ranks that begins with this one."""
    if not first:
        return plan
    return [replace(each, to=each.to + first) if isinstance(each, Send) else replace(each, source=each.source + first)
            for each in plan]  # fmt: skip


def bytes_of_shards(options: Mapping[str, Any], anatomy: Anatomy) -> int:
    shard, samples, shrink = _shard_of(options, anatomy), options["batch_size"], options["shrink"]
    own = sum(amount.nbytes(samples, shrink) for exchange in shard.exchanges for amount in exchange.amounts)
    own *= int(options["accumulate"])
    lengths, _ = _buckets(options, shard)
    averaged = averaged_bytes(options["averaging"], _shards(options).replicas, lengths, shard.itemsize)
    return round(own + averaged)


def bytes_of_parts(options: Mapping[str, Any], anatomy: Anatomy, grid: Grid) -> int:
    """What the rank that sends most sends for an update, as summaries count it: without the final sum."""
    return bytes_of_shards(options, anatomy) if grid.shards > 1 else bytes_of_stages(options, anatomy)

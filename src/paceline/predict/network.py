"""Ranks on a cluster that exchange messages, in the fluid simulation; and how long collectives take there."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import islice

from paceline.collectives.plan import WINDOW, MakePlan, Plan, Recv, Send
from paceline.predict.cluster import Cluster
from paceline.predict.fluid import Delay, Done, Fluid, Process, Uses

MEMORY = 5e9  # bytes per second: no connection is faster
# Bytes that a TCP connection has on its way. Connections of one node take turns with so much of a message: one that
# begins earlier ends earlier, which fair shares from the first byte on would not show. Measured in the lab.
TURN = 96 * 1024
# Bytes of a message that the kernel keeps for a connection: a rank that has handed over all but so many goes on.
KEPT = 256 * 1024
# Large messages are sent in about so many parts, which only makes the simulation faster; the last part is shorter,
# so that parts of different connections do not end at the same moment.
MOST_TURNS = 7.5


def turn(size: float) -> float:
    """Bytes of a message that are sent before it is another connection's turn."""
    return max(TURN, size / MOST_TURNS)


@dataclass(frozen=True)
class Costs:
    """What messages cost beside the time on a link, on the machines of the probes.

    A rank's own thread is busy for `message` seconds with each message that it sends or receives, and `add` seconds for
    each byte that it adds up. The transport and the kernel use `byte` seconds of a core for each byte, on both sides,
    while the rank goes on. A byte takes the time of `load` bytes on a link. A message arrives `latency` seconds after
    its last byte was sent, and after what `queue` bytes take on its slowest link. A server is busy for `update` seconds
    with each byte of an update. Connections that bring data to a server do not get equal parts of its link:
    `unfairness` is the standard deviation of the logarithm of their parts.
    """

    message: float = 0.0
    add: float = 0.0
    byte: float = 0.0
    latency: float = 0.0
    update: float = 0.0
    queue: float = 0.0
    unfairness: float = 0.0
    load: float = 1.0


@dataclass
class TokenBucket:
    """A link that saves up to `burst` bytes of its rate while it is idle."""

    burst: float
    rate: float
    tokens: float
    since: float = 0.0
    users: int = 0

    def begin(self, now: float, size: float) -> float:
        """How much of a message passes at once."""
        if not self.users:
            self.tokens = min(self.burst, self.tokens + self.rate * (now - self.since))
        self.users += 1
        taken = min(self.tokens, size)
        self.tokens -= taken
        return taken

    def end(self, now: float) -> None:
        self.users, self.since = self.users - 1, now


class Network:
    """The simulation of ranks that are placed on nodes.

    `connections` are pairs of ranks, from the one that sends to the one that receives. Messages of a connection are
    sent one after the other; connections share links, and the cores of a host.
    """

    def __init__(
        self, cluster: Cluster, places: Sequence[int], costs: Costs, connections: Iterable[tuple[int, int]]
    ) -> None:
        self.cluster, self.places, self.costs = cluster, places, costs
        nodes, racks = len(cluster.nodes), len(cluster.racks)
        hosts = sorted({node.host for node in cluster.nodes})
        links = [rate for node in cluster.nodes for rate in (node.up, node.down)]
        between = [rate for rack in cluster.racks for rate in rack]
        self._core = {host: 2 * (nodes + racks) + number for number, host in enumerate(hosts)}
        self.fluid = Fluid([*links, *between, *[cluster.cores] * len(hosts)])
        self._fastest = max(links)
        bursts = [node.burst for node in cluster.nodes for _ in range(2)]
        self._links = [TokenBucket(burst, rate, burst) for burst, rate in zip(bursts, links, strict=True)]
        self._targets = Counter(source for source, _ in set(connections))
        self._turn: dict[int, Done] = {}  # by rank: when what it has begun to send is sent
        self._last: dict[tuple[int, int], Done] = {}  # by connection: when its last message is sent
        self._messages: dict[tuple[int, int, int], Done] = {}  # by connection and number: when it has arrived
        self._posted: dict[tuple[int, int, int], Done] = {}  # and when its receive was posted
        self._sent: dict[tuple[int, int], int] = {}
        self._taken: dict[tuple[int, int], int] = {}
        self._paths: dict[tuple[int, int], tuple[Uses, float]] = {}

    def compute(self, rank: int, seconds: float) -> Done:
        """Keep a core of the rank's host busy, or a share of one if there are not enough."""
        return self.fluid.work(seconds, ((self._core_of(rank), 1.0),), most=1.0)

    def send(
        self, source: int, to: int, size: int, then: Callable[[], None] | None = None, weight: float = 1.0
    ) -> Done:
        """Hand a message to the connection; the result is set when the kernel has taken it. `then` is called when it
        has arrived; without it, it waits until its receive is posted, as gloo does. Connections that share a link have
        parts of it in proportion to their weights.
        """
        number = self._sent.get((source, to), 0)
        self._sent[source, to] = number + 1
        before, sent, taken = self._last.get((source, to)), Done(), Done()
        self._last[source, to] = sent
        arrived = self._messages.setdefault((source, to, number), Done())
        if then:
            arrived.then.append(then)
        posted = None if then else self._posted.setdefault((source, to, number), Done())
        self.fluid.start(self._transfer(source, to, size, weight, (before, posted), taken, sent, arrived))
        return taken

    def receive(self, source: int, to: int) -> Done:
        """Post a receive; the result is set when its message has arrived."""
        number = self._taken.get((source, to), 0)
        self._taken[source, to] = number + 1
        self.fluid.set(self._posted.setdefault((source, to, number), Done()))
        return self._messages.setdefault((source, to, number), Done())

    def _core_of(self, rank: int) -> int:
        return self._core[self.cluster.nodes[self.places[rank]].host]

    def _transfer(
        self,
        source: int,
        to: int,
        size: int,
        weight: float,
        after: Sequence[Done | None],
        taken: Done,
        sent: Done,
        arrived: Done,
    ) -> Process:
        for each in after:
            if each is not None:
                yield each
        uses, most = self._paths.get((source, to)) or self._paths.setdefault((source, to), self._path(source, to))
        up = self.cluster.nodes[self.places[source]].up
        links = [self._links[resource] for resource, _ in uses if resource < len(self._links)]
        left = size - min((link.begin(self.fluid.now, size) for link in links), default=0.0)
        while left > 0:
            if left <= KEPT and taken.at is None:
                self.fluid.set(taken)
            part = min(left, turn(size)) if self._targets[source] > 1 else left
            before, done = self._turn.get(source), Done()
            self._turn[source] = done
            if before is not None:
                yield before
            # The next one's turn begins when the node's own link has sent this, wherever else it is held up.
            self.fluid.later(part * self.costs.load / up, partial(self.fluid.set, done))
            yield self.fluid.work(part, uses, weight * self._fastest, most)
            left -= part
        for link in links:
            link.end(self.fluid.now)
        if taken.at is None:
            self.fluid.set(taken)
        self.fluid.set(sent)
        if late := self._late(source, to):
            yield Delay(late)
        self.fluid.set(arrived)

    def _late(self, source: int, to: int) -> float:
        """Seconds between the last byte of a message and its arrival."""
        one, other = (self.cluster.nodes[self.places[rank]] for rank in (source, to))
        queued = self.costs.queue / min(one.up, other.down) if self.places[source] != self.places[to] else 0.0
        return self.costs.latency + queued

    def _path(self, source: int, to: int) -> tuple[Uses, float]:
        """What a byte uses from one rank to another, and the greatest rate of a connection."""
        one, other = self.places[source], self.places[to]
        byte, cores = self.costs.byte, (self._core_of(source), self._core_of(to))
        uses = [(cores[0], 2 * byte)] if cores[0] == cores[1] else [(core, byte) for core in cores]
        if one != other:
            nodes = self.cluster.nodes
            load = self.costs.load
            uses += [(2 * one, load), (2 * other + 1, load)]
            if self.cluster.racks and nodes[one].rack != nodes[other].rack:
                first = 2 * len(nodes)
                uses += [(first + 2 * nodes[one].rack, load), (first + 2 * nodes[other].rack + 1, load)]
        return tuple((resource, units) for resource, units in uses if units), min(MEMORY, 1 / byte if byte else MEMORY)


def follow(network: Network, rank: int, plan: Plan, itemsize: int) -> Process:
    """A rank that carries out its plan, as `collectives.plan.carry_out` does, with the next receives posted ahead. It
    goes on when the kernel has taken all that it sends.
    """
    costs, sends, receives = network.costs, list[Done](), (each for each in plan if isinstance(each, Recv))
    posted = deque(network.receive(each.source, rank) for each in islice(receives, WINDOW))
    for instruction in plan:
        size = (instruction.stop - instruction.start) * itemsize
        if isinstance(instruction, Send):
            if costs.message:
                yield network.compute(rank, costs.message)
            sends.append(network.send(rank, instruction.to, size))
            continue
        yield posted.popleft()
        if busy := costs.message + costs.add * size * instruction.add:
            yield network.compute(rank, busy)
        posted.extend(network.receive(each.source, rank) for each in islice(receives, 1))
    yield from sends


def one_by_one(
    network: Network, rank: int, plans: Sequence[Plan], ready: Sequence[float], itemsize: int, ends: list[float]
) -> Process:
    """A rank that makes some steps: it carries out plans one after the other, each when it is ready."""
    for step in range(len(ends)):
        began = network.fluid.now
        for plan, at in zip(plans, ready, strict=True):
            if began + at > network.fluid.now:
                yield Delay(began + at - network.fluid.now)
            yield from follow(network, rank, plan, itemsize)
        ends[step] = max(ends[step], network.fluid.now)


@lru_cache(maxsize=4096)
def simulate(
    make: MakePlan,
    lengths: tuple[int, ...],
    ready: tuple[float, ...],
    itemsize: int,
    cluster: Cluster,
    places: tuple[int, ...],
    costs: Costs,
    shares: tuple[float, ...] = (),
    steps: int = 1,
) -> float:
    """When the last of some collectives of all ranks has ended; each begins when it is ready, and the one before it has
    ended on this rank. On a rank with a share of 0.9, it is ready after nine tenths of that time. With several steps,
    each of which begins on a rank when the one before has ended there: the time from one to the next.
    """
    ranks = len(places)
    plans = [[make(rank, ranks, length) for length in lengths] for rank in range(ranks)]
    connections = {(rank, each.to) for rank, own in enumerate(plans) for plan in own for each in plan
                   if isinstance(each, Send)}  # fmt: skip
    network, ends = Network(cluster, places, costs, connections), [0.0] * steps
    for rank, own in enumerate(plans):
        at = [each * shares[rank] for each in ready] if shares else ready
        network.fluid.start(one_by_one(network, rank, own, at, itemsize, ends))
    network.fluid.run()
    return (ends[-1] - ends[0]) / (steps - 1) if steps > 1 else ends[0]

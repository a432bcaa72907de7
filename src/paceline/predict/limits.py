"""What limits a setting: the cause without which its step would be shortest.

Each cause is removed in turn, and the step is predicted again. Steps have no noise, except where noise is the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from paceline.predict.cluster import Cluster, Machine
from paceline.predict.fit import simulation_of
from paceline.predict.network import MEMORY
from paceline.predict.steps import Array, Case

COMPUTE, LINK, LATENCY, SLOWEST, SERVER, CORES = CAUSES = (
    "compute",
    "link",
    "latency",
    "slowest node",
    "server",
    "cores",
)
# In words, for people.
MEANING = {
    COMPUTE: "computing gradients",
    LINK: "bytes on the links",
    LATENCY: "the fixed cost of messages",
    SLOWEST: "waiting for the slowest node",
    SERVER: "the servers: their links, sums and updates",
    CORES: "processor time for bytes and sums",
}


@dataclass(frozen=True)
class Limit:
    """A cause, and the seconds of a step that would be saved without it. `saved` are those of all causes, and `whole`
    are those of the step as it is.
    """

    cause: str
    seconds: float
    saved: Mapping[str, float]
    whole: float = 0.0

    def without(self, cause: str) -> float:
        """The seconds of a step without this cause."""
        return max(0.0, self.whole - self.saved.get(cause, 0.0))


def limit_of(case: Case, seconds: float, *, noise: bool = True) -> Limit:
    """What limits a case whose workers compute for `seconds` at speed 1; `case.compute` draws times with noise.

    Without `noise`, only speeds of nodes make one of them the slowest.
    """
    times = _seconds(case, seconds)
    steady = replace(case, compute=Steady(times))
    whole = _step(steady)
    saved = {cause: whole - _step(remove(steady)) for cause, remove in _REMOVALS.items()}
    # Of several speeds, the mean: no worker waits for another.
    mean = Steady((sum(times) / len(times),) * len(times))
    even = whole if len(set(times)) == 1 else _step(replace(case, compute=mean))
    saved[SLOWEST] = (_step(case) if noise else whole) - even
    if not case.options["servers"]:
        return most_saved(saved | {LINK: whole - _step(_faster_links(steady))}, whole)
    # What links save is not counted twice: those of servers belong to the servers.
    served = _faster_servers(steady)
    without = _step(served)
    return most_saved(saved | {SERVER: whole - without, LINK: without - _step(_faster_links(served))}, whole)


def most_saved(saved: Mapping[str, float], whole: float = 0.0) -> Limit:
    cause = max((each for each in CAUSES if each in saved), key=lambda each: saved[each])
    return Limit(cause, max(0.0, saved[cause]), saved, whole)


def _step(case: Case) -> float:
    return float(simulation_of(case.options["strategy"])(case).mean())


def _workers(case: Case) -> tuple[int, ...]:
    """The node of each."""
    return case.places[int(case.options["servers"]) :]


def _seconds(case: Case, seconds: float) -> tuple[float, ...]:
    """Of each worker."""
    return tuple(seconds / case.cluster.nodes[place].speed for place in _workers(case))


@dataclass(frozen=True)
class Steady:
    """Workers that compute for these times in every step."""

    times: tuple[float, ...]

    def __call__(self, steps: int, workers: int | None = None, mean_of: int = 1) -> Array:
        own = np.array(self.times[:workers])
        return np.broadcast_to(own, (1, steps, len(own)))

    def slowest(self, mean_of: int = 1) -> Array:
        return np.array([max(self.times)])


def _no_compute(case: Case) -> Case:
    return replace(case, compute=Steady((0.0,) * len(_workers(case))))


def _faster_links(case: Case) -> Case:
    """As fast as memory; one that is faster stays as it is."""
    cluster = _with_links(case.cluster, range(len(case.cluster.nodes)))
    racks = tuple((max(up, MEMORY), max(down, MEMORY)) for up, down in cluster.racks)
    return replace(case, cluster=replace(cluster, racks=racks))


def _with_links(cluster: Cluster, fast: Sequence[int]) -> Cluster:
    """With links as fast as memory on some nodes."""
    chosen = set(fast)
    nodes = tuple(_fast(node) if number in chosen else node for number, node in enumerate(cluster.nodes))
    return replace(cluster, nodes=nodes)


def _fast(node: Machine) -> Machine:
    return replace(node, up=max(node.up, MEMORY), down=max(node.down, MEMORY))


def _free_messages(case: Case) -> Case:
    return replace(case, costs=replace(case.costs, message=0.0, latency=0.0))


def _enough_cores(case: Case) -> Case:
    """No processor time for bytes and sums; what servers add up is theirs."""
    add = case.costs.add if case.options["servers"] else 0.0
    cluster = replace(case.cluster, cores=float("inf"))
    return replace(case, cluster=cluster, costs=replace(case.costs, byte=0.0, add=add))


def _faster_servers(case: Case) -> Case:
    cluster = _with_links(case.cluster, case.places[: int(case.options["servers"])])
    return replace(case, cluster=cluster, costs=replace(case.costs, add=0.0, update=0.0, unfairness=0.0))


_REMOVALS: Mapping[str, Callable[[Case], Case]] = {
    COMPUTE: _no_compute,
    LATENCY: _free_messages,
    CORES: _enough_cores,
}

"""The machines that a prediction is for: their links, processors and speeds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from paceline.lab.plan import LabPlan
from paceline.layout import share

# Of each byte on a link, this much is payload: the rest is headers of TCP, IP and Ethernet, and acknowledgements in the
# other direction (docs/lab.md: the kernel counts 1.037 bytes for each byte of gradients; a link carries 0.991 of its
# rate as the kernel counts them).
PAYLOAD = {1500: 0.991 / 1.037, 9000: 0.995 / 1.009}


@dataclass(frozen=True)
class Machine:
    """A node: its links in bytes of payload per second, and the speed and noise of its processors.

    `speed` is relative to the machine of the probes; `noise` is the coefficient of variation of the time of a step.
    Nodes with the same `host` share its cores, as those of a lab do. After it was idle, a link carries `burst` bytes at
    once, as the token buckets of a lab do.
    """

    up: float
    down: float
    speed: float = 1.0
    noise: float | None = None  # that of the probes
    rack: int = 0
    host: int = 0
    burst: float = 0.0


@dataclass(frozen=True)
class Cluster:
    """Nodes, the links between their racks (up and down, in bytes per second), and the cores of each host."""

    nodes: tuple[Machine, ...]
    racks: tuple[tuple[float, float], ...] = ()
    cores: float = float("inf")

    @cached_property
    def uniform(self) -> bool:
        """Whether all nodes are alike, and share nothing but a switch."""
        first, *others = self.nodes
        hosts = {node.host for node in self.nodes}
        return (
            not self.racks
            and len(hosts) == len(self.nodes)
            and all(replace(node, host=0) == replace(first, host=0) for node in others)
        )

    def first(self, count: int) -> Cluster:
        """The first nodes; those of a uniform cluster can be as many as needed."""
        if count <= len(self.nodes):
            return replace(self, nodes=self.nodes[:count])
        assert self.uniform
        return replace(self, nodes=tuple(replace(self.nodes[0], host=host) for host in range(count)))


def alike(count: int, rate: float, speed: float = 1.0) -> Cluster:
    """Machines of this speed, each with a link of this rate, in bit/s."""
    link = rate / 8 * payload(1500)
    return Cluster(tuple(Machine(link, link, speed, host=host) for host in range(count)))


def of_lab(plan: LabPlan) -> Cluster:
    """The nodes of a lab file, as machines."""
    part = payload(plan.mtu) / 8
    nodes = tuple(
        Machine(node.up * part, node.down * part, node.speed, node.noise or None, node.rack, number)
        for number, node in enumerate(plan.nodes)
    )
    return Cluster(nodes, tuple((rack.up * part, rack.down * part) for rack in plan.racks))


def payload(mtu: int) -> float:
    """The part of a link's rate that carries payload: interpolated in headers per byte."""
    (small, one), (large, other) = PAYLOAD.items()
    slope = (1 / one - 1 / other) / (1 / small - 1 / large)
    return 1 / (1 / other + slope * (1 / mtu - 1 / large))


def spread(ranks: int, nodes: int) -> tuple[int, ...]:
    """The node of each rank, as the launcher places them: in blocks, as evenly as possible."""
    used = min(ranks, nodes)
    return tuple(node for node in range(used) for _ in share(ranks, used, node))

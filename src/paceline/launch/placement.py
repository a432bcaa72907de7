"""Assigns ranks to the nodes of the lab, for a run that is started on one of its nodes."""

from __future__ import annotations

import random
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from paceline.errors import UsageError
from paceline.lab.plan import LabPlan, Node, in_words
from paceline.launch import env as names
from paceline.layout import share
from paceline.spec import RunSpec

AGENT = (sys.executable, "-P", "-m", "paceline.lab.agent")


@dataclass(frozen=True)
class Places:
    """The node of every rank, and where the ranks rendezvous."""

    nodes: tuple[Node, ...]  # by rank
    here: str
    servers: int
    port: int
    secret: str

    def command(self, rank: int, words: list[str]) -> list[str]:
        """The command line that runs a command on the rank's node."""
        name = self.nodes[rank].name
        return words if name == self.here else [*AGENT, "--words", name, *words]

    def outside(self, words: list[str]) -> list[str]:
        """The command line that runs a command in the lab, outside its nodes."""
        return [*AGENT, "--outside", *words]

    def variables(self, rank: int) -> dict[str, str]:
        """Environment variables with the rank's place on its node, and where to rendezvous."""
        neighbours = [other for other, node in enumerate(self.nodes) if node is self.nodes[rank]]
        found = {
            names.LOCAL: f"{neighbours.index(rank)}/{len(neighbours)}",
            names.STORE: f"tcp://{self.nodes[0].address}:{self.port}",
        }
        if self.servers:
            places = [f"tcp://{self.nodes[i].address}:{self.port + i}" for i in range(self.servers)]
            found |= {names.SERVERS: " ".join(places), names.SECRET: self.secret}
        return found

    def hosts(self) -> str:
        """Every node with its number of ranks, in mpiexec's format."""
        counts: dict[str, int] = {}
        for node in self.nodes:
            counts[node.name] = counts.get(node.name, 0) + 1
        return ",".join(f"{name}:{count}" for name, count in counts.items())

    def about(self) -> str:
        """A description for the console: where ranks are, and how fast the links are."""
        first = self.nodes[0]
        same = all((node.up, node.down) == (first.up, first.down) for node in self.nodes)
        speed = f"{in_words(first.up)} up, {in_words(first.down)} down" if same else "links of several speeds"
        return f"{self.hosts()} ({speed})"


def find_places(spec: RunSpec, env: Mapping[str, str] | None = None) -> Places | None:
    """Places on the nodes of the lab that this process is in; None outside a lab, and if all ranks stay together."""
    lab = names.find_lab() if env is None else names.find_lab(env)
    if lab is None or spec.ranks == 1 or spec.carrier.in_one_process:
        return None
    plan, here = lab
    # Each lab has its own network, so ports collide only if several runs share a lab.
    port = random.SystemRandom().randrange(20_000, 30_000)
    return Places(tuple(place(plan, spec.ranks)), here, spec.servers or 0, port, secrets.token_hex(32))


def place(plan: LabPlan, ranks: int) -> list[Node]:
    """The node of each rank: as many ranks per node as the lab file says, or divided evenly."""
    if not any(node.processes for node in plan.nodes):
        used = plan.nodes[: min(ranks, len(plan.nodes))]
        return [node for i, node in enumerate(used) for _ in share(ranks, len(used), i)]
    room = [node for node in plan.nodes for _ in range(node.processes or 1)]
    if ranks > len(room):
        raise UsageError(
            f"{ranks} ranks do not fit into the lab {plan.name}: its {len(plan.nodes)} nodes have places for "
            f"{len(room)}: raise `processes` in the lab file, or use fewer --workers"
        )
    return room[:ranks]

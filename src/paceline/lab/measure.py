"""Measures the links of a lab and compares them with the plan: one pair of nodes, and all pairs at once."""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict, dataclass

from paceline.errors import PacelineError, UsageError
from paceline.lab import client
from paceline.lab.plan import LabPlan, in_words

# Time for nodes to start their programs.
LEAD_SECONDS = 1.0


@dataclass(frozen=True)
class Rate:
    """The speed of a node in one direction, in bit/s."""

    node: str
    way: str
    asked: float
    measured: float


def fair_rates(plan: LabPlan, flows: list[tuple[str, str]]) -> list[float]:
    """The rate of each flow if links are shared fairly: all rates grow equally until a link on their path is full."""
    room: dict[str, float] = {}
    paths: list[list[str]] = []
    for source, target in flows:
        a, b = plan.node(source), plan.node(target)
        links = {f"up {a.name}": a.up, f"down {b.name}": b.down}
        if plan.racks and a.rack != b.rack:
            links |= {f"rack up {a.rack}": plan.racks[a.rack].up, f"rack down {b.rack}": plan.racks[b.rack].down}
        room |= links
        paths.append(list(links))
    rates = [0.0] * len(flows)
    growing = set(range(len(flows)))
    while growing:
        users = {link: sum(link in paths[flow] for flow in growing) for link in room}
        step = min(room[link] / count for link, count in users.items() if count)
        for flow in growing:
            rates[flow] += step
        for link, count in users.items():
            room[link] -= step * count
        full = {link for link, count in users.items() if count and room[link] <= 1e-6 * step}
        growing = {flow for flow in growing if not full & set(paths[flow])}
    return rates


def measure(lab: str | None, plan: LabPlan, flows: list[tuple[str, str]], seconds: float) -> list[Rate]:
    """Send along all flows at once; return the rates of all sending and receiving nodes."""
    start = time.monotonic() + LEAD_SECONDS + 0.1 * len(plan.nodes)
    used = [node for node in plan.nodes if any(node.name in flow for flow in flows)]
    commands, outputs = [], []
    for node in used:
        targets = [plan.node(target).address for source, target in flows if source == node.name]
        words = [sys.executable, "-P", "-m", "paceline.lab.traffic", str(start), str(seconds), node.address, *targets]
        read, write = os.pipe()
        commands.append(client.begin(lab, node.name, words, (0, write, 2)))
        outputs.append(open(read))  # noqa: SIM115  closed below
        os.close(write)
    client.wait(commands)
    said = []
    for output in outputs:
        with output:
            said.append(output.read())
    failed = [command.node for command in commands if command.exit_code]
    if failed:
        raise PacelineError(f"measuring failed on {', '.join(failed)}")
    shares = fair_rates(plan, flows)
    found = []
    for node, text in zip(used, said, strict=True):
        values = json.loads(text)
        for way, end, key in (("up", 0, "tx_bytes"), ("down", 1, "rx_bytes")):
            asked = sum(rate for flow, rate in zip(flows, shares, strict=True) if flow[end] == node.name)
            if asked:
                found.append(Rate(node.name, way, asked, values[key]))
    return found


def show(lab: str | None, seconds: float, *, as_json: bool = False) -> int:
    """Print both tables, or JSON."""
    answer = client.ask(lab, "status")
    plan = LabPlan.from_json(answer["plan"])
    names = [node.name for node in plan.nodes if answer["states"][node.name] == "up"]
    if len(names) < 2:
        raise UsageError("measuring needs two nodes that are up, and this lab has fewer")
    every = [(a, b) for a in names for b in names if a != b]
    tables = ((f"{names[0]} to {names[1]}", every[:1]), ("all pairs at once", every))
    if as_json:
        print(json.dumps([asdict(rate) | {"flows": title} for title, flows in tables
                          for rate in _shown(measure(lab, plan, flows, seconds), flows)]))  # fmt: skip
        return 0
    print(f"{'':<24}{'asked':>14}{'measured':>14}")
    for title, flows in tables:
        print(title)
        for rate in _shown(measure(lab, plan, flows, seconds), flows):
            off = rate.measured / rate.asked - 1
            print(f"  {rate.node + ' ' + rate.way:<22}{in_words(round(rate.asked)):>14}"
                  f"{in_words(round(rate.measured)):>14}{off:>+8.1%}")  # fmt: skip
    return 0


def _shown(rates: list[Rate], flows: list[tuple[str, str]]) -> list[Rate]:
    """Of one flow, what its target received and nobody else."""
    return [rate for rate in rates if len(flows) > 1 or rate.way == "up" or rate.node == flows[0][1]]

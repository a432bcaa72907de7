"""Where a training could run: the machine of the runs, machines with links of some speed, a cluster, or what can be
paid for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from paceline.advise.advice import OWN_MACHINE
from paceline.advise.prices import Prices
from paceline.advise.search import Place
from paceline.errors import UsageError
from paceline.lab.plan import PRESETS, in_words, read_plan
from paceline.predict.cluster import alike, of_lab
from paceline.predict.fit import Fit
from paceline.predict.forecast import MOST_WORKERS
from paceline.predict.probes import Probe


def own_place(probes: Sequence[Probe], memory: int | None = None) -> Place:
    """Where the runs were made: one machine, whose cores all workers share, or the nodes of a lab."""
    run = max(probes, key=lambda probe: probe.workers).run
    if lab := run.environment.get("lab"):
        rates = sorted({node[way] for node in lab["nodes"] for way in ("up", "down")})
        speeds = " to ".join(in_words(round(rate)) for rate in dict.fromkeys((rates[0], rates[-1])))
        return Place(f"nodes of the lab ({speeds} links)", None, MOST_WORKERS, memory=memory)
    there = max((node.memory_bytes or 0 for node in run.nodes.values()), default=0) or None
    here = memory or (None if run.emulated else there)  # an emulated device has a memory of its own
    return Place(OWN_MACHINE, None, int(probes[0].cluster.cores), memory=here, shared=True)


def asked_places(
    fit: Fit,
    probes: Sequence[Probe],
    ranks: int,
    *,
    rate: int | None,
    cluster: str | None,
    prices: Prices | None,
    memory: int | None,
) -> list[Place]:
    """The machines that were asked about; none: those of the runs."""
    speed = 1.0 if fit.device else probes[0].cluster.nodes[0].speed
    if cluster:
        return [_of_cluster(cluster, ranks, prices, memory)]
    if prices:
        return [
            Place(
                f"machines “{kind.name}”",
                alike(min(ranks, kind.most), rate or kind.rate or 1e9, speed * kind.speed),
                min(ranks, kind.most) if rate or kind.rate else 1,
                (kind.per_hour,),
                memory or kind.memory,
            )
            for kind in prices.kinds
        ]
    if rate:
        here = own_place(probes, memory)
        known = here.memory if here.shared and not fit.device else memory  # machines like that of the runs
        return [Place(f"machines over {in_words(rate)} links", alike(ranks, rate, speed), ranks, memory=known)]
    return []


def _of_cluster(given: str, ranks: int, prices: Prices | None, memory: int | None) -> Place:
    plan = read_plan(f"{given}:{ranks}" if given in PRESETS else given)
    if any(node.processes for node in plan.nodes):
        raise UsageError(f"--cluster {given}: several processes on a node are not predicted: leave `processes` out")
    # The fastest nodes first: one process is on the fastest.
    plan = replace(plan, nodes=tuple(sorted(plan.nodes, key=lambda node: -node.speed)))
    least = min((node.memory for node in plan.nodes if node.memory), default=None)
    paid = prices.of_nodes([node.name for node in plan.nodes], "the file of --prices") if prices else ()
    return Place(f"nodes of {given}", of_lab(plan), len(plan.nodes), paid, memory or least)

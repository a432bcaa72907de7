"""Whether other programs used the processors of a run's machines while it trained: the one rule for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.run.records import Node, NodeSample

# Cores. Less than this the operating system uses by itself, and counts of processor time are no more exact.
LEAST = 0.2
# Others that use this part of a machine's cores, or a hypervisor that withholds it of what was wanted, disturb a run.
PART = 0.1
# Processes waited for a core in more than this part of the time: what others use, somebody misses.
WAITED = 0.1
# Seconds of samples that are needed to say anything.
ENOUGH = 1.0
NAMED = 3


def disturbance(nodes: Iterable[Node], began: float, ended: float, *, emulated: bool = False) -> str | None:
    """Why the times of a run whose steps were from `began` to `ended` are not its own, in a sentence without its end.

    Runs that want more cores than there are disturb themselves: that counts for nothing here. Emulated compute sleeps,
    so that others disturb it only when somebody has to wait for a core.
    """
    machines: dict[str, list[Node]] = {}
    for node in nodes:
        machines.setdefault(node.machine or node.name, []).append(node)
    found = {}
    for sharing in machines.values():
        if why := _on_machine(sharing, began, ended, emulated):
            found[sharing[0].name] = why
    if len(machines) == 1:
        return next(iter(found.values()), None)
    more = [f"and {len(found) - NAMED} more nodes were busy"] if len(found) > NAMED else []
    return "; ".join([*(f"on {name}, {why}" for name, why in list(found.items())[:NAMED]), *more]) or None


def _on_machine(nodes: Sequence[Node], began: float, ended: float, emulated: bool) -> str | None:
    """Of nodes that share one machine: each has counted its own processes, and any of them the machine."""
    cores = max(node.cores or 0 for node in nodes)
    machine = _first(nodes, began, ended, _machine_cpu)
    own = [_mean(node, began, ended, _own_cpu) for node in nodes]
    if not cores or machine is None:
        return None
    stolen = _first(nodes, began, ended, lambda sample, _: sample.steal) or 0.0
    if stolen >= LEAST and stolen >= PART * (machine + stolen):
        return f"the hypervisor withheld {stolen:.1f} of {cores} cores"
    if any(each is None for each in own):
        return None
    others = machine - sum(each or 0.0 for each in own)
    pressure = _first(nodes, began, ended, lambda sample, _: sample.pressure)
    waited = cores - machine < 1 if pressure is None else pressure > WAITED
    if others >= LEAST and (waited or (others >= PART * cores and not emulated)):
        return used_by_others(others, cores)
    return None


def warning(why: str) -> str:
    """To be said at the end of a training."""
    return f"The machine was busy: {why} during training; do not compare these times."


def used_by_others(used: float, cores: int, verb: str = "used") -> str:
    return f"other processes {verb} {used:.1f} of {cores} core{'s' * (cores > 1)}"


Value = Callable[[NodeSample, Node], float | None]


def _machine_cpu(sample: NodeSample, node: Node) -> float | None:
    """Samples of before there was `machine_cpu` have it in `cpu`, except in the lab."""
    return sample.cpu if sample.machine_cpu is None and not node.own_processes else sample.machine_cpu


def _own_cpu(sample: NodeSample, node: Node) -> float | None:
    return sample.cpu if node.own_processes else sample.run_cpu


def _first(nodes: Sequence[Node], began: float, ended: float, value: Value) -> float | None:
    return next((mean for node in nodes if (mean := _mean(node, began, ended, value)) is not None), None)


def _mean(node: Node, began: float, ended: float, value: Value) -> float | None:
    """Over the time between two samples, for all whose middle is in a step; None where that is too little to tell."""
    total = seconds = 0.0
    for before, sample in zip(node.samples, node.samples[1:], strict=False):
        known, gap = value(sample, node), sample.time - before.time
        if known is not None and gap > 0 and began <= (before.time + sample.time) / 2 <= ended:
            total, seconds = total + known * gap, seconds + gap
    return total / seconds if seconds >= ENOUGH else None

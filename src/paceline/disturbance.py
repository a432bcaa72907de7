"""Detects whether other programs used the cores of a run's machines during training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from paceline.run.records import Node, NodeSample

# Cores. The operating system itself uses up to this much, and CPU time is not counted more accurately.
LEAST = 0.2
# Other programs disturb a run if they use this part of a machine's cores, or the hypervisor withholds it.
PART = 0.1
# Other programs also disturb a run if processes waited for a core in more than this part of the time.
WAITED = 0.1
# Seconds of samples that are needed for a decision.
ENOUGH = 1.0
NAMED = 3


def disturbance(nodes: Iterable[Node], began: float, ended: float, *, emulated: bool = False) -> str | None:
    """Why the times of a run with steps from `began` to `ended` cannot be compared, as a clause; None if they can.

    Runs with more workers than cores disturb themselves, which does not count here. Emulated compute sleeps, so that
    other programs disturb it only if processes wait for a core.
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
    """The same for nodes that share a machine: each has counted its own processes, and each also the whole machine."""
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
    """The warning at the end of a training."""
    return f"The machine was busy: {why} during training; do not compare these times."


def used_by_others(used: float, cores: int, verb: str = "used") -> str:
    return f"other processes {verb} {used:.1f} of {cores} core{'s' * (cores > 1)}"


Value = Callable[[NodeSample, Node], float | None]


def _machine_cpu(sample: NodeSample, node: Node) -> float | None:
    """Old samples, without `machine_cpu`, have it in `cpu`, except in the lab."""
    return sample.cpu if sample.machine_cpu is None and not node.own_processes else sample.machine_cpu


def _own_cpu(sample: NodeSample, node: Node) -> float | None:
    return sample.cpu if node.own_processes else sample.run_cpu


def _first(nodes: Sequence[Node], began: float, ended: float, value: Value) -> float | None:
    return next((mean for node in nodes if (mean := _mean(node, began, ended, value)) is not None), None)


def _mean(node: Node, began: float, ended: float, value: Value) -> float | None:
    """The mean over all intervals between samples whose middle is in the steps; None if they are too short."""
    total = seconds = 0.0
    for before, sample in zip(node.samples, node.samples[1:], strict=False):
        known, gap = value(sample, node), sample.time - before.time
        if known is not None and gap > 0 and began <= (before.time + sample.time) / 2 <= ended:
            total, seconds = total + known * gap, seconds + gap
    return total / seconds if seconds >= ENOUGH else None

"""Runs that predictions are made from: what they ran, on which machines, and how long their steps took."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from paceline.analysis.runs import LeftOut, Run, read_run
from paceline.analysis.statistics import Interval, median
from paceline.errors import UsageError
from paceline.lab.plan import burst_bytes
from paceline.layout import Grid
from paceline.options import PROBLEM
from paceline.predict.anatomy import Anatomy, anatomy_of
from paceline.predict.cluster import Cluster, Machine, payload
from paceline.predict.noise import block_bootstrap
from paceline.predict.steps import Array
from paceline.run.folder import find_folders
from paceline.run.records import Lab, Step
from paceline.spec import FIELDS, OWN, RunSpec
from paceline.strategies.overlap import TRIED, WARM_UP
from paceline.strict_json import build

MOST_WAITED = 0.6  # part of the time in which a process of a lab may wait for a core
LEAST_HIDDEN = 0.03  # part of a step: less hidden communication tells nothing about how it slows computing down
FEWEST_STEPS = 10  # that count
FEWEST_ROUNDS = 5  # of an update of each worker, where workers do not wait for each other
SHORTEST = TRIED + FEWEST_STEPS  # steps of a run that tries out overlap
# Fields of env.json that must be the same, because they decide about speed.
SAME = ("processor", "cores", "python", "torch", "platform")
# Options that must be the same, because they decide about what is computed.
ALIKE = [
    "accumulate",
    *(name for name, made in FIELDS.items() if made.metadata["affects"] == PROBLEM and name not in OWN),
]


@dataclass(frozen=True)
class Probe:
    """A completed run, with its options as they were resolved."""

    run: Run
    spec: RunSpec

    @property
    def name(self) -> str:
        return self.run.folder.name

    @property
    def workers(self) -> int:
        return self.run.summary.workers

    @property
    def servers(self) -> int:
        return self.run.summary.servers

    @property
    def options(self) -> dict[str, Any]:
        """All of them; `overlap` is what the run has chosen."""
        chosen = {None: self.spec.overlap, True: "on", False: "off"}[self.run.summary.overlap]
        return options_of(self.spec) | {"overlap": chosen}

    @property
    def samples(self) -> int:
        """Of a worker's batch."""
        return self.run.summary.batch_size

    @cached_property
    def first(self) -> int:
        """The first step that counts: after warm-up, and after the steps that try out overlap. Where steps come in
        bursts, the rule for warm-up would choose among these; then it is two rounds, or a tenth of the steps.
        """
        if self.run.method.asynchronous:
            return max(2 * self.run.at_once, len(self.run.steps[0]) // 10)
        return max(self.run.warm_up, TRIED if self._tries_overlap else 0)

    @property
    def _tries_overlap(self) -> bool:
        return self.workers > 1 and "overlap" in self.run.method.names and self.spec.overlap == "auto"

    @cached_property
    def times(self) -> Array:
        """Seconds of steps of whole batches; means of rounds of steps that are timed together."""
        rounds = [steps for steps in self.run.rounds(self.run.steps[0][self.first :]) if steps]
        samples = [sum(step.samples for step in steps) for steps in rounds]
        return np.array([sum(step.seconds for step in steps) / len(steps)
                         for steps, count in zip(rounds, samples, strict=True) if count == max(samples)])  # fmt: skip

    @cached_property
    def seconds(self) -> Interval:
        """The median time of a step; where workers do not wait for each other, and steps come in bursts, the mean."""
        if not self.run.method.asynchronous:
            return median([self.times])
        low, high = np.quantile(block_bootstrap(self.times, centre=np.mean), [0.025, 0.975])
        return Interval(float(np.mean(self.times)), float(low), float(high))

    @property
    def centre(self) -> Callable[..., Any]:
        """What is meant by the time of a step: NumPy's median or mean."""
        return np.mean if self.run.method.asynchronous else np.median

    @cached_property
    def compute(self) -> Array:
        """Seconds of forward and backward: a row for each step that counts, a column for each worker."""
        skip = self.first // (self.run.at_once if self.run.method.asynchronous else 1)
        columns = [_computed(self.run.steps[rank][skip:]) for rank in range(self.servers, self.run.summary.ranks)]
        count = min(map(len, columns))
        return np.array([column[len(column) - count :] for column in columns]).T

    @property
    def compute_seconds(self) -> float:
        """The mean compute of a step of the whole model, on a device of speed 1; single late steps do not count in
        full. Workers that have stages of a model share it.
        """
        whole = self.compute * self.speeds
        return float(np.minimum(whole, 3 * np.median(whole, axis=0)).mean()) * self.grid.stages

    @property
    def slowdown(self) -> float | None:
        """How much longer computing takes while this run communicates, for each second of communication that it hides:
        from the steps in which overlap was tried out, with it and without it in turn. None if there are no such steps.
        """
        alone = self.grid.replicas == 1 or self.run.summary.overlap is None  # nothing was tried
        if not self._tries_overlap or alone or self.run.emulated or len(self.run.steps[0]) < TRIED:
            return None
        tried = [self.run.steps[rank][WARM_UP:TRIED] for rank in self.run.steps]
        apart, overlapped = (
            [_medians(steps[(WARM_UP + first) % 2 :: 2]) for steps in tried] for first in (0, 1)
        )  # those with an odd number overlap
        computing, waiting = np.mean(overlapped, axis=0) - np.mean(apart, axis=0)
        hidden, step = -waiting, np.mean(apart, axis=0).sum()
        return max(0.0, float(computing / hidden)) if hidden > LEAST_HIDDEN * step else None

    @property
    def grid(self) -> Grid:
        return self.run.method.grid(options_of(self.spec))

    @property
    def tells_compute(self) -> bool:
        """Whether its spans forward and backward are compute alone: those of shards have messages in them."""
        return self.grid.shards == 1

    @cached_property
    def cluster(self) -> Cluster:
        """The machines that it ran on: nodes of a lab, which share a host, or this one."""
        cores = float(self.run.environment.get("cores") or 1)
        if lab := self.run.environment.get("lab"):
            return _of_lab(build(Lab, lab, extra=True), cores, emulated=self.run.emulated)
        return Cluster((Machine(1e12, 1e12),), cores=cores)

    @cached_property
    def places(self) -> tuple[int, ...]:
        """The node of each rank."""
        hosts = [row["host"] for row in sorted(self.run.environment["ranks"], key=lambda row: int(row["rank"]))]
        names = list(dict.fromkeys(hosts))
        return tuple(names.index(host) for host in hosts)

    @property
    def speeds(self) -> list[float]:
        """Of each worker's device."""
        return [self.cluster.nodes[place].speed for place in self.places[self.servers :]]


def _computed(steps: Sequence[Step]) -> list[float]:
    whole = max((step.own or 0 for step in steps), default=0)
    return [sum(step.spans.get(name, 0.0) for name in ("forward", "backward"))
            for step in steps if (step.own or 0) == whole]  # fmt: skip


def _medians(steps: Sequence[Step]) -> tuple[float, float]:
    """Of computing, and of waiting for communication."""
    computing = [sum(step.spans.get(name, 0.0) for name in ("forward", "backward")) for step in steps]
    return float(np.median(computing)), float(np.median([step.spans.get("wait", 0.0) for step in steps]))


def _of_lab(lab: Lab, cores: float, *, emulated: bool) -> Cluster:
    """Its nodes share the cores of one machine. Speed and noise are those of emulated devices."""
    part = payload(lab.mtu) / 8
    nodes = tuple(
        Machine(
            node.up * part,
            node.down * part,
            (node.speed or 1.0) if emulated else 1.0,
            node.noise or None,
            node.rack or 0,
            burst=burst_bytes(round(min(node.up, node.down)), lab.mtu) * part * 8,
        )
        for node in lab.nodes
    )
    racks = tuple((rack["up"] * part, rack["down"] * part) for rack in lab.racks)
    return Cluster(nodes, racks, cores)


def options_of(spec: RunSpec) -> dict[str, Any]:
    """All options; `averaging` is what the strategy is named after, if it is."""
    found = {name: getattr(spec, name) for name in FIELDS}
    return found | {"averaging": spec.method.averaging or found["averaging"], "servers": spec.method.servers(found)}


def read_probes(paths: Sequence[Path]) -> list[Probe]:
    """The completed runs in these folders, which must be comparable. Raises UsageError."""
    folders = find_folders(paths)
    if not folders:
        raise UsageError(f"there is no run folder in {', '.join(map(str, paths))}: give the folders of short runs")
    found = []
    for folder in folders:
        run = read_run(folder)
        if isinstance(run, LeftOut):
            raise UsageError(f"{folder} cannot be used: {run.why}")
        found.append(checked_probe(run))
    check_alike(found)
    return found


def usable_probes(folders: Sequence[Path]) -> tuple[list[Probe], list[str]]:
    """Those of these runs that can be used, and why others cannot."""
    found, why = [], []
    for folder in folders:
        try:
            found += read_probes([folder])
        except UsageError as error:
            why.append(str(error))
    check_alike(found)
    return found, why


def probe_of(run: Run) -> Probe:
    """Without checking whether its times can be used."""
    return Probe(run, build(RunSpec, {name: value for name, value in run.spec.items() if name in FIELDS}, extra=True))


def telling(probes: Sequence[Probe]) -> list[Probe]:
    """Those that tell how long computing takes."""
    found = [probe for probe in probes if probe.tells_compute]
    if not found:
        raise UsageError(
            f"{probes[0].name} does not tell how long computing takes: its workers exchange messages in between; add a "
            "run with --strategy sequential"
        )
    return found


def checked_probe(run: Run) -> Probe:
    """Raises UsageError if its times cannot be used."""
    if not run.method.simulation:
        raise UsageError(f"{run.folder} cannot be used: steps of {run.summary.strategy} cannot be predicted")
    probe = probe_of(run)
    counted = max(0, len(run.steps[0]) - probe.first)
    hosts = {row["host"] for row in run.environment["ranks"]}
    lab = run.environment.get("lab") or {}
    for wrong, why in (
        (counted < FEWEST_STEPS, f"{counted} steps after warm-up and after trying out overlap (the first {TRIED}); at "
                                 f"least {FEWEST_STEPS} are needed: run it with more --steps"),
        (run.disturbed, f"{run.disturbed} while it ran; repeat it on an idle machine"),
        (_rounds(probe) < FEWEST_ROUNDS, f"{_rounds(probe)} rounds of an update of each worker after warm-up; at least "
                                         f"{FEWEST_ROUNDS} are needed: run it with more --steps"),
        (lab.get("flags"), f"its lab was beyond what the machine can do: {' '.join(lab.get('flags') or ())}"),
        (lab and _waited(run) > MOST_WAITED, f"its lab was beyond what this machine can do: a process waited for a "
                                             f"core in {100 * _waited(run):.0f} % of the time, so that times are not "
                                             "those of its links; use slower links, larger buckets, or fewer workers"),
        (len(hosts) > 1 and not lab, f"it ran on {len(hosts)} machines whose links are not known; use runs on one "
                                     "machine, or in a lab"),
    ):  # fmt: skip
        if wrong:
            raise UsageError(f"{run.folder} cannot be used: {why}")
    return probe


def _rounds(probe: Probe) -> int:
    """That count, of all workers."""
    return min(len(probe.times), len(probe.compute))


def _waited(run: Run) -> float:
    """The part of the time, during the steps, in which some process of the machine waited for a core."""
    ended = max(steps[-1].time for steps in run.steps.values() if steps)
    for node in run.nodes.values():
        inside = [each.pressure for each in node.samples if run.began <= each.time <= ended]
        if known := [each for each in inside if each is not None]:
            return float(np.mean(known))
    return 0.0


def check_alike(probes: Sequence[Probe]) -> None:
    for first, probe in pairwise(probes):
        if first.run.emulated != probe.run.emulated:
            raise UsageError(f"{first.name} has {first.spec.compute} compute, {probe.name} {probe.spec.compute}: "
                             "emulated and real runs cannot be mixed")  # fmt: skip
        for name in ALIKE:
            one, other = getattr(first.spec, name), getattr(probe.spec, name)
            if one != other:
                raise UsageError(f"{first.name} has {name} {one}, {probe.name} has {other}: predictions are made from "
                                 "runs of one model and data set")  # fmt: skip
        for name in SAME:
            one, other = first.run.environment.get(name), probe.run.environment.get(name)
            if one != other:
                raise UsageError(f"{first.name} ran with {name} {one}, {probe.name} with {other}: use runs of one "
                                 "machine and one version")  # fmt: skip


def shape_of(probe: Probe) -> Anatomy:
    """The anatomy of the probes' model, as it was sent."""
    return anatomy_of(probe.spec).shrunk(probe.spec.shrink)

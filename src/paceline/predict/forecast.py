"""Predictions for settings that nobody has run: step time, throughput, efficiency and traffic, with intervals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from paceline.data import table as datasets
from paceline.errors import UsageError
from paceline.options import DIVISION, PROBLEM
from paceline.predict.anatomy import bucket_bytes
from paceline.predict.calibration import SHIPPED, Calibration, check_disjoint
from paceline.predict.cluster import Cluster, Machine, spread
from paceline.predict.fit import DRAWN, Fit, channel_of, compute_line, drawn_prior, simulation_of, typical_step
from paceline.predict.limits import Limit, limit_of
from paceline.predict.memory import MemoryModel, fit_memory
from paceline.predict.network import Costs
from paceline.predict.noise import Draws, Machines
from paceline.predict.partitioned import bytes_of_parts
from paceline.predict.probes import Probe, check_alike, options_of, telling
from paceline.predict.ranges import Range
from paceline.predict.steps import Array, Case
from paceline.predict.traffic import averaged_bytes
from paceline.server.layout import cost as served_cost
from paceline.spec import FIELDS, OWN, RunSpec, resolve
from paceline.strategies.table import TABLE, default

DRAWS = 1000
NOISE_DRAWS = 50  # of the step whose limit is looked for
MOST_WORKERS = 10_240
ALONE_ERROR = 0.005  # of the time of one process, which was measured
CROWD_ERROR = 0.1  # of real workers that share a machine, if no probe had as many: memory and caches are shared, too
MANY, FEW = 16, 3  # with more ranks than this, only so many of the drawn sets of costs are simulated
# Options of a probe that do not hold for other settings.
OWNED = ("strategy", "workers", "global_batch", "transport", "threads", "read")


@dataclass(frozen=True)
class Forecast:
    """A setting, and what is expected of it. `beyond` says in which ways it goes beyond the probes."""

    strategy: str
    workers: int
    global_batch: int
    step_seconds: Range
    samples_per_second: Range
    efficiency: Range  # throughput ÷ workers, as a part of one process's
    bytes_sent: int  # by the rank that sends most, for an update
    memory: Range  # bytes, of the rank that needs most
    memory_estimated: bool  # of a device, from its tensors: no run had the memory of a real training
    beyond: tuple[str, ...]
    limit: str = ""  # what limits it: see `limits`
    limit_seconds: float = 0.0  # of a step that would be saved without that


@dataclass(frozen=True)
class Simulated:
    """A setting on its machines; it is simulated when its times are asked for. `known` is the fit as it holds there,
    `compute` the seconds that a worker of speed 1 computes in a step, and `doubt` a further relative error.
    """

    spec: RunSpec
    cluster: Cluster
    places: tuple[int, ...]
    known: Fit
    compute: float
    doubt: float = 0.0
    seed: int = 0

    @property
    def case(self) -> Case:
        return setting_case(self.known, self.spec, self.cluster, self.places, self.compute, self.seed)

    @property
    def typical(self) -> float:
        """Seconds of a step with the most likely costs: a tenth of the work of `drawn`."""
        return typical_step(self.case)

    @cached_property
    def drawn(self) -> Array:
        """Draws of the seconds of a step, of which the first is the most likely."""
        return _drawn(self.known, self.spec, self.cluster, self.places, self.seed, self.compute, self.doubt)

    def limit(self) -> Limit:
        """What limits its step."""
        return limit_of(self.case, self.compute)


@dataclass(frozen=True)
class Predictor:
    """Predicts settings from probes; how one process does is the scale of their efficiency."""

    fit: Fit
    probes: Sequence[Probe]
    memory: MemoryModel
    seed: int = 0
    calibration: Calibration = SHIPPED

    @classmethod
    def of(cls, fit: Fit, probes: Sequence[Probe], seed: int = 0, calibration: Calibration = SHIPPED) -> Predictor:
        """Imports torch, to count the tensors of the model."""
        return cls(fit, probes, fit_memory([] if fit.device else probes, probes[0].spec), seed, calibration)

    def simulate(self, strategy: str, workers: int, cluster: Cluster | None, given: Mapping[str, Any]) -> Simulated:
        """Without a cluster, it is the one of the probes. Raises UsageError if the setting is not possible."""
        fit, probes = self.fit, self.probes
        spec = setting_spec(probes, strategy, workers, given)
        here = cluster or _grown(probes, spec.ranks)
        check_cores(fit, probes, spec, here)
        own = cluster is None and not fit.emulated  # cores and threads are those of a probe
        seconds = shared_compute(probes, spec) if own else fit.compute_seconds(spec.batch_size)
        places = spread(spec.ranks, len(here.nodes))
        known = replace(fit, slowdown=0.0) if own else fit  # it is a part of what was measured there
        doubt = crowd_error(probes, spec) if own else 0.0
        # Errors of one process are others than those of several.
        return Simulated(spec, here, places, known, seconds, doubt, self.seed + (spec.ranks == 1))

    def alone(self, given: Mapping[str, Any]) -> Array:
        """Samples per second of one process."""
        fit, spec = self.fit, setting_spec(self.probes, default(1).name, 1, given)
        one = Cluster((Machine(1.0, 1.0),)) if fit.device else self.probes[0].cluster
        seconds = fit.compute_seconds(spec.batch_size)
        return spec.update_batch / _drawn(fit, spec, one, (0,), self.seed + 1, seconds)

    def forecast(self, found: Simulated, alone: Array) -> Forecast:
        spec, drawn, factor = found.spec, found.drawn, self.calibration.factor
        limit, batch, workers = found.limit(), spec.update_batch, spec.workers or 1
        return Forecast(
            spec.strategy or "",
            workers,
            batch,
            Range.of(drawn, factor),
            Range.of(batch / drawn, factor),
            Range.of(batch / drawn / workers / alone, factor),
            self.bytes_sent(spec),
            Range(*self.memory.predict(spec)),
            self.memory.estimated,
            beyond(self.fit, self.probes, spec, found.cluster),
            limit.cause,
            limit.seconds,
        )

    def bytes_sent(self, spec: RunSpec) -> int:
        """By the rank that sends most, in an update."""
        return _bytes(self.fit, spec)


def forecasts(
    fit: Fit,
    probes: Sequence[Probe],
    strategies: Sequence[str],
    workers: Sequence[int],
    cluster: Cluster | None,
    given: Mapping[str, Any],
    seed: int = 0,
    left_out: list[str] | None = None,
    calibration: Calibration = SHIPPED,
) -> Iterator[Forecast]:
    """Predict each strategy at each number of workers. Without a cluster, it is the one of the probes.

    If there is a list `left_out`, it gets the reasons why settings are not possible, which are otherwise raised.
    """
    predictor = Predictor.of(fit, probes, seed, calibration)
    alone = predictor.alone(given)
    for strategy in strategies:
        for count in workers:
            if TABLE[strategy].single and count > 1:
                continue
            try:
                yield predictor.forecast(predictor.simulate(strategy, count, cluster, given), alone)
            except UsageError as error:
                if left_out is None:
                    raise
                left_out.append(f"{strategy} with {count:,} workers: {error}")


def setting_case(
    fit: Fit, spec: RunSpec, cluster: Cluster, places: tuple[int, ...], seconds: float, seed: int = 0
) -> Case:
    """A setting with the most likely costs, and a few draws of its noise."""
    options = _options(fit, spec)
    machines = Machines.of(cluster, places[options["servers"] :])
    compute = Draws(fit.noise, seconds, machines, NOISE_DRAWS, seed)
    costs = fit.channel(channel_of(options))
    return Case(options, fit.anatomy, cluster, places, compute, costs, fit.overhead, fit.slowdown)


def _options(fit: Fit, spec: RunSpec) -> dict[str, Any]:
    """All of them, with what `--overlap auto` has chosen in the probes."""
    options = options_of(spec)
    if options["overlap"] == "auto" and fit.overlap is False:
        options["overlap"] = "off"
    return options


@dataclass(frozen=True)
class Scored:
    """A run that was measured, beside its prediction."""

    name: str
    strategy: str
    workers: int
    batch: int  # of an update
    measured: float
    predicted: Range

    @property
    def error(self) -> float:
        """Relative."""
        return self.predicted.value / self.measured - 1

    @property
    def inside(self) -> bool:
        return self.predicted.low <= self.measured <= self.predicted.high


def score(
    fit: Fit, probes: Sequence[Probe], held: Sequence[Probe], seed: int = 0, calibration: Calibration = SHIPPED
) -> list[Scored]:
    """Predictions of runs on their own machines. Raises UsageError if the fit or the calibration has seen them."""
    check_alike([*probes, *held])
    check_disjoint(probes, calibration.runs, held)
    found, fit = [], replace(fit, slowdown=0.0)  # it is a part of what was measured on these machines
    for run in held:
        doubt = 0.0 if fit.emulated else crowd_error(probes, run.spec)
        drawn = _drawn(fit, run.spec, run.cluster, run.places, seed, _compute_of(fit, probes, run), doubt)
        found.append(Scored(run.name, run.run.summary.strategy, run.workers, run.spec.update_batch, run.seconds.value,
                            Range.of(drawn, calibration.factor)))  # fmt: skip
    return found


def unsupported(probes: Sequence[Probe], strategy: str, given: Mapping[str, Any]) -> str | None:
    """Why a strategy cannot have the options of the probes; None if it can."""
    own = [probe.options for probe in probes if probe.run.summary.strategy == strategy]
    (few,) = TABLE[strategy].replica_size(own, 2).values() or (2,)
    try:
        setting_spec(probes, strategy, few, given)
    except UsageError as error:
        return str(error)
    return None


def setting_spec(probes: Sequence[Probe], strategy: str, workers: int, given: Mapping[str, Any]) -> RunSpec:
    """The options of the probes, those with this strategy first, with another strategy and number of workers."""
    method = TABLE[strategy]
    slow = {name for name, made in FIELDS.items() if made.metadata["affects"] in (PROBLEM, DIVISION)}
    other = {*OWNED, *(FIELDS.keys() - slow), *(OWN.keys() - set(method.names))}
    kept: dict[str, Any] = {}
    for probe in sorted(probes, key=lambda probe: (probe.run.summary.strategy == strategy, probe.workers)):
        same = probe.run.summary.strategy == strategy
        # What another strategy has chosen for itself is chosen anew.
        chosen = [name for name in OWN if not same and FIELDS[name].default is None]
        kept |= {name: value for name, value in probe.spec.values().items() if name not in (*other, *chosen)}
    # Checked with few workers: a data set may be too small for a batch of many, which `beyond` says.
    few = 1 if method.single else min(workers, 2)
    own = [probe for probe in probes if probe.run.summary.strategy == strategy]
    if parts := method.replica_size([probe.options for probe in own], workers):
        (few,) = parts.values()  # one replica
    values = {"strategy": strategy, "workers": few, **parts, **given}
    spec = replace(resolve(("the probes", kept), ("prediction", values), here=False).spec, workers=workers)
    method.check(spec)
    return spec


def _grown(probes: Sequence[Probe], ranks: int) -> Cluster:
    """The machines of the probes, and more like them if they are alike."""
    largest = max((probe.cluster for probe in probes), key=lambda cluster: len(cluster.nodes))
    if ranks > len(largest.nodes) and any(probe.run.environment.get("lab") for probe in probes):
        first = largest.nodes[0]
        if any(node != first for node in largest.nodes) or largest.racks:
            raise UsageError(
                f"{ranks} ranks on {len(largest.nodes)} nodes that differ: describe the others with --lab FILE"
            )
        return replace(largest, nodes=(first,) * ranks)
    return largest


def _compute_of(fit: Fit, probes: Sequence[Probe], run: Probe) -> float:
    return fit.compute_seconds(run.samples) if fit.emulated else shared_compute(probes, run.spec)


def shared_compute(probes: Sequence[Probe], spec: RunSpec) -> float:
    """Seconds of compute on the machine of the probes, whose cores workers share: as with the nearest number."""
    probes = telling(probes)
    nearest = min((probe.workers for probe in probes), key=lambda workers: abs(workers - (spec.workers or 1)))
    line, _ = compute_line([probe for probe in probes if probe.workers == nearest])
    return line.seconds(spec.batch_size)


def crowd_error(probes: Sequence[Probe], spec: RunSpec) -> float:
    """The relative error of a step of workers that share a machine, if compute with so many was not measured."""
    return 0.0 if spec.workers in {probe.workers for probe in probes} else CROWD_ERROR


def _drawn(
    fit: Fit, spec: RunSpec, cluster: Cluster, places: tuple[int, ...], seed: int, seconds: float, doubt: float = 0.0
) -> Array:
    """Step times, one for each draw of what is not known: costs, compute, noise, and the error of the simulation, to
    which another one (`doubt`) may be added. The first of them is the most likely one.
    """
    dice, options = np.random.default_rng(seed), _options(fit, spec)
    channel, workers = channel_of(options), Machines.of(cluster, places[options["servers"] :])
    others = fit.drawn.get(channel, _prior_draws(channel, dice))[: FEW if spec.ranks > MANY else None]
    each = DRAWS // (1 + len(others))
    compute = Draws(fit.noise, seconds, workers, each, seed)
    cases = [Case(options, fit.anatomy, cluster, places, compute, costs, fit.overhead, fit.slowdown)
             for costs in [fit.channel(channel), *others]]  # fmt: skip
    steps = [simulation_of(spec.strategy or "")(case) for case in cases]
    whole = np.concatenate(steps)
    error = np.hypot(fit.error(channel, options["strategy"]), doubt) if spec.ranks > 1 else ALONE_ERROR
    # How far compute is wrong is the same in all settings of a prediction.
    shift = np.exp(np.random.default_rng(0).standard_normal(len(whole)) * fit.compute_error) - 1
    drawn: Array = whole * np.exp(dice.standard_t(8, len(whole)) * error) + shift * np.minimum(seconds, whole)
    drawn[0] = np.median(steps[0])
    return drawn


def _prior_draws(channel: str, dice: np.random.Generator) -> list[Costs]:
    """What is assumed of a channel without probes, as far as it may be wrong."""
    return [drawn_prior(channel, dice) for _ in range(DRAWN)]


def _bytes(fit: Fit, spec: RunSpec) -> int:
    """What the rank that sends most sends for an update, on average."""
    options, anatomy, workers = options_of(spec), fit.anatomy, spec.workers or 1
    if spec.ranks == 1:
        return 0
    if options["servers"]:
        each = 1 if spec.method.updates_by_worker else workers
        return max(served_cost(each, anatomy.on_servers(options)).bytes_sent)
    if spec.method.part:
        return bytes_of_parts(options, anatomy, spec.grid)
    lengths: tuple[int, ...] = (sum(anatomy.sizes),)
    if spec.method.averaging:
        lengths, _ = anatomy.buckets(bucket_bytes(options))
    sent = averaged_bytes(options["averaging"], workers, lengths, anatomy.itemsize)
    return round(sent / spec.method.round(options))


def check_cores(fit: Fit, probes: Sequence[Probe], spec: RunSpec, cluster: Cluster) -> None:
    """Refuse real workers that would share cores in a way that no probe has measured."""
    workers, hosts = spec.workers or 1, len({node.host for node in cluster.nodes})
    if fit.emulated or workers == 1 or workers in {probe.workers for probe in probes if hosts == 1}:
        return
    if (hosts == 1 and workers > cluster.cores) or (hosts > 1 and workers > len(cluster.nodes)):
        there = f"{cluster.cores:g} cores" if hosts == 1 else f"{len(cluster.nodes)} machines"
        raise UsageError(
            f"{workers} workers on {there} would share cores, which is not predicted: give --link or --lab with a "
            "machine for each worker, or fewer --workers"
        )


def beyond(fit: Fit, probes: Sequence[Probe], spec: RunSpec, cluster: Cluster) -> tuple[str, ...]:
    """In which ways a setting goes beyond the probes."""
    found, options = [], options_of(spec)
    most = max(probe.workers for probe in probes)
    if fit.device:
        found.append(fit.device)
    if spec.ranks > 1 and channel_of(options) not in fit.costs:
        what = "these servers were" if options["servers"] else "this way to communicate was"
        found.append(f"{what} not measured")
    if (spec.workers or 1) > 4 * most:
        found.append(f"more than 4 times the {most} workers of the probes")
    if cluster.nodes[0].up not in {node.up for probe in probes for node in probe.cluster.nodes} and spec.ranks > 1:
        found.append("links that were not measured")
    own = len(cluster.nodes) == 1 and not fit.emulated
    if own and spec.workers not in {probe.workers for probe in probes}:
        found.append("compute with so many workers on one machine was not measured")
    if spec.batch_size not in {probe.samples for probe in probes}:
        found.append("a batch size that was not measured")
    data = datasets.describe(spec.data)
    if data and spec.update_batch > data.train:
        found.append(f"a global batch of {spec.update_batch:,} is larger than the data set")
    return tuple(found)

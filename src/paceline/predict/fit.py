"""Fits what messages and steps cost on these machines to the step times of probes."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from scipy.optimize import least_squares

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.errors import UsageError
from paceline.predict.anatomy import Anatomy
from paceline.predict.network import Costs
from paceline.predict.noise import Draws, Machines, Noise, block_bootstrap, measure
from paceline.predict.probes import Probe, shape_of, telling
from paceline.predict.steps import Array, Case
from paceline.strategies.table import TABLE

# What is assumed before anything is measured, and by which factor it may be wrong (one standard deviation).
PRIOR = Costs(message=6e-5, byte=5e-10, add=1.5e-10, latency=2e-4, update=4e-10)
NATIVE_MESSAGE = 3e-5  # of a transport's own collective, which is not written in Python
# Of parameter servers: answers, and what confirms that data has arrived, wait behind other data in the queue of a link.
SERVED = replace(PRIOR, queue=25_000, unfairness=0.35, load=1.03)
PRIOR_FACTOR = {"message": 2.0, "byte": 2.0, "latency": 2.0, "load": 1.04}
SERVED_FACTOR = {"message": 2.0, "byte": 2.0, "queue": 3.0, "unfairness": 1.3, "load": 1.02}
MOST_TRIES = 4  # of the fit: what probes tell about costs is soon known, and each try simulates all of them
STEP = 0.2  # of the fit's derivatives, in standard deviations of the prior
DRAWN = 9  # sets of costs that agree with the probes
# The relative error of the simulation that no probe can show: see docs/prediction.md.
LEAST_ERROR = 0.02
FIT_ERROR = 0.01  # up to which the simulation is fitted to probes
# Both are so many times larger where workers do not wait for each other, and where those that are far ahead wait for
# whoever happens to have the smallest part of the server's link.
UNSTEADY, BOUNDED = 2.0, 4.0
SERVERS, STAGES = "servers", "stages"  # channels that are not collectives


@dataclass(frozen=True)
class Fit:
    """What is known from probes.

    `per_sample` and `fixed` are the seconds of compute at speed 1: fixed + samples × per_sample. `costs` are by
    channel: the name of a collective, SERVERS or STAGES; so are `errors`, the relative errors of predicted steps
    (standard deviations).
    """

    anatomy: Anatomy
    per_sample: float
    fixed: float
    compute_error: float
    noise: Noise
    overhead: float
    costs: Mapping[str, Costs]
    drawn: Mapping[str, Sequence[Costs]]  # costs that agree with the probes as well, as likely as they are
    errors: Mapping[str, float]
    emulated: bool
    overlap: bool | None = None  # what `auto` has chosen
    slowdown: float = 0.0  # of computing while a rank communicates
    device: str = ""  # of compute that was not measured: how it is known
    least: float = 0.0  # seconds for a sample, of the most efficient batch: fixed is negative if that is a small one

    def compute_seconds(self, samples: int) -> float:
        return Line(self.per_sample, self.fixed, self.least).seconds(samples)

    def channel(self, name: str) -> Costs:
        """The costs of a channel, or what is assumed of it."""
        return self.costs.get(name) or prior_of(name)

    def error(self, channel: str, strategy: str) -> float:
        """The relative error of a predicted step (standard deviation). A channel without probes has the largest."""
        known = self.errors.get(channel, max(self.errors.values(), default=LEAST_ERROR))
        return known * error_factor(strategy)


def fit_probes(probes: Sequence[Probe], draws: int = 200) -> Fit:
    """Raises UsageError if the probes do not tell enough."""
    line, doubt = compute_line(_whole(probes) if probes[0].run.emulated else _least(probes))
    anatomy, noise = shape_of(probes[0]), _noise(probes)
    start = Fit(anatomy, line.per_sample, line.fixed, doubt, noise, _overhead(probes), {}, {}, {},
                probes[0].run.emulated, least=line.least)  # fmt: skip
    channels: dict[str, list[Probe]] = {}
    for probe in probes:
        if probe.workers > 1 or probe.servers:
            channels.setdefault(channel_of(probe.options), []).append(probe)
    costs, drawn, errors = {}, {}, {}
    for name, own in channels.items():
        costs[name], drawn[name], left = _fit_channel(start, own, draws)
        errors[name] = float(np.sqrt(LEAST_ERROR**2 + np.sum(left**2) / max(1, len(left) - 1)))
    chosen = [probe.run.summary.overlap for probe in probes if probe.run.summary.overlap is not None]
    overlap = sum(chosen) * 2 >= len(chosen) if chosen else None
    slowdowns = [probe.slowdown for probe in probes if probe.slowdown is not None]
    alone = _least(probes)[0].workers == 1  # otherwise it is a part of the compute that was measured
    slowdown = min(1.0, float(np.median(slowdowns))) if slowdowns and alone else 0.0
    return replace(start, costs=costs, drawn=drawn, errors=errors, overlap=overlap, slowdown=slowdown)


def prior_of(channel: str) -> Costs:
    """What is assumed of a channel."""
    if channel == SERVERS:
        return SERVED
    collective = AVERAGINGS.get(channel)
    return replace(PRIOR, message=NATIVE_MESSAGE) if collective and not collective.cost(2, 1).exact else PRIOR


def drawn_prior(channel: str, dice: np.random.Generator) -> Costs:
    """What is assumed of a channel, as far as it may be wrong."""
    start = prior_of(channel)
    return replace(start, **{name: getattr(start, name) * factor ** dice.standard_normal()
                             for name, factor in fitted(channel).items()})  # fmt: skip


def fitted(channel: str) -> dict[str, float]:
    """The costs that are fitted to probes, and by which factors their priors may be wrong."""
    return SERVED_FACTOR if channel == SERVERS else PRIOR_FACTOR


def channel_of(options: Mapping[str, Any]) -> str:
    if options["servers"]:
        return SERVERS
    return STAGES if TABLE[options["strategy"]].grid(options).stages > 1 else str(options["averaging"])


def _least(probes: Sequence[Probe]) -> list[Probe]:
    """Those with the fewest workers, who disturb each other least."""
    probes = telling(probes)
    least = min(probe.workers for probe in probes)
    return [probe for probe in probes if probe.workers == least]


def _whole(probes: Sequence[Probe]) -> list[Probe]:
    """Those whose workers compute whole models, which emulated devices do equally fast with any number of workers."""
    return [probe for probe in probes if not probe.run.method.part] or telling(probes)


@dataclass(frozen=True)
class Line:
    """Seconds of compute for a batch, at speed 1. Where small batches are the more efficient ones, as they fit into
    caches, `fixed` is negative; still smaller ones are taken to be no more efficient.
    """

    per_sample: float
    fixed: float
    least: float = 0.0  # for a sample

    def seconds(self, samples: int) -> float:
        return max(self.fixed + samples * self.per_sample, samples * self.least)


def compute_line(probes: Sequence[Probe]) -> tuple[Line, float]:
    """How compute depends on the batch, with the relative error."""
    points = [(probe.samples, probe.compute_seconds) for probe in probes]
    errors = np.array([_relative_error(probe.compute.mean(axis=1)) for probe in probes])
    sizes = {samples for samples, _ in points}
    if len(sizes) == 1:
        weights = np.array([probe.compute.size for probe in probes], dtype=float)
        weights /= weights.sum()
        seconds = sum(weight * seconds / samples for weight, (samples, seconds) in zip(weights, points, strict=True))
        return Line(float(seconds), 0.0), float(np.sqrt(np.sum((weights * errors) ** 2)))
    batches, times = np.array(points).T
    error = float(errors.max())
    slope, intercept = np.polyfit(batches, times, 1)
    if slope <= 0:
        return Line(float(np.mean(times / batches)), 0.0), error
    return Line(float(slope), float(intercept), float(np.min(times / batches)) if intercept < 0 else 0.0), error


def _relative_error(times: Array, centre: Callable[..., Array] = np.median) -> float:
    """Of the median, or of the mean, by a block bootstrap."""
    return float(np.std(np.log(np.maximum(block_bootstrap(times, centre=centre), 1e-9))))


def _noise(probes: Sequence[Probe]) -> Noise:
    logs = []
    for probe in telling(probes):
        own = np.log(np.maximum(probe.compute, 1e-9)) + np.log(probe.speeds)
        # Ranks with different parts of a model do not tell how nodes differ.
        logs += np.hsplit(own, own.shape[1]) if probe.run.method.part else [own]
    return measure(logs)


def _overhead(probes: Sequence[Probe]) -> float:
    """The rest of a step of one process."""
    alone = [probe for probe in probes if probe.workers == 1 and not probe.servers]
    rest = [probe.seconds.value - float(np.median(probe.compute)) for probe in alone]
    return max(0.0, float(np.median(rest))) if rest else 0.0


def case_of(fit: Fit, probe: Probe, costs: Costs, draws: int, seed: int = 0) -> Case:
    """The probe itself, as a case to predict."""
    workers = probe.places[probe.servers :]
    # Real workers on one machine have fewer threads each than one alone.
    known = fit.emulated or not probe.tells_compute
    seconds = fit.compute_seconds(probe.samples) if known else probe.compute_seconds
    compute = Draws(fit.noise, seconds, Machines.of(probe.cluster, workers), draws, seed)
    return Case(probe.options, fit.anatomy, probe.cluster, probe.places, compute, costs, fit.overhead)


def error_factor(strategy: str) -> float:
    """By which factor errors of predicted steps are larger than those of synchronous ones."""
    method = TABLE[strategy]
    return (UNSTEADY if method.updates_by_worker else BOUNDED) if method.asynchronous else 1.0


def _fit_channel(fit: Fit, probes: Sequence[Probe], draws: int) -> tuple[Costs, list[Costs], Array]:
    """The costs, others that agree with the probes, and the relative errors that are left, as of synchronous steps."""
    channel = channel_of(probes[0].options)
    start, names = prior_of(channel), fitted(channel)
    prior, widths = np.log([getattr(start, name) for name in names]), np.log(list(names.values()))
    measured = np.log([probe.seconds.value for probe in probes])
    loose = np.array([error_factor(probe.run.summary.strategy) for probe in probes])
    doubts = np.hypot(FIT_ERROR * loose, [_relative_error(probe.times, probe.centre) for probe in probes])

    def costs(point: Array) -> Costs:
        """At a point in units of the prior's standard deviations. Each number is 1 at the prior: first moves of the fit
        are as long as the point is.
        """
        values = np.exp(prior + (point - 1) * widths).tolist()
        return replace(start, **dict(zip(names, values, strict=True)))

    @cache
    def at(point: tuple[float, ...]) -> Array:
        known = costs(np.array(point))
        found = [typical_step(case_of(fit, probe, known, draws)) for probe in probes]
        misfit: Array = (np.log(found) - measured) / doubts
        return np.concatenate([misfit, np.array(point) - 1])

    def errors(point: Array) -> Array:
        return at(tuple(point.tolist()))

    def slopes(point: Array) -> Array:
        """With steps of one size, because order changes where workers do not wait for each other."""
        steps = [errors(point + each) - errors(point) for each in STEP * np.eye(len(names))]
        return np.stack(steps, axis=1) / STEP

    solved = least_squares(errors, np.ones(len(names)), jac=slopes, max_nfev=MOST_TRIES)
    root = np.linalg.cholesky(np.linalg.inv(solved.jac.T @ solved.jac))
    others = solved.x + np.random.default_rng(0).standard_normal((DRAWN, len(names))) @ root.T
    return costs(solved.x), [costs(each) for each in others], solved.fun[: len(probes)] * doubts / loose


def typical_step(case: Case) -> float:
    """The median time of a step."""
    return float(np.median(simulation_of(case.options["strategy"])(case)))


def simulation_of(strategy: str) -> Callable[[Case], Array]:
    named = TABLE[strategy].simulation
    if not named:
        raise UsageError(f"steps of {strategy} cannot be predicted yet")
    module, function = named.split(":")
    found: Callable[[Case], Array] = getattr(importlib.import_module(module), function)
    return found

"""All that the page of a prediction shows: what was measured, what is predicted from it, and what limits it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.analysis.statistics import Interval
from paceline.predict.fit import Fit
from paceline.predict.forecast import Forecast
from paceline.predict.limit_map import LimitMap, can_be_mapped, columns, limit_map
from paceline.predict.probes import Probe


@dataclass(frozen=True)
class Measured:
    """A probe, with 95 % intervals. `efficiency` is relative to one process; None if none was measured."""

    name: str
    strategy: str
    workers: int
    step_seconds: Interval
    samples_per_second: Interval
    efficiency: Interval | None


@dataclass(frozen=True)
class Outlook:
    """`where` are the machines, in words; `own` says that they are those of the probes. `compute` is that of emulated
    runs, or empty. `left_out` says why strategies are not predicted.
    """

    model: str
    data: str
    where: str
    own: bool
    compute: str
    shrink: int
    measured: tuple[Measured, ...]
    forecasts: tuple[Forecast, ...]
    maps: tuple[LimitMap, ...]
    left_out: tuple[str, ...] = ()

    @property
    def best(self) -> Forecast:
        """The most samples per second."""
        return max(self.forecasts, key=lambda each: each.samples_per_second.value)


def outlook(
    fit: Fit,
    probes: Sequence[Probe],
    found: Sequence[Forecast],
    where: str,
    given: Mapping[str, Any],
    *,
    own: bool,
    left_out: Sequence[str] = (),
) -> Outlook:
    spec = probes[0].spec
    return Outlook(
        spec.model,
        spec.data,
        where,
        own,
        spec.compute if probes[0].run.emulated and not fit.device else "",
        spec.shrink,
        tuple(_measured(probes)),
        tuple(found),
        tuple(_maps(fit, probes, found, given)),
        tuple(left_out),
    )


def _maps(fit: Fit, probes: Sequence[Probe], found: Sequence[Forecast], given: Mapping[str, Any]) -> list[LimitMap]:
    """Of each strategy, the fastest first, as far as maps take little time."""
    fastest = sorted(found, key=lambda each: -each.samples_per_second.value)
    names = [name for name in dict.fromkeys(each.strategy for each in fastest) if can_be_mapped(name)]
    workers = columns(max(each.workers for each in found))
    maps = [limit_map(fit, probes, name, workers, given) for name in names]
    return [each for each in maps if each.cells]


def _measured(probes: Sequence[Probe]) -> list[Measured]:
    speeds = [_speed(probe) for probe in probes]
    alone = [speed.value for probe, speed in zip(probes, speeds, strict=True) if probe.run.summary.ranks == 1]
    found = []
    for probe, speed in zip(probes, speeds, strict=True):
        part = _scaled(speed, 1 / (sum(alone) / len(alone)) / probe.workers) if alone else None
        strategy = probe.run.summary.strategy
        found.append(Measured(probe.name, strategy, probe.workers, probe.seconds, speed, part))
    return sorted(found, key=lambda each: (each.strategy, each.workers, each.name))


def _speed(probe: Probe) -> Interval:
    """Samples per second."""
    batch, step = probe.spec.update_batch, probe.seconds
    return Interval(batch / step.value, batch / step.high, batch / step.low)


def _scaled(value: Interval, factor: float) -> Interval:
    return Interval(value.value * factor, value.low * factor, value.high * factor)

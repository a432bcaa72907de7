"""What limits a strategy over numbers of workers and speeds of links: one cause for each pair, without draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import ceil, log2
from typing import Any

from paceline.errors import UsageError
from paceline.predict.cluster import alike, spread
from paceline.predict.fit import Fit
from paceline.predict.forecast import beyond, setting_case, setting_spec
from paceline.predict.limits import Limit, limit_of, most_saved
from paceline.predict.probes import Probe
from paceline.strategies.table import TABLE

MOST_COLUMNS = 8
RATES = (1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 1e10, 3e10, 1e11)  # bit/s
FEW = 8  # workers of servers that are simulated for a map: each further one adds the same


@dataclass(frozen=True)
class Cell:
    """A number of workers, each on a machine of its own with a link of this rate, in bit/s."""

    workers: int
    rate: float
    limit: Limit
    beyond: tuple[str, ...]


@dataclass(frozen=True)
class LimitMap:
    """A strategy's cells."""

    strategy: str
    cells: tuple[Cell, ...]


def can_be_mapped(strategy: str) -> bool:
    """Steps of one process have no link; workers that do not wait for each other take too long to simulate so often."""
    return not TABLE[strategy].single and not TABLE[strategy].asynchronous


def columns(most: int) -> list[int]:
    """Powers of two from 1 up to the first that is at least `most`; of many, some."""
    last = max(1, ceil(log2(most)))
    stride = ceil((last + 1) / MOST_COLUMNS)
    return [2**power for power in sorted({0, *range(last, -1, -stride)})]


def limit_map(
    fit: Fit,
    probes: Sequence[Probe],
    strategy: str,
    workers: Sequence[int],
    given: Mapping[str, Any],
    rates: Sequence[float] = RATES,
) -> LimitMap:
    """For each number of workers that is possible, and each rate."""
    speed = 1.0 if fit.device else probes[0].cluster.nodes[0].speed

    @cache
    def simulated(count: int, rate: float) -> Limit:
        spec = setting_spec(probes, strategy, count, given)
        seconds, places = fit.compute_seconds(spec.batch_size), spread(spec.ranks, spec.ranks)
        case = setting_case(fit, spec, alike(spec.ranks, rate, speed), places, seconds)
        return limit_of(case, seconds, noise=False)

    cells = []
    for count in workers:
        with suppress(UsageError):  # such as more stages than layers
            spec = setting_spec(probes, strategy, count, given)
            for rate in rates:
                served = spec.ranks > count > FEW
                few = (simulated(FEW // 2, rate), simulated(FEW, rate)) if served else ()
                limit = _grown(count, *few) if few else simulated(count, rate)
                cells.append(Cell(count, rate, limit, beyond(fit, probes, spec, alike(spec.ranks, rate, speed))))
    return LimitMap(strategy, tuple(cells))


def _grown(workers: int, half: Limit, whole: Limit) -> Limit:
    """Of many workers, from those of FEW and half as many."""
    more = (workers - FEW) / (FEW - FEW // 2)
    return most_saved({cause: saved + more * (saved - half.saved[cause]) for cause, saved in whole.saved.items()})

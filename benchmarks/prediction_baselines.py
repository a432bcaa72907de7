"""Predictions of step times beside those of two published models, from the same probes and for the same held-out runs.

    python benchmarks/prediction_baselines.py SET...

Each SET is a folder with two folders of run folders: `probes`, with 1, 2 and 4 workers of each strategy, and `held`.

Ernest (Venkataraman et al., NSDI 2016):
    t = a + b · scale/machines + c · log(machines) + d · machines, by non-negative least squares
Pollux (Qiao et al., OSDI 2021):
    compute = a + b · batch;  sync = 0 for one worker, otherwise c + d · (workers - 2), with another c and d if all
    workers are on one node;  t = (compute^g + sync^g)^(1/g), 1 <= g <= 10, by L-BFGS-B

Both were made for a step whose work is divided over machines, and know nothing of messages: they are fitted to each
strategy on its own. With one batch size, Ernest's scale/machines is constant.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, minimize, nnls

from paceline.predict.fit import fit_probes
from paceline.predict.forecast import Scored, score
from paceline.predict.probes import Probe, usable_probes
from paceline.run.folder import find_folders

Array = NDArray[np.float64]
LEAST = 1e-8  # of a parameter, so that it can be divided by
STARTS = (1.001, 2.0, 5.0)  # of Pollux's exponent


@dataclass(frozen=True)
class Point:
    """A setting, and its step: seconds in all, and of compute. `batch` is that of a worker."""

    workers: int
    nodes: int
    batch: int
    seconds: float
    compute: float


Model = Callable[[Point], float]


def ernest(points: Sequence[Point]) -> Model:
    found, _ = nnls(np.array([_ernest_row(point) for point in points]), np.array([point.seconds for point in points]))
    return lambda point: float(_ernest_row(point) @ found)


def _ernest_row(point: Point) -> Array:
    return np.array([1.0, point.batch, np.log(point.workers), point.workers])


def pollux(points: Sequence[Point]) -> Model:
    """With the loss of their published program: the RMSLE of step and compute times, and two small penalties."""
    unit = float(np.mean([point.compute for point in points]))  # so that parameters are near 1
    batch = float(np.mean([point.batch for point in points]))
    steps, compute = (np.log([getattr(point, name) / unit for point in points]) for name in ("seconds", "compute"))

    def loss(values: Array) -> float:
        found = [_pollux_step(values, point, batch) for point in points]
        errors = [_rms(np.log([own[0] for own in found]) - steps), _rms(np.log([own[1] for own in found]) - compute)]
        (_, _, a_node, b_node, a_local, b_local, exponent) = values
        small = 1e-3 * (exponent - 1) ** 2 + 1e-2 * ((b_node / a_node) ** 2 + (b_local / a_local) ** 2)
        return float(sum(errors) + small)

    limits = _pollux_limits(points)
    tries = [minimize(loss, _start(limits, exponent), method="L-BFGS-B", bounds=limits) for exponent in STARTS]
    best = min(tries, key=lambda tried: float(tried.fun)).x
    return lambda point: _pollux_step(best, point, batch)[0] * unit


def _pollux_step(values: Array, point: Point, batch: float) -> tuple[float, float]:
    """Seconds of a step, and of its compute."""
    a_compute, b_compute, a_node, b_node, a_local, b_local, exponent = values
    compute = a_compute + b_compute * point.batch / batch
    if point.workers == 1:
        return compute, compute
    a, b = (a_node, b_node) if point.nodes > 1 else (a_local, b_local)
    sync = a + b * (point.workers - 2)
    return (compute**exponent + sync**exponent) ** (1 / exponent), compute


def _pollux_limits(points: Sequence[Point]) -> Bounds:
    """What no point tells anything about is fixed, as in their program: half of compute is constant, others are 0."""
    low, high = np.array([LEAST] * 6 + [1.0]), np.array([np.inf] * 6 + [10.0])
    if len({point.batch for point in points}) == 1:
        low[0] = high[0] = 0.5
    if not any(point.nodes > 1 for point in points):
        high[2:4] = LEAST
    if not any(point.nodes == 1 and point.workers > 1 for point in points):
        high[4:6] = LEAST
    if not any(point.workers > 2 for point in points):
        high[[3, 5]] = LEAST
    return Bounds(low, high)


def _start(limits: Bounds, exponent: float) -> Array:
    start: Array = np.clip([0.5, 0.5, 0.1, 0.01, 0.1, 0.01, exponent], limits.lb, limits.ub)
    return start


def _rms(errors: Array) -> float:
    return float(np.sqrt(np.mean(errors**2)))


MODELS = {"Ernest": ernest, "Pollux": pollux}


def point_of(probe: Probe) -> Point:
    """Of workers that do not wait for each other, a step is an update of each."""
    at_once = probe.workers if probe.run.method.updates_by_worker else 1
    nodes = len(set(probe.places[probe.servers :]))
    return Point(probe.workers, nodes, probe.samples, probe.seconds.value * at_once, probe.compute_seconds)


def kind_of(probe: Probe) -> tuple[str, int]:
    """What one model is fitted to: a strategy, with so many servers."""
    return probe.run.summary.strategy, probe.servers


def training_points(probes: Sequence[Probe], kind: tuple[str, int]) -> list[Point]:
    """The probes of a strategy; one process stands for one worker, if the strategy was not run with one."""
    own = [probe for probe in probes if kind_of(probe) == kind]
    if all(probe.workers > 1 for probe in own):
        own += [probe for probe in probes if probe.run.method.single]
    return [point_of(probe) for probe in own]


def errors_in(folder: Path) -> dict[str, list[float]]:
    """The errors for all runs of a set that can be used."""
    (probes, _), (held, _) = (usable_probes(find_folders([folder / name])) for name in ("probes", "held"))
    measured = {kind_of(probe) for probe in probes}
    scored = [run for run in held if kind_of(run) in measured]
    if len(scored) < len(held):
        print(f"{folder.name}: {len(held) - len(scored)} held-out runs are left out: no probe has their strategy")
    return errors_of(probes, scored, score(fit_probes(probes), probes, scored))


def errors_of(probes: Sequence[Probe], scored: Sequence[Probe], ours: Sequence[Scored]) -> dict[str, list[float]]:
    """The absolute relative errors of each model, for the same runs in the same order."""
    measured = {kind_of(run) for run in scored}
    found = {"Paceline": [abs(each.error) for each in ours]}
    for name, fit in MODELS.items():
        fitted = {kind: fit(training_points(probes, kind)) for kind in measured}
        points = [(kind_of(run), point_of(run)) for run in scored]
        found[name] = [abs(fitted[kind](point) / point.seconds - 1) for kind, point in points]
    return found


def show(name: str, errors: dict[str, list[float]]) -> None:
    ours = np.array(errors["Paceline"])
    print(f"{name}: {len(ours)} runs")
    for model, own in errors.items():
        mean, high = np.mean(own), np.quantile(own, 0.95)
        ratio = "" if model == "Paceline" else f"   ours ÷ theirs {ours.mean() / mean:5.2f} {_high(ours) / high:8.2f}"
        print(f"  {model:<9} mean error {100 * mean:5.1f} %   95 % of errors up to {100 * high:5.1f} %{ratio}")


def _high(errors: Array) -> float:
    return float(np.quantile(errors, 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", metavar="SET", type=Path, nargs="+", help="a folder with the folders probes and held")
    folders = parser.parse_args().sets
    found = {folder.name: errors_in(folder) for folder in folders}
    for name, errors in found.items():
        show(name, errors)
    if len(found) > 1:
        every = {name: [error for own in found.values() for error in own[name]] for name in ("Paceline", *MODELS)}
        show("all", every)


if __name__ == "__main__":
    main()

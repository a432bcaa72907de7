"""How good predictions are: probes and held-out runs in labs, drawn from a file by its seed; what is done is kept.

    python benchmarks/prediction.py experiments/prediction.toml                  about two hours on two idle cores
    python benchmarks/prediction.py experiments/prediction.toml --plan           what would be run
    python benchmarks/prediction.py experiments/prediction.toml --score          only compare what there is

Runs are in runs/prediction/SET/probes and SET/held. Most are emulated, in a lab; those of the sets `real` really
compute, and two workers are predicted from one process. A run that other programs disturbed, or that was beyond what
the lab can do, is not scored: another one is made instead. Interrupt it at any time, and go on with the same command.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from prediction_baselines import errors_of, kind_of, show

from paceline.bench.experiment import Experiment, Task, make_experiment
from paceline.bench.run import bench
from paceline.bench.store import Store
from paceline.errors import UsageError
from paceline.predict.calibration import UNCALIBRATED, Calibration, calibrate, calibration_text, distance, fingerprint
from paceline.predict.fit import fit_probes
from paceline.predict.forecast import Scored, score
from paceline.predict.probes import Probe, usable_probes
from paceline.spec import OWN
from paceline.strategies.table import TABLE, default

CALIBRATION, REAL = "calibration", "real"  # roles of sets; others are scored
HARDEST = 16, 0.1  # workers, and noise of compute: with a slow node, runs with both have their own mean error


@dataclass(frozen=True)
class Set:
    """One model on one kind of machines. `probes` and `held` are grids of an experiment, a run each; of `held`, the
    first that can be used are scored.
    """

    name: str
    role: str
    fixed: dict[str, Any]
    probes: list[dict[str, Any]]
    held: list[dict[str, Any]]
    runs: int


def draw_sets(space: Mapping[str, Any]) -> list[Set]:
    """The sets of the file, which its seed decides; no two have the same model, link and noise."""
    dice, found, seen = random.Random(space["seed"]), [], set[tuple[int, ...]]()
    for role, wanted in space["sets"].items():
        for number in range(wanted["sets"]):
            while (chosen := tuple(dice.randrange(len(space[key])) for key in ("model", "link", "noise"))) in seen:
                pass
            seen.add(chosen)
            model, link, noise = (
                space[key][which] for key, which in zip(("model", "link", "noise"), chosen, strict=True)
            )
            strategies = _strategies(dice, space)
            held = [
                _run(each, workers, link, noise, space["steps"])
                for each in strategies
                for workers in each.get("workers", space["workers"])
            ]
            dice.shuffle(held)
            several = [workers for workers in space["probes"] if workers > 1]
            probes = [_run({"strategy": default(1).name}, 1, link, noise, space["steps"])]
            probes += [_run(each, workers, link, noise, space["steps"]) for each in strategies for workers in several]
            fixed = dict(model) | {"steps": space["steps"], "test": False, "overlap": "on"}
            found.append(Set(f"{role}-{number + 1:02}", role, fixed, probes, held, wanted["runs"]))
    return [*found, *_real_sets(space.get(REAL, {}))]


def _real_sets(real: Mapping[str, Any]) -> Iterator[Set]:
    """Real compute on this machine: one process, with as many threads as each of two workers has, is the probe."""
    for number, model in enumerate(real.get("model", [])):
        held = [{"strategy": name, "workers": 2} for name in real["strategies"]]
        probes = [{"strategy": default(1).name, "workers": 1}]
        yield Set(f"{REAL}-{number + 1:02}", REAL, model | {"test": False, "threads": 1}, probes, held, len(held))


def _strategies(dice: random.Random, space: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Some of them, and always one that divides the data."""
    every = list(space["strategy"])
    while True:
        chosen = dice.sample(every, space["strategies_per_set"])
        if any(TABLE[each["strategy"]].averaging for each in chosen):
            return chosen


def _run(
    strategy: Mapping[str, Any], workers: int, link: Mapping[str, Any], noise: Mapping[str, Any], steps: int
) -> dict[str, Any]:
    """A grid of one run, each rank on a node of its own. The last of several workers may be on a slow one."""
    options = {key: value for key, value in strategy.items() if key != "workers"}
    method = TABLE[options["strategy"]]
    servers = options.get("servers", 1) if "servers" in method.names else 0
    ranks = workers + servers
    lab = {key: value for key, value in link.items() if ranks > 1 or not key.startswith("rack")}
    nodes: list[dict[str, Any]] = [{"name": f"n{number + 1}"} for number in range(ranks)]
    if "noise" in noise:
        lab["noise"] = noise["noise"]
    if "slow" in noise and workers > 1:
        nodes[-1]["speed"] = noise["slow"]
    if method.updates_by_worker:
        options["steps"] = options.get("steps", steps) * workers
    return options | {"workers": workers, "lab": lab | {"node": nodes}}


def make_runs(each: Set, folder: Path) -> bool:
    """Make what is missing of a set; False if it was stopped."""
    if not _bench(each, "probes", each.probes, folder):
        return False
    count = each.runs
    while True:
        if not _bench(each, "held", each.held[:count], folder):
            return False
        usable = len(_usable(each, "held", folder)[0])
        if usable >= each.runs or count >= len(each.held):
            return True
        count = min(len(each.held), count + each.runs - usable)


def _bench(each: Set, what: str, grids: Sequence[dict[str, Any]], folder: Path) -> bool:
    outcome = bench(_experiment(each, what, grids), Store(folder / each.name / what), _say)
    return not outcome.stopped


def _experiment(each: Set, what: str, grids: Sequence[dict[str, Any]]) -> Experiment:
    used = {name for grid in grids for name in TABLE[grid["strategy"]].names}
    fixed = {name: value for name, value in each.fixed.items() if name not in OWN or name in used}
    values = {"title": f"{each.name}: {what}", "fixed": fixed, "grid": list(grids)}
    return make_experiment(values, Path(what), repeats=1)


def _usable(each: Set, what: str, folder: Path) -> tuple[list[Probe], list[str]]:
    """Those of its runs that can be used, of held-out ones no more than are scored, in the order in which they were
    drawn; and why others cannot.
    """
    experiment = _experiment(each, what, each.probes if what == "probes" else each.held)
    folders = [folder / each.name / what / Task(point, 0, ()).name for point in experiment.points]
    found, why = usable_probes([path for path in folders if (path / "summary.json").exists()])
    return found[: each.runs] if what == "held" else found, why


@dataclass(frozen=True)
class Compared:
    """What was found of a set, and its scores, in the order of the held-out runs."""

    name: str
    probes: list[Probe]
    held: list[Probe]
    scores: list[Scored]


def compare(sets: Sequence[Set], role: str, folder: Path, calibration: Calibration) -> Iterator[Compared]:
    """All sets of a role that have runs, and a usable one of one process."""
    for each in sets:
        if each.role != role or not (folder / each.name / "held").is_dir():
            continue
        probes, refused = _usable(each, "probes", folder)
        held, beyond = _usable(each, "held", folder)
        for why in [*refused, *beyond]:
            print(f"{each.name}: not used: {why}", file=sys.stderr)
        have = {kind_of(probe) for probe in probes}
        held = [run for run in held if kind_of(run) in have or role == REAL]
        if held and any(probe.run.method.single for probe in probes):
            scores = score(fit_probes(probes), probes, held, calibration=calibration)
            yield Compared(each.name, probes, held, scores)
        else:
            print(f"{each.name}: not scored: no probe of one process, or no held-out run", file=sys.stderr)


def report(scored: Mapping[str, list[Scored]], factor: float) -> dict[str, Any]:
    """The figures of docs/prediction.md."""
    every = [each for runs in scored.values() for each in runs]
    errors = np.array([abs(each.error) for each in every])
    widths = np.array([(each.predicted.high - each.predicted.low) / each.predicted.value for each in every])
    inside = {name: np.mean([each.inside for each in runs]) for name, runs in scored.items()}
    dice = np.random.default_rng(0)
    names = list(scored)
    resampled = [
        np.mean([each.inside for name in dice.choice(names, len(names)) for each in scored[name]]) for _ in range(2000)
    ]
    low, high = np.quantile(resampled, [0.025, 0.975])
    return {"runs": len(every), "sets": len(scored), "mean_error": errors.mean(), "error_95": np.quantile(errors, 0.95),
            "coverage": np.mean([each.inside for each in every]), "coverage_low": low, "coverage_high": high,
            "median_width": np.median(widths), "factor": factor, "coverage_by_set": inside,
            "bias": np.mean([each.error for each in every]), **_choice(scored)}  # fmt: skip


def _hardest(found: Sequence[Compared]) -> dict[str, Any]:
    """The runs with most workers, 10 % noise and a slow node."""
    workers, noise = HARDEST
    errors = [
        abs(score.error)
        for one in found
        for run, score in zip(one.held, one.scores, strict=True)
        if run.workers == workers and min(run.speeds) < 1 and run.cluster.nodes[-1].noise == noise
    ]
    return {"noisy_runs": len(errors), "noisy_mean_error": float(np.mean(errors)) if errors else None}


def _choice(scored: Mapping[str, list[Scored]]) -> dict[str, Any]:
    """How often the strategy that is predicted to be fastest is, of those with the same number of workers, and how much
    slower it is otherwise. Throughput counts, because updates have different batches.
    """
    right, regrets = 0, []
    for runs in scored.values():
        for workers in {each.workers for each in runs}:
            same = [each for each in runs if each.workers == workers]
            if len(same) < 2:
                continue
            best = min(same, key=lambda each: each.measured / each.batch)
            chosen = min(same, key=lambda each: each.predicted.value / each.batch)
            right += chosen is best
            regrets.append(chosen.measured / chosen.batch / (best.measured / best.batch) - 1)
    return {"choices": len(regrets), "fastest_chosen": right / len(regrets) if regrets else None,
            "mean_regret": float(np.mean(regrets)) if regrets else None,
            "worst_regret": max(regrets, default=None)}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/prediction"))
    parser.add_argument("--sets", help="only sets whose names begin so")
    parser.add_argument("--plan", action="store_true", help="only say what would be run")
    parser.add_argument("--score", action="store_true", help="only compare what there is")
    parser.add_argument("--calibration", type=Path, metavar="FILE", help="also write the calibration to this file")
    args = parser.parse_args()
    space = tomllib.loads(args.space.read_text())
    sets = [each for each in draw_sets(space) if each.name.startswith(args.sets or "")]
    print(f"seed {space['seed']}: {len(sets)} sets", flush=True)
    for each in sets:
        print(f"{each.name}: {each.fixed['model']}, {_machines(each)}, "
              f"{', '.join(dict.fromkeys(run['strategy'] for run in each.held))}", flush=True)  # fmt: skip
    if args.plan:
        return 0
    if not args.score and not all(make_runs(each, args.output) for each in sets):
        return 130
    calibration = UNCALIBRATED
    if found := list(compare(sets, CALIBRATION, args.output, UNCALIBRATED)):
        distances = [distance(each.measured, each.predicted) for one in found for each in one.scores]
        calibration = calibrate(distances, {fingerprint(run) for one in found for run in (*one.probes, *one.held)})
        _print_scores(CALIBRATION, found, calibration.factor)
        # These sets were looked at while the simulation was made: they may widen intervals, but not narrow them.
        calibration = replace(calibration, factor=max(1.0, calibration.factor))
        if args.calibration:
            args.calibration.write_text(calibration_text(calibration))
    for role in dict.fromkeys(each.role for each in sets if each.role != CALIBRATION):
        if found := list(compare(sets, role, args.output, calibration)):
            _print_scores(role, found, calibration.factor)
            if role != REAL:  # one probe is not enough for the published models
                print(f"{role}: {json.dumps(_hardest(found))}")
                show("all", baseline_errors(found))
    return 0


def _machines(each: Set) -> str:
    lab = each.probes[-1].get("lab")
    if lab is None:
        return "real compute on this machine"
    speed = lab["node"][-1].get("speed", 1)
    return f"{ {key: value for key, value in lab.items() if key != 'node'} }, last node at {speed}"


def baseline_errors(found: Sequence[Compared]) -> dict[str, list[float]]:
    """The errors of our predictions, and of the published models, for the same runs."""
    own = [errors_of(one.probes, one.held, one.scores) for one in found]
    return {name: [error for each in own for error in each[name]] for name in own[0]}


def _print_scores(role: str, found: Sequence[Compared], factor: float) -> None:
    scored = {one.name: one.scores for one in found}
    for name, runs in scored.items():
        for each in runs:
            print(f"{name:15} {each.strategy:13} {each.workers:3} {each.measured:8.4f} s {each.predicted.value:8.4f} s "
                  f"({each.predicted.low:.4f}–{each.predicted.high:.4f}) {100 * each.error:+6.1f} % "
                  f"{'' if each.inside else 'outside'}")  # fmt: skip
    every = [each for runs in scored.values() for each in runs]
    for what in ("strategy", "workers"):
        value_of = attrgetter(what)
        for value in sorted({value_of(each) for each in every}):
            own = [each for each in every if value_of(each) == value]
            errors = np.array([each.error for each in own])
            print(f"{role}, {what} {value}: {len(own)} runs, mean error {100 * np.abs(errors).mean():.1f} %, bias "
                  f"{100 * errors.mean():+.1f} %, inside {sum(each.inside for each in own)}")  # fmt: skip
    print(f"{role}: {json.dumps(report(scored, factor), default=float)}", flush=True)


def _say(text: str, end: str) -> None:
    print(text, end=end, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UsageError as error:
        sys.exit(f"{error}")

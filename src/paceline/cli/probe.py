"""paceline probe: makes short runs of a training with few workers, until what they predict is stable."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.bench.experiment import Experiment, make_experiment
from paceline.bench.run import bench, busy_now
from paceline.bench.store import Store
from paceline.cli import train
from paceline.cli.predict import rows_of, worker_numbers
from paceline.data import table as datasets
from paceline.data.course import Course
from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from paceline.layout import cores
from paceline.predict.fit import fit_probes
from paceline.predict.forecast import Forecast, forecasts
from paceline.predict.probes import Probe, usable_probes
from paceline.spec import resolve
from paceline.strategies.overlap import TRIED
from paceline.strategies.table import default

WORKERS = (1, 2, 4)
STEPS = TRIED + 25
MOST_ROUNDS = 5
STABLE = 0.02  # a round that changes the prediction by less than this is the last
PART = 0.05  # of the job's time
# Options of the job that probes have otherwise, or not at all.
OTHER = ("workers", "steps", "epochs", "name", "output_dir", "patience", "validation", "global_batch", "resume")

EPILOG = """\
examples:
  paceline probe -- train --model mymodels.py:build --data images:photos --strategy ring
  paceline probe --lab 1gbit --workers 1,2,4 -- train --model resnet50 --image-size 224 --compute emulated:k80

Runs are made one after the other, each setting once in a round, until a round changes the prediction by less than 2 %,
or probes have taken 5 % of the time of the whole training. Stop with Ctrl-C; the same command goes on.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--workers", metavar="N,N", help="numbers of workers to run (1, 2, 4, as far as cores go)")
    parser.add_argument("--lab", metavar="LAB", help="run in a lab: a preset, such as 1gbit, or a lab file")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each run ({STEPS})")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/probes"), metavar="DIR",
                        help="folder of the runs (runs/probes)")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="remove the runs of an earlier probe there first")


def run(args: argparse.Namespace) -> int:
    given = _job(args.command)
    usual = [number for number in WORKERS if args.lab or number <= cores()]
    numbers = worker_numbers(args.workers) if args.workers else usual
    if why := busy_now():
        raise UsageError(
            f"this machine is busy: {why} in the last second. Probes that are made now say nothing about an idle "
            "machine: end the other programs first"
        )
    store, last = Store(args.output), None
    for repeats in range(1, MOST_ROUNDS + 1):
        outcome = bench(_experiment(given, numbers, args, repeats), store, _say, fresh=args.fresh and repeats == 1)
        if outcome.stopped:
            return EXIT_INTERRUPTED
        if outcome.failed:
            raise UsageError(f"a probe failed: {next(iter(outcome.failed.values()))}")
        probes, unused = usable_probes(sorted(path.parent for path in args.output.glob("*/summary.json")))
        found = _forecasts(probes, given, numbers) if _complete(probes, numbers) else None
        if found is None:
            continue
        change = abs(found[-1].step_seconds.value / last[-1].step_seconds.value - 1) if last else 1.0
        last = found
        spent, job = sum(probe.run.summary.total_seconds or 0 for probe in probes), _job_seconds(given, found)
        if change < STABLE or spent > PART * job:
            return _end(args, probes, unused, found, spent, job)
    if last is None:
        print(f"No prediction: {unused[0] if unused else 'no probe could be used'}", file=sys.stderr)
        return EXIT_FAILED
    return _end(args, probes, unused, last, spent, job)


def _job(words: list[str] | None) -> dict[str, Any]:
    """The options of the training that is probed."""
    if not words or words[0] != "train":
        raise UsageError("give the training after --, such as: paceline probe -- train --model resnet18 --data cifar10")
    parser = argparse.ArgumentParser(prog="paceline train", allow_abbrev=False)
    train.add_arguments(parser)
    layers = train.layers_of(parser.parse_args(words[1:]))
    resolve(*layers, here=False)  # refuse wrong values before any run
    merged: dict[str, Any] = {}
    for _, values in layers:
        merged |= values
    return merged


def _experiment(given: Mapping[str, Any], numbers: list[int], args: argparse.Namespace, repeats: int) -> Experiment:
    fixed = {name: value for name, value in given.items() if name not in OTHER}
    fixed |= {"steps": args.steps, "test": False}
    if args.lab:
        fixed["lab"] = f"{args.lab}:{{ranks}}" if ":" not in args.lab and not args.lab.endswith(".toml") else args.lab
    strategy = fixed.pop("strategy", default(max(numbers)).name)
    several = [number for number in numbers if number > 1]
    grids = [{"workers": several, "strategy": strategy}] if several else []
    grids += [{"workers": 1, "strategy": default(1).name}] if 1 in numbers else []
    title = f"Probes of {shlex.join(args.command)}"
    return make_experiment({"title": title, "fixed": fixed, "grid": grids}, Path("probe"), repeats=repeats)


def _complete(probes: list[Probe], numbers: list[int]) -> bool:
    return set(numbers) <= {probe.workers for probe in probes}


def _forecasts(probes: list[Probe], given: Mapping[str, Any], numbers: list[int]) -> list[Forecast]:
    """Of the numbers that were run, and of four times as many; on machines of their own, if cores would not suffice."""
    strategy = max(probes, key=lambda probe: probe.workers).run.summary.strategy
    most = max(numbers)
    more = [2 * most, 4 * most] if probes[0].run.environment.get("lab") else []
    return list(forecasts(fit_probes(probes), probes, [strategy], [*numbers, *more], None, {}))


def _job_seconds(given: Mapping[str, Any], found: list[Forecast]) -> float:
    """How long the whole training takes, with as many workers as it asks for, or were probed."""
    spec = resolve(("job", given), here=False).spec
    nearest = min(found, key=lambda each: abs(each.workers - (spec.workers or 1)))
    data = datasets.describe(spec.data)
    steps = spec.steps or (Course(data.train, spec.update_batch).per_epoch * spec.epochs if data else 0)
    return (steps or math.inf) * nearest.step_seconds.value


def _end(
    args: argparse.Namespace, probes: list[Probe], unused: list[str], found: list[Forecast], spent: float, job: float
) -> int:
    for reason in unused:
        print(f"Not used: {reason}")
    print()
    print("\n".join(rows_of(found)))
    whole = f"; the whole training takes about {job:,.0f} s" if math.isfinite(job) else ""
    print(f"\nPredicted from {len(probes)} runs, which took {spent:.0f} s{whole}. To predict others:")
    print(f"  paceline predict {args.output} --workers 1,2,4,8,16 --link 1gbit --strategy all")
    return EXIT_OK


def _say(text: str, end: str) -> None:
    print(text, end=end, flush=True)

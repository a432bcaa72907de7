"""paceline probe: makes short runs of a training with few workers, until what they predict is stable."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from paceline.bench.experiment import Experiment, make_experiment
from paceline.bench.run import bench, busy_now
from paceline.bench.store import Store
from paceline.cli import train
from paceline.cli.main import Parser, add_json
from paceline.cli.predict import rows_of, worker_numbers
from paceline.comm.table import GLOO
from paceline.data import table as datasets
from paceline.data.course import Course
from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, UsageError
from paceline.layout import cores
from paceline.messages import LOGGER
from paceline.options import LENGTH, NOTHING
from paceline.predict.fit import fit_probes
from paceline.predict.forecast import Forecast, forecasts
from paceline.predict.probes import SHORTEST, Probe, usable_probes
from paceline.spec import FIELDS, RunSpec, resolve
from paceline.strategies.table import TABLE, default

WORKERS = (1, 2, 4)
STEPS = SHORTEST + 15
MOST_ROUNDS = 5
STABLE = 0.02  # a round that changes the prediction by less than this is the last
PART = 0.05  # of the job's time
# Options of the job that probes have otherwise; those that affect its length only, or nothing, are left out as well.
OTHER = ("workers", "batch_size", "global_batch", "best_by")

EPILOG = """\
examples:
  paceline probe -- train --model mymodels.py:build --data images:photos --strategy ring
  paceline probe --lab 1gbit --workers 1,2,4 -- train --model resnet50 --image-size 224 --compute emulated:k80

Runs are made one after the other, each setting once in a round, until a round changes the prediction by less than 2 %,
or probes have taken 5 % of the time of the whole training. Stop with Ctrl-C; run the same command again to resume.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--workers", metavar="N,N", help="numbers of workers to run (1, 2, 4, as far as cores go)")
    parser.add_argument("--lab", metavar="LAB", help="run in a lab: a preset, such as 1gbit, or a lab file")
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"steps of each run ({STEPS})")
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/probes"), metavar="DIR",
                        help="folder of the runs (runs/probes)")  # fmt: skip
    add_json(parser, "the predictions")
    parser.add_argument("--fresh", action="store_true", help="remove the runs of an earlier probe there first")


def run(args: argparse.Namespace) -> int:
    given, spec = job_of(args.command)
    if args.steps < SHORTEST:
        raise UsageError(f"--steps {args.steps}: at least {SHORTEST} are needed")
    if not spec.method.simulation:
        raise UsageError(f"--strategy {spec.strategy}: its steps cannot be predicted")
    usual = [number for number in WORKERS if args.lab or number <= cores()]
    numbers = worker_numbers(args.workers) if args.workers else usual
    if why := busy_now():
        raise UsageError(
            f"this machine is busy: {why} in the last second. Probes that are made now say nothing about an idle "
            "machine: end the other programs first"
        )
    store, last = Store(args.output), None
    for repeats in range(1, MOST_ROUNDS + 1):
        experiment = _experiment(given, spec, numbers, args, repeats)
        outcome = bench(experiment, store, partial(_say, args.json), fresh=args.fresh and repeats == 1)
        if outcome.stopped:
            return EXIT_INTERRUPTED
        if outcome.failed:
            LOGGER.error("a probe failed: %s", next(iter(outcome.failed.values())))
            return EXIT_FAILED
        probes, unused = usable_probes([args.output / task.name for task in experiment.tasks()])
        found = _forecasts(probes, numbers) if _complete(probes, numbers) else None
        if found is None:
            continue
        change = abs(found[-1].step_seconds.value / last[-1].step_seconds.value - 1) if last else 1.0
        last = found
        spent, job = sum(probe.run.summary.total_seconds or 0 for probe in probes), _job_seconds(spec, found)
        if change < STABLE or spent > PART * job:
            return _end(args, probes, unused, found, spent, job)
    if last is None:
        LOGGER.error("no prediction: %s", unused[0] if unused else "no probe could be used")
        return EXIT_FAILED
    return _end(args, probes, unused, last, spent, job)


def job_of(words: list[str] | None) -> tuple[dict[str, Any], RunSpec]:
    """The options of the training that is probed."""
    if not words or words[0] != "train":
        raise UsageError("give the training after --, such as: paceline probe -- train --model resnet18 --data cifar10")
    parser = Parser(prog="paceline train", allow_abbrev=False)
    train.add_arguments(parser)
    layers = train.layers_of(parser.parse_args(words[1:]))
    spec = resolve(*layers, here=False).spec  # refuses wrong values before any run
    merged: dict[str, Any] = {}
    for _, values in layers:
        merged |= values
    return merged, spec


def _experiment(
    given: Mapping[str, Any], spec: RunSpec, numbers: list[int], args: argparse.Namespace, repeats: int
) -> Experiment:
    left_out = {name for name, made in FIELDS.items() if made.metadata["affects"] in (LENGTH, NOTHING)} | {*OTHER}
    fixed = {name: value for name, value in given.items() if name not in left_out}
    fixed |= {"steps": args.steps, "test": False, "batch_size": spec.batch_size}
    if args.lab:
        fixed["lab"] = f"{args.lab}:{{ranks}}" if ":" not in args.lab and not args.lab.endswith(".toml") else args.lab
    strategy = fixed.pop("strategy", default(max(numbers)).name)
    several = [number for number in numbers if number > 1]
    # Where each worker makes updates of its own, as many rounds of them.
    each = TABLE[strategy].updates_by_worker
    # Messages between machines go through sockets: probes have them, too, unless they are told otherwise.
    sent = {} if spec.carrier.for_servers or "transport" in fixed else {"transport": GLOO.name}
    grids = [
        {"workers": number, "strategy": strategy, "steps": args.steps * (number if each else 1), **sent}
        for number in several
    ]
    grids += [{"workers": 1, "strategy": default(1).name}] if 1 in numbers else []
    title = f"Probes of {shlex.join(args.command)}"
    return make_experiment({"title": title, "fixed": fixed, "grid": grids}, Path("probe"), repeats=repeats)


def _complete(probes: list[Probe], numbers: list[int]) -> bool:
    return set(numbers) <= {probe.workers for probe in probes}


def _forecasts(probes: list[Probe], numbers: list[int]) -> list[Forecast]:
    """Of the numbers that were run; of emulated workers in a lab, also of twice and four times as many."""
    strategy = max(probes, key=lambda probe: probe.workers).run.summary.strategy
    fit, most = fit_probes(probes), max(numbers)
    more = [2 * most, 4 * most] if fit.emulated and probes[0].run.environment.get("lab") else []
    # Settings that are not possible, such as more stages than layers, are left out.
    return list(forecasts(fit, probes, [strategy], [*numbers, *more], None, {}, left_out=[]))


def _job_seconds(spec: RunSpec, found: list[Forecast]) -> float:
    """How long the whole training takes, with as many workers as it asks for, or were probed."""
    nearest = min(found, key=lambda each: abs(each.workers - (spec.workers or 1)))
    data = datasets.describe(spec.data)
    steps = spec.steps or (Course(data.train, spec.update_batch).per_epoch * spec.epochs if data else 0)
    return (steps or math.inf) * nearest.step_seconds.value


def _end(
    args: argparse.Namespace, probes: list[Probe], unused: list[str], found: list[Forecast], spent: float, job: float
) -> int:
    if args.json:
        print(json.dumps({"folder": str(args.output), "runs": len(probes), "seconds": spent, "not_used": unused,
                          "predictions": [asdict(each) for each in found]}))  # fmt: skip
        return EXIT_OK
    for reason in unused:
        print(f"Not used: {reason}")
    print()
    print("\n".join(rows_of(found)))
    whole = f"; the whole training takes about {job:,.0f} s" if math.isfinite(job) else ""
    print(f"\nPredicted from {len(probes)} runs, which took {spent:.0f} s{whole}. To predict others:")
    print(f"  paceline predict {args.output} --workers 1,2,4,8,16 --link 1gbit --strategy all")
    return EXIT_OK


def _say(as_json: bool, text: str, end: str) -> None:
    print(text, end=end, flush=True, file=sys.stderr if as_json else sys.stdout)

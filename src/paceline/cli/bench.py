"""paceline bench: makes the runs of an experiment."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from paceline.analysis.study import read_study
from paceline.bench.experiment import read_experiment
from paceline.bench.run import bench
from paceline.bench.store import Store
from paceline.cli.main import add_verbosity
from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_OK, visible
from paceline.messages import LOGGER, quiet
from paceline.strict_json import dump

SHOWN = 3  # disturbed runs that are named


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("experiment", metavar="EXPERIMENT.toml", type=Path, help="a grid of runs, as in experiments/")
    parser.add_argument("--quick", action="store_true", help="the experiment's quick form")
    parser.add_argument(
        "-o", "--output-dir", metavar="FOLDER", type=Path, help="where runs go; runs/EXPERIMENT unless given"
    )
    parser.add_argument(
        "--repeats", type=_repeats, help="how often every setting is run; the experiment's unless given"
    )
    parser.add_argument("--fresh", action="store_true", help="remove the runs that are there, and begin again")
    parser.add_argument("--list", action="store_true", help="show the runs, and make none")
    add_verbosity(parser, "also show the command of each run")
    parser.add_argument("--json", action="store_true",
                        help="print what came of it as one line of JSON; progress goes to standard error")  # fmt: skip


def _repeats(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 to 1000")
    return int(text)


def run(args: argparse.Namespace) -> int:
    show = sys.stderr if args.json else sys.stdout

    def say(text: str, end: str = "\n") -> None:
        if not quiet():
            print(visible(text), end=end, flush=True, file=show)

    experiment = read_experiment(args.experiment, quick=args.quick, repeats=args.repeats)
    folder = args.output_dir or Path("runs", experiment.name + ("-quick" if args.quick else ""))
    tasks = experiment.tasks()
    for line in (experiment.title, *(f"Left out: {why}" for why in experiment.left_out)):
        if line:
            say(line)
    if args.list:
        if args.json:
            print(dump([{"name": task.name, "about": str(task)} for task in tasks]))
        for task in () if args.json else tasks:
            print(visible(f"  {task}"))
        return EXIT_OK
    each = "once each" if experiment.repeats == 1 else f"{experiment.repeats} times each"
    say(f"{len(tasks)} runs: {len(experiment.points)} settings, {each}; in {folder}")
    begun = time.monotonic()
    outcome = bench(experiment, Store(folder), say, fresh=args.fresh)
    minutes, seconds = divmod(round(time.monotonic() - begun), 60)
    made = "1 run was made" if outcome.made == 1 else f"{outcome.made} runs were made"
    headline = None
    if not outcome.stopped and (study := read_study([folder])).runs:
        headline = study.headline.text
        say(f"\n{headline}\n")
    say(f"{made} in {minutes} min {seconds} s" + _lost(outcome.failed))
    for name, why in outcome.failed.items() if quiet() else ():
        LOGGER.error("%s failed: %s", name, why)
    if outcome.disturbed:
        print(visible(_disturbed(outcome.disturbed, len(tasks), folder)), flush=True, file=show)
    if args.json:
        print(dump({"folder": str(folder), "runs": len(tasks), "headline": headline, **vars(outcome)}))
    if outcome.stopped:
        LOGGER.error("stopped; the same command continues")
        return EXIT_INTERRUPTED
    say(f"Now: paceline report {folder} -o {folder / 'report.html'}")
    return EXIT_FAILED if outcome.failed else EXIT_OK


def _lost(failed: dict[str, str]) -> str:
    return f", {len(failed)} failed; the same command tries them again" if failed else ""


def _disturbed(names: list[str], runs: int, folder: Path) -> str:
    shown = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
    return (
        f"Other programs disturbed {len(names)} of {runs} runs ({shown}): do not compare their times. "
        f"To repeat one on an idle machine, remove its folder in {folder} and run the same command."
    )

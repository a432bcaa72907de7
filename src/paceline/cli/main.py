"""Parses the subcommand, runs it, and turns errors into messages and exit codes."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

from paceline import __version__
from paceline.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, PacelineError, meant, nearest
from paceline.launch.signals import quiet_interrupt

VERBS = {
    "train": "train a model on one or many processes",
    "cut": "plan where to cut a model into the stages of a pipeline, and predict their costs",
    "data": "list the data sets, fetch one, or print where it is",
    "models": "list the models, with their sizes and costs",
    "lab": "emulate a cluster on this machine: nodes, links with a limited speed, counters, faults",
    "slurm": "write a batch script for sbatch: paceline slurm --nodes 2 --ntasks-per-node 4 -- train ...",
    "bench": "make the runs of an experiment; stop with Ctrl-C, continue with the same command",
    "watch": "show a run that is under way: a live page with its progress, curves, ranks and nodes",
    "compare": "show what differs between two runs, and whether the difference in speed is real",
    "probe": "make short runs of a training, and predict it with more workers: paceline probe -- train ...",
    "predict": "predict step time and throughput of configurations that have not been run",
    "advise": "is it worth distributing this training, how, over how many machines? paceline advise -- train ...",
    "chaos": "train in a storm of faults, and say what they cost: paceline chaos --kill every=30s -- train ...",
    "report": "write a page with a verdict, charts and tables from run folders",
    "export": "write a run for other programs: events for TensorBoard, or a trace for Perfetto",
    "checkpoint": "list, verify or export the checkpoints of a run",
    "schema": "print the JSON Schemas of the files in a run folder",
    "doctor": "show what this machine has for training",
    "completion": "print a completion script for a shell",
}
# These take another command after --
WITH_COMMAND = ("lab", "slurm", "probe", "advise", "chaos")


class Parser(argparse.ArgumentParser):
    """Suggests the nearest subcommand or flag for an unknown one."""

    def error(self, message: str) -> Any:
        flags = [flag for action in self._actions for flag in action.option_strings]
        hint = ""
        if "unrecognized arguments" in message:
            from paceline.spec import ABSENT, ELSEWHERE

            word = next((w for w in message.split()[2:] if w.startswith("-")), "").split("=")[0]
            here = {other: f"--{name}" for other, name in ELSEWHERE.items() if f"--{name}" in flags}
            negated = word.startswith("--no-")
            close = [flag for flag in flags if flag.startswith("--no-") == negated]
            hint = meant(word, close, here, ABSENT if "--workers" in flags else {}) if word else ""
        print(f"{self.prog}: {message}{hint}\n  {self.prog} --help shows what is allowed", file=sys.stderr)
        sys.exit(EXIT_USAGE)


def add_verbosity(parser: argparse.ArgumentParser, verbose: str = "also say what was decided, and why") -> None:
    """Add --quiet and --verbose, for subcommands that show progress."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quiet", action="store_true", help="show warnings and errors only, and no progress")
    group.add_argument("--verbose", action="store_true", help=verbose)


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """Add --json, for subcommands that print facts."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as one line of JSON, and nothing else")


def make_parsers() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command, and those of its subcommands, which have no arguments yet."""
    about = "Train a PyTorch model on many processes, and measure whether it is worth it."
    parser = Parser(prog="paceline", description=about, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"paceline {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    return parser, {
        verb: verbs.add_parser(verb, help=about, description=about, allow_abbrev=False) for verb, about in VERBS.items()
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `paceline` command."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser, parsers = make_parsers()
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    if chosen is not None and chosen not in VERBS:
        parser.error(f"unknown command {chosen!r}{nearest(chosen, VERBS)} (one of: {', '.join(VERBS)})")
    if chosen is None:
        parser.parse_args(arguments)  # prints the help, or the error
        return EXIT_USAGE
    # Import only the chosen subcommand: training must not wait for the imports of reports.
    try:
        with quiet_interrupt():
            from paceline import messages

            messages.configure()
            module = importlib.import_module(f"paceline.cli.{chosen}")
    except PacelineError as error:  # a plug-in that cannot be loaded
        messages.LOGGER.error(error)
        return error.exit_code
    module.add_arguments(parsers[chosen])
    given = None
    if chosen in WITH_COMMAND and "--" in arguments:
        at = arguments.index("--")
        arguments, given = arguments[:at], arguments[at + 1 :]
    args, extra = parser.parse_known_args(arguments)
    if chosen in WITH_COMMAND:
        args.command = given
    if extra and chosen in WITH_COMMAND and given is None:
        parsers[args.verb].error(f"unrecognized arguments: {' '.join(extra)} (write another command after --)")
    if extra:
        parsers[args.verb].error(f"unrecognized arguments: {' '.join(extra)}")
    messages.configure("WARNING" if vars(args).get("quiet") else "DEBUG" if vars(args).get("verbose") else "INFO")
    try:
        return int(module.run(args))
    except PacelineError as error:
        messages.LOGGER.error(error)
        return error.exit_code
    except KeyboardInterrupt:
        messages.end_line()
        messages.LOGGER.error("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of the output has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED

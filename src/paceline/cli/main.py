"""Finds the verb, runs it, turns errors into messages and exit codes."""

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
    "train": "train a model, alone or on many processes",
    "cut": "say where to cut a model into the stages of a pipeline, and what each would cost",
    "data": "list the data sets, get one, or say where it is",
    "models": "list the models, with their sizes and costs",
    "lab": "a cluster on this machine: nodes with links of a given speed, counters, and faults",
    "slurm": "write the script that sbatch takes: paceline slurm --nodes 2 --ntasks-per-node 4 -- train ...",
    "bench": "make the runs of an experiment; stop it with Ctrl-C, and it goes on where it was",
    "compare": "what differs between two runs, and whether the difference in speed is real",
    "report": "one page with charts, tables and findings from run folders",
    "schema": "print the JSON Schemas of the files in a run folder",
    "doctor": "show what this machine has for training",
    "completion": "print a script with which a shell completes verbs, options and their values",
}
# These take another command behind --
WITH_COMMAND = ("lab", "slurm")


class Parser(argparse.ArgumentParser):
    """Says what was meant when a verb or a flag is close to one that exists."""

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
    """For verbs that show progress."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--quiet", action="store_true", help="show warnings and errors only, and no progress")
    group.add_argument("--verbose", action="store_true", help=verbose)


def add_json(parser: argparse.ArgumentParser, what: str) -> None:
    """For verbs that print facts."""
    parser.add_argument("--json", action="store_true", help=f"print {what} as one line of JSON, and nothing else")


def make_parsers() -> tuple[Parser, dict[str, argparse.ArgumentParser]]:
    """The parser of the command, and those of its verbs, which have no arguments yet."""
    parser = Parser(prog="paceline", description="Train on many processes; see what it costs.", allow_abbrev=False)
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
        parser.error(f"unknown verb {chosen!r}{nearest(chosen, VERBS)} (one of: {', '.join(VERBS)})")
    if chosen is None:
        parser.parse_args(arguments)  # shows the help, or what is wrong
        return EXIT_USAGE
    # Only what is needed: training is not to wait for what draws charts.
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
        parsers[args.verb].error(f"unrecognized arguments: {' '.join(extra)} (another command is written behind --)")
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
    except BrokenPipeError:  # whoever read our output has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED

"""paceline completion: prints a script that completes commands, options and their values in a shell."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from paceline.cli.main import make_parsers
from paceline.data import table as datasets
from paceline.models import table as models

SHELLS = ("bash", "zsh", "tcsh")
NAMES = {"model": tuple(models.TABLE), "data": tuple(datasets.TABLE)}
FILES, FOLDERS = ("FILE", "EXPERIMENT.toml", "LAB"), ("DIR", "FOLDER", "RUN")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help='as in: eval "$(paceline completion bash)"')


def run(args: argparse.Namespace) -> int:
    import shtab

    parser = whole_parser()
    for action in actions(parser):
        words = NAMES.get(action.dest, ())
        if isinstance(action.metavar, str) and "|" in action.metavar:
            words = tuple(action.metavar.split("|"))
        if words and not action.choices:  # suggestions; other values are allowed, too
            action.choices = words
        if action.metavar in FILES + FOLDERS:
            action.complete = shtab.FILE if action.metavar in FILES else shtab.DIRECTORY  # type: ignore[attr-defined]
    print(shtab.complete(parser, args.shell))
    return 0


def whole_parser() -> argparse.ArgumentParser:
    """The parser with the arguments of all subcommands."""
    parser, verbs = make_parsers()
    for verb, its in verbs.items():
        importlib.import_module(f"paceline.cli.{verb}").add_arguments(its)
    return parser


def actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    """Every argument of a command and, recursively, of its subcommands."""
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from actions(below)

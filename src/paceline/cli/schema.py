"""paceline schema: the JSON Schemas of the files in a run folder."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from paceline.errors import EXIT_OK, UsageError
from paceline.pipeline.plan import StagePlan
from paceline.run.atomic import write_whole
from paceline.run.folder import PLAN
from paceline.run.schema import of_type, schemas, titled
from paceline.strategies.table import TABLE
from paceline.strict_json import dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "file", choices=list(published()), nargs="?", help="the file whose schema is printed (default: all of them)"
    )
    parser.add_argument("--output-dir", metavar="DIR", help="write FILE.schema.json to this folder instead of printing")


def published() -> dict[str, dict[str, Any]]:
    """By the name of the file, with what every strategy that is installed here adds."""
    found = schemas(
        {name: strategy.figures for name, strategy in TABLE.items()},
        [kind for strategy in TABLE.values() for kind in strategy.lines],
    )
    return found | {"plan": titled(PLAN, of_type(StagePlan))}


def run(args: argparse.Namespace) -> int:
    found = published()
    chosen = {args.file: found[args.file]} if args.file else found
    if args.output_dir is None:
        print(dump(chosen[args.file] if args.file else chosen, indent=1))
        return EXIT_OK
    for name, schema in chosen.items():
        try:
            write_whole(Path(args.output_dir) / f"{name}.schema.json", dump(schema, indent=1) + "\n")
        except OSError as error:
            raise UsageError(f"cannot write to {args.output_dir}: {error.strerror}; see --output-dir") from error
    return EXIT_OK

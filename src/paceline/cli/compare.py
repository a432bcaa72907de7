"""paceline compare: what differs between two runs, and whether the difference in speed is real."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.analysis.checks import RunWarning
from paceline.analysis.compare import Comparison, Slower, compare, slower
from paceline.analysis.runs import LeftOut, read_run
from paceline.analysis.scaling import Group, group
from paceline.analysis.wording import some
from paceline.cli.main import add_json
from paceline.errors import EXIT_FAILED, EXIT_OK, UsageError, visible
from paceline.run.folder import find_folders
from paceline.strict_json import dump


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for which in ("first", "second"):
        parser.add_argument(which, metavar="RUN", type=Path, help="a run folder, or a folder of repeats of one run")
    about = "exit with code 1 if the second is slower by more than this, with 95 %% confidence"
    parser.add_argument("--fail-if-slower", metavar="PERCENT", type=_percent, help=about)
    add_json(parser, "the comparison")


def run(args: argparse.Namespace) -> int:
    first, second = _repeats(args.first), _repeats(args.second)
    found = compare(first, second)
    limit = slower(found, args.fail_if_slower) if args.fail_if_slower is not None else None
    if args.json:
        print(dump(_facts(args, first, second, found, limit)))
        return EXIT_FAILED if limit and limit.is_slower else EXIT_OK
    lines = []
    for folder, one in ((args.first, first), (args.second, second)):
        speed, runs = one.samples_per_second(), "1 run" if len(one.runs) == 1 else f"{len(one.runs)} runs"
        lines.append(f"{folder}: {speed.value:,.0f} samples/s ({speed.low:,.0f} to {speed.high:,.0f}), {runs}")
    for where in ("spec", "environment"):
        rows = [each for each in found.differences if each.where == where]
        lines.append(f"\n{where}: {'the same' if not rows else ''}")
        for each in rows:
            lines.append(f"  {each.name:<16}{_short(each.first)} -> {_short(each.second)}")
    lines.append(f"\n{found.verdict[0].upper()}{found.verdict[1:]}.")
    lines += _warnings(found.warnings)
    if limit:
        lines.append(f"{limit.why[0].upper()}{limit.why[1:]}.")
    print(visible("\n".join(lines)))
    return EXIT_FAILED if limit and limit.is_slower else EXIT_OK


def _facts(
    args: argparse.Namespace, first: Group, second: Group, found: Comparison, limit: Slower | None
) -> dict[str, Any]:
    return {
        **{
            name: {"folder": str(folder), "runs": len(one.runs), "samples_per_second": asdict(one.samples_per_second())}
            for name, folder, one in (("first", args.first, first), ("second", args.second, second))
        },
        "differences": [asdict(each) for each in found.differences],
        "faster": asdict(found.faster),
        "verdict": found.verdict,
        "disturbed": found.disturbed,
        "too_short": found.too_short,
        "warnings": [{"kind": each.kind, "about": each.about, "text": each.text} for each in found.warnings],
        "slower": asdict(limit) if limit else None,
    }


def _percent(text: str) -> float:
    try:
        percent = float(text)
    except ValueError:
        percent = -1.0
    if not 0 <= percent < 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 100")
    return percent


def _warnings(found: Sequence[RunWarning]) -> Iterator[str]:
    """One line for each kind of warning."""
    by_kind: dict[str, list[RunWarning]] = {}
    for warning in found:
        by_kind.setdefault(warning.kind, []).append(warning)
    for same in by_kind.values():
        if len({warning.text for warning in same}) == 1:
            yield f"But: {some([warning.about for warning in same])}: {same[0].text}."
        else:
            yield f"But, in {len(same)} runs, for example {same[0].about}: {same[0].text}."


def _short(value: object) -> str:
    text = "not set" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _repeats(path: Path) -> Group:
    """The completed runs of a folder, which must have the same setting."""
    if not path.is_dir():
        raise UsageError(f"{path} is not a folder: give a run folder, such as runs/NAME")
    read = [read_run(folder) for folder in find_folders([path])]
    runs = [each for each in read if not isinstance(each, LeftOut)]
    if not runs:
        why = "; ".join(f"{each.folder}: {each.why}" for each in read if isinstance(each, LeftOut))
        raise UsageError(f"{path} has no completed run ({why})")
    groups = group(runs)
    if len(groups) > 1:
        raise UsageError(f"{path} has runs of {len(groups)} settings: give one of its folders")
    return groups[0]

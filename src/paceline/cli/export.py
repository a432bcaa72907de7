"""paceline export: writes a run for other programs: TensorBoard, or a trace viewer such as Perfetto."""

from __future__ import annotations

import argparse
import re
import shlex
import tempfile
from pathlib import Path

from paceline.errors import EXIT_OK, UsageError, visible
from paceline.export.replay import replay
from paceline.export.trace import MOST_STEPS, choose_steps, write_trace
from paceline.export.trackers import TENSORBOARD, TensorBoard, check_tensorboard, event_files, events_folder
from paceline.run.folder import SUMMARY, find_folders, node_files, rank_file, ranks_in
from paceline.run.liveness import current_summary
from paceline.run.records import RUNNING, Summary
from paceline.strategies.table import describe

TRACE = "trace.json.gz"
EPILOG = """\
examples:
  paceline export runs/NAME --tensorboard          then: tensorboard --logdir runs/NAME/tensorboard
  paceline export runs/NAME --trace                then: open runs/NAME/trace.json.gz in https://ui.perfetto.dev
  paceline export runs/NAME --trace slow.json --steps 200:300

The run may have completed, failed, or be running. `paceline train --tensorboard` writes rank 0's events as it trains.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("run", metavar="RUN", type=Path, help="a run folder, such as runs/NAME; give it first")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--tensorboard", metavar="DIR", type=Path, nargs="?", const=Path(),
                      help="write events for TensorBoard: loss, metrics, learning rate, speed and the parts of a step "
                           f"of every rank, CPU, memory and network of every node (DIR: {TENSORBOARD} in the run "
                           "folder)")  # fmt: skip
    what.add_argument("--trace", metavar="FILE", type=Path, nargs="?", const=Path(),
                      help="write a trace of all ranks for Perfetto, in Chrome's JSON format; gzipped if FILE ends in "
                           f".gz (FILE: {TRACE} in the run folder)")  # fmt: skip
    parser.add_argument("--steps", metavar="A:B", type=_range, default=(None, None),
                        help="only the steps from A up to B, without B; A: and :B are allowed (TensorBoard: all steps; "
                             f"trace: the last {MOST_STEPS})")  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace events or a trace that are there already")


def run(args: argparse.Namespace) -> int:
    summary = _summary(args.run)
    try:
        return _events(args, summary) if args.tensorboard else _trace(args, summary)
    except ValueError as error:
        raise UsageError(f"{args.run} is damaged: {error}") from None
    except OSError as error:
        raise UsageError(f"cannot write {error.filename or ''}: {error.strerror}") from None


def _summary(folder: Path) -> Summary:
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder: give a run folder, such as runs/NAME")
    try:
        return current_summary(folder)
    except FileNotFoundError:
        inside = [each for each in find_folders([folder]) if (each / SUMMARY).exists()]
        hint = f"give one of those in it, such as {inside[0]}" if inside else "give one, such as runs/NAME"
        raise UsageError(f"{folder} is not a run folder: it has no {SUMMARY}; {hint}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{folder} has no summary that can be read: {error}") from None


def _chosen(args: argparse.Namespace) -> tuple[range, int]:
    """The steps that are written, and how many the run has."""
    start, stop = args.steps
    steps, of = choose_steps(args.run, start, stop)
    if not steps and (start, stop) != (None, None):
        has = f"the run has the steps 0 to {of - 1}" if of else "the run has none"
        raise UsageError(f"--steps {start or 0}:{'' if stop is None else stop}: {has}")
    return steps, of


def _events(args: argparse.Namespace, summary: Summary) -> int:
    check_tensorboard("--tensorboard")
    steps = None if args.steps == (None, None) else _chosen(args)[0]
    live = args.run / TENSORBOARD
    target = args.tensorboard if args.tensorboard != Path() else live
    if target.exists() and not target.is_dir():
        raise UsageError(f"--tensorboard {target}: it is a file; give a folder")
    if summary.status == RUNNING and event_files(target) and target.resolve() == live.resolve():
        raise UsageError(f"the run is writing events into {target}: give another folder")
    records = [*(rank_file(args.run, rank) for rank in ranks_in(args.run)), *node_files(args.run)]
    old = [file for path in records for file in event_files(events_folder(target, path))]
    if old and not args.force:
        raise UsageError(f"{target} has events already: --force replaces them, or give another folder")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".part-") as temporary:  # all events, or none
        values = replay(args.run, lambda path: TensorBoard(events_folder(Path(temporary), path)), steps)
        for file in old:
            file.unlink()
        for made in Path(temporary).iterdir():
            (target / made.name).mkdir(parents=True, exist_ok=True)
            for file in event_files(made):
                file.rename(target / made.name / file.name)
    nodes = len(node_files(args.run))
    print(visible(f"{values:,} values of {len(records) - nodes} ranks and {nodes} nodes; to see them:\n"
                  f"  tensorboard --logdir {shlex.quote(str(target))}"))  # fmt: skip
    return EXIT_OK


def _trace(args: argparse.Namespace, summary: Summary) -> int:
    path = args.trace if args.trace != Path() else args.run / TRACE
    if path.is_dir():
        raise UsageError(f"--trace {path} is a folder: name a file, such as {path / TRACE}")
    if path.exists() and not args.force:
        raise UsageError(f"{path} is there already: --force replaces it, or name another file")
    steps, of = _chosen(args)
    path.parent.mkdir(parents=True, exist_ok=True)
    done = write_trace(args.run, path, summary, describe(summary.strategy).lines, steps, of)
    which = f"all {of:,} steps" if done.whole else f"steps {steps.start:,} to {steps.stop - 1:,} of {of:,}"
    print(visible(f"{path}: {which}, {done.events:,} events; open it in https://ui.perfetto.dev"))
    if not done.whole and args.steps == (None, None):
        print(f"Earlier steps are left out, as the trace would be large: --steps 0:{steps.start} writes them")
    return EXIT_OK


def _range(text: str) -> tuple[int | None, int | None]:
    found = re.fullmatch(r"([0-9]{0,18}):([0-9]{0,18})", text)
    if not found or text == ":":
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps, such as 200:300, 200: or :300")
    start, stop = (int(part) if part else None for part in found.groups())
    if stop is not None and stop <= (start or 0):
        raise argparse.ArgumentTypeError(f"{text!r} has no steps: the second number must be larger")
    return start, stop

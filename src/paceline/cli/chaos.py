"""paceline chaos: runs a training in a storm of faults, and says what they cost it."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from paceline.chaos.outcome import judge
from paceline.chaos.storm import KILL, STOP, Fault, read_often, storm
from paceline.cli.main import add_json
from paceline.cli.probe import job_of
from paceline.errors import EXIT_USAGE, UsageError
from paceline.lab.kernel import end_with_parent
from paceline.messages import LOGGER
from paceline.run.folder import read_summary
from paceline.run.records import COMPLETED, FAILED, Summary

EPILOG = """\
examples:
  paceline chaos --kill every=30s -- train --strategy ring --workers 4 --elastic 2 --epochs 20
  paceline chaos --kill every=60s --stop every=90s,for=5s --seed 7 -- train --workers 4 --elastic 1:4

Workers are chosen at random, at random moments; times are means. The training must be elastic, and is run as it is.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("--kill", metavar="every=TIME", help="kill a worker (SIGKILL) this often, such as every=30s")
    parser.add_argument("--stop", metavar="every=TIME,for=TIME", help="stop a worker (SIGSTOP) this often, and let it "
                        "go on after this time, 10 s unless given")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="random seed of moments and workers (0)")
    add_json(parser, "the outcome")


def run(args: argparse.Namespace) -> int:
    _, spec = job_of(args.command)
    given = {KILL: args.kill, STOP: args.stop}
    often = {kind: read_often(kind, text) for kind, text in given.items() if text}
    if not often:
        raise UsageError("give the faults, such as --kill every=30s")
    if not spec.elastic:
        raise UsageError("paceline chaos is for elastic trainings: give --elastic and the least number of workers")
    name = spec.name or f"chaos-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(spec.output_dir) / name
    words = [*args.command, *([] if spec.name else ["--name", name])]
    faults = list[Fault]()

    def struck(fault: Fault) -> None:
        faults.append(fault)
        LOGGER.info("%s: worker %d%s", fault.kind, fault.worker, f" for {fault.lasts:g} s" if fault.lasts else "")

    out = sys.stderr if args.json else None
    command = [sys.executable, "-m", "paceline", *words]
    with subprocess.Popen(command, stdout=out, preexec_fn=end_with_parent) as process:  # noqa: PLW1509  no threads here
        with suppress(KeyboardInterrupt):  # the training has had it, too, and stops after a step
            storm(folder, often, args.seed, lambda: process.poll() is None, struck)
        process.wait()
    if process.returncode == EXIT_USAGE:  # it has said why; what is in the folder is of another run
        return EXIT_USAGE
    summary = read_summary(folder)
    if summary is None or not summary.steps:
        LOGGER.error("the training ended before its first update: there is nothing to say about a storm")
        return process.returncode or 1
    outcome = judge(folder, summary, faults, args.seed)
    outcome.write(folder)
    if args.json:
        print(json.dumps(asdict(outcome) | {"status": summary.status, "steps": summary.steps}))
    else:
        print("\n".join(["", *outcome.lines()]))
        print(_verdict(summary))
    return process.returncode


def _verdict(summary: Summary) -> str:
    if summary.status == FAILED:
        return f"Not survived: {summary.error}"
    return f"Survived: {summary.steps} updates, {'all' if summary.status == COMPLETED else 'until it was interrupted'}"

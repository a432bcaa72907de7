"""paceline cut: plans where to cut a model into the stages of a pipeline, without training."""

from __future__ import annotations

import argparse
import sys
from typing import TextIO

from paceline.cli import train
from paceline.cli.main import add_verbosity
from paceline.messages import quiet
from paceline.pipeline import showing
from paceline.pipeline.sizes import parse_bandwidth
from paceline.spec import RunSpec, resolve
from paceline.strategies.pipeline import PIPELINE
from paceline.strict_json import dump

FIELDS = ("model", "hidden", "dropout", "data", "data_dir", "image_size", "batch_size", "microbatches", "schedule",
          "recompute", "cut", "memory", "speed", "optimizer", "momentum", "dtype", "threads")  # fmt: skip
NOT_SPEC = ("verb", "json", "bandwidth", "quiet", "verbose")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--stages", required=True, type=train.reader(int), metavar="K", help="stages to cut it into")
    train.add_fields(parser, FIELDS)
    parser.add_argument("--bandwidth", metavar="SPEED",
                        help="of the links between stages, such as 1Gbit; this machine's own unless given")  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the plan as one line of JSON")
    add_verbosity(parser)


def spec_of(args: argparse.Namespace) -> RunSpec:
    """The checked spec of the training to plan."""
    flags = {name: value for name, value in vars(args).items() if name not in NOT_SPEC}
    pipeline = {"strategy": PIPELINE.name, "workers": args.stages}
    return resolve(("flag", flags), ("stages", pipeline)).spec


def run(args: argparse.Namespace) -> int:
    spec = spec_of(args)
    link = parse_bandwidth(args.bandwidth, "--bandwidth") if args.bandwidth is not None else None
    from paceline.strategies.pipeline.planning import plan_cut

    progress = Progress(sys.stderr)
    plan = plan_cut(spec, progress, link)
    progress.done()
    print(dump(plan.as_dict()) if args.json else "\n".join(showing.lines(plan)))
    return 0


class Progress:
    """Shows on a terminal which layer is being measured."""

    def __init__(self, out: TextIO) -> None:
        self.out, self.shown = out, False

    def __call__(self, done: int, of: int) -> None:
        if self.out.isatty() and not quiet():
            print(f"\rmeasuring layer {done + 1} of {of}", end="", file=self.out, flush=True)
            self.shown = True

    def done(self) -> None:
        if self.shown:
            print("\r\033[K", end="", file=self.out, flush=True)

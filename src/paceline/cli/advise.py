"""paceline advise: is it worth distributing this training, how, over how many machines, at what cost?"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from paceline.advise.advice import MARGIN, Advice
from paceline.advise.decide import STAGES, Question, Training, advise
from paceline.advise.learned import LEAST_PART, learned
from paceline.advise.places import asked_places, own_place
from paceline.advise.prices import Prices, read_length, read_money, read_prices
from paceline.advise.probing import ProbesFailed, Probing
from paceline.advise.words import MOST_PROBES, within
from paceline.analysis.runs import LeftOut, Run, read_run
from paceline.bench.run import busy_now
from paceline.cli import train
from paceline.cli.main import Parser, add_json
from paceline.cli.output import check_output, make_folder, write_text
from paceline.cli.predict import worker_numbers
from paceline.comm.table import GLOO
from paceline.data.course import Course
from paceline.emulation.table import TABLE as DEVICES
from paceline.errors import EXIT_OK, UsageError, unknown, visible
from paceline.lab.plan import MOST_PREDICTED_RATE, Table
from paceline.options import LEARNING, PROBLEM
from paceline.predict.anatomy import data_of
from paceline.predict.device import device_named, on_device
from paceline.predict.fit import fit_probes
from paceline.predict.forecast import Predictor, unsupported
from paceline.predict.probes import Probe, check_alike, checked_probe, usable_probes
from paceline.run.folder import find_folders
from paceline.spec import FIELDS, OWN, RunSpec, resolve
from paceline.strategies.table import TABLE
from paceline.strict_json import dump

WORKERS = (1, 2, 4)
USUAL = tuple(name for name, each in TABLE.items() if each.averaging)[:2]  # that are measured
TIME_LIMIT = "4min"
CLEAR = 0.03  # a probability this close to 0 or 1 is not tried again

EPILOG = """\
examples:
  paceline advise -- train --model mine.py:build --data images:photos --workers 1,2,4
  paceline advise --link 1gbit -- train --model resnet50 --data cifar10 --epochs 90
  paceline advise runs/advise-resnet50-cifar10 --link 10gbit --workers 1,2,4,8,16 --epochs 90 -o advice.html
  paceline advise runs/advise-resnet50-cifar10 --epochs 90 --prices prices.toml --deadline 6h --budget 50EUR

With a training after --, short runs of it are made first, one after the other. Stop with Ctrl-C; run the same command
again to continue. The verdict is about this machine, or the machines of --link, --cluster or --prices.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="*", help="runs that were made, instead of new ones")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--link", metavar="RATE", help="machines like this one, with links of this speed, such as 1gbit")
    where.add_argument("--cluster", metavar="FILE", help="the machines that a lab file or preset describes")
    parser.add_argument("--prices", metavar="FILE", type=Path, help="what machines cost: a TOML file")
    parser.add_argument("--deadline", metavar="TIME", help="find the cheapest setting that ends in time, such as 6h")
    parser.add_argument("--budget", metavar="MONEY", help="find the fastest setting for this money, such as 50EUR")
    parser.add_argument("--margin", type=float, default=MARGIN, metavar="X",
                        help=f"how much faster it must be to be worth it ({MARGIN}: 10 %%)")  # fmt: skip
    parser.add_argument("--memory", metavar="SIZE", help="memory of a machine, such as 16GB (that of this one)")
    parser.add_argument("--device", metavar="NAME", help=f"compute on a device that was not measured, by published "
                        f"figures: {', '.join(DEVICES)}")  # fmt: skip
    parser.add_argument("--workers", metavar="N,N", help="RUNS: numbers of workers (1, 2, 4)")
    parser.add_argument("--strategy", metavar="NAME,NAME", help="RUNS: strategies (all that train the same model)")
    parser.add_argument("--batch", type=int, metavar="N", help="RUNS: global batch (that of one process)")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", type=int, metavar="N", help="RUNS: length of the training, in epochs")
    length.add_argument("--steps", type=int, metavar="N", help="RUNS: length of the training, in updates")
    parser.add_argument("--lab", metavar="LAB", help="make the runs in a lab: a preset, such as 1gbit, or a lab file")
    parser.add_argument("--runs-dir", type=Path, metavar="DIR",
                        help="folder of the runs that are made (runs/advise-MODEL-DATA)")  # fmt: skip
    parser.add_argument("--batches", action="store_true",
                        help="also make a tenth of the training with 1, 2 and 8 times the batch, to learn how many "
                        "updates larger batches need")  # fmt: skip
    parser.add_argument("--time-limit", default=TIME_LIMIT, metavar="TIME",
                        help=f"no further round of runs after this time ({TIME_LIMIT})")  # fmt: skip
    parser.add_argument("--fresh", action="store_true", help="remove earlier runs in --runs-dir first")
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help="also write a page with charts")
    add_json(parser, "the advice")


@dataclass(frozen=True)
class Asked:
    """What was asked, read from the command line."""

    args: argparse.Namespace
    training: Training
    workers: tuple[int, ...]
    strategies: tuple[str, ...] | None  # None: all that train the same model
    rate: int | None
    memory: int | None
    prices: Prices | None
    deadline: float | None
    budget: float | None


def run(args: argparse.Namespace) -> int:
    if bool(args.command) == bool(args.runs):
        raise UsageError(
            "give either RUNS, or a training after --, such as: paceline advise -- train --model resnet18 "
            "--data cifar10 --workers 1,2,4"
        )
    _check(args)
    if args.output:
        check_output(args.output, "advice.html")
    advice = _from_runs(args) if args.runs else _from_training(args)
    if args.output:
        from paceline.report.advice import advice_page
        from paceline.report.plotly_js import plotly_js

        make_folder(args.output.parent)
        write_text(args.output, advice_page(advice, plotly_js()))
    if args.json:
        page = {"page": str(args.output.resolve())} if args.output else {}
        print(dump(asdict(advice) | page))
        return EXIT_OK
    print(visible(rendered(advice)))
    if args.command:
        print(visible(f"\nFor other machines: paceline advise {shlex.quote(str(_runs_dir(args)))} --link 10gbit"))
    if args.output:
        print(visible(f"\nThe page is {args.output.resolve()}"))
    return EXIT_OK


def _check(args: argparse.Namespace) -> None:
    """Refuse wrong values before any run."""
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed}: give a whole number, 0 or more")
    if not 0 <= args.margin <= 10:
        raise UsageError(f"--margin {args.margin:g}: give a number from 0 to 10, such as 0.1 for 10 %")
    for name in ("epochs", "steps", "batch"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UsageError(f"--{name} {value}: give a whole number, at least 1")
    if args.budget and not args.prices:
        raise UsageError("--budget without --prices: give a file that says what machines cost (examples/prices.toml)")
    if args.device and not (args.link or args.cluster or args.prices):
        raise UsageError(f"--device {args.device} is about other machines: give their --link, --cluster or --prices")
    for name in ("workers", "strategy", "batch", "epochs", "steps"):
        if args.command and getattr(args, name) is not None:
            raise UsageError(f"--{name}: give it after --, as an option of the training")
    for name in ("lab", "batches"):
        if args.runs and getattr(args, name):
            raise UsageError(f"--{name} is for runs that are made now: leave it out, or give a training after --")


def _wanted(args: argparse.Namespace) -> dict[str, Any]:
    """The values of flags that both forms have, checked."""
    table = Table({"--link": args.link} if args.link else {}, "paceline advise", ("--link",))
    sizes = Table({"--memory": args.memory} if args.memory else {}, "paceline advise", ("--memory",))
    prices = read_prices(args.prices) if args.prices else None
    return {
        "rate": table.rate("--link", MOST_PREDICTED_RATE),
        "memory": sizes.size("--memory"),
        "prices": prices,
        "deadline": read_length(args.deadline, "--deadline") if args.deadline else None,
        "budget": read_money(args.budget, prices.pricing.currency, "--budget") if args.budget and prices else None,
    }


def _from_runs(args: argparse.Namespace) -> Advice:
    wanted = _wanted(args)
    runs, probes, unused = _read(args.runs)
    alone = [probe for probe in probes if probe.run.summary.ranks == 1]
    base = max(alone or probes, key=lambda probe: probe.spec.update_batch)
    spec, batch = base.spec, args.batch or base.spec.update_batch
    samples = data_of(spec).train - spec.validation_samples(data_of(spec))
    whole = [run for run in runs if not run.spec.get("steps")]  # they ended with their epochs
    epochs = args.epochs or max((int(run.spec.get("epochs", 0)) for run in whole), default=0)
    steps = args.steps or (Course(samples, batch).per_epoch * epochs if epochs else None)
    options = {
        name: value
        for name, value in spec.values().items()
        if name not in OWN
        and FIELDS[name].metadata["affects"] in (PROBLEM, LEARNING)
        and (value != FIELDS[name].default or name in ("model", "data"))
    }
    # Those of the strategies, too: a command has those of its own.
    for probe in probes:
        options |= {name: value for name, value in probe.spec.values().items()
                    if (name in OWN or name == "accumulate") and value not in (None, FIELDS[name].default)}  # fmt: skip
    options.pop("best_by", None)  # without a validation
    length = {"steps": args.steps} if args.steps else {"epochs": epochs} if epochs else {}
    training = _training(spec, options | length, batch, steps, samples)
    workers = _workers(args.workers) if args.workers else WORKERS
    names = _strategies(args.strategy) if args.strategy else None
    return _advice(Asked(args, training, workers, names, **wanted), probes, runs, _spent(probes), unused)


def _workers(text: str) -> tuple[int, ...]:
    return tuple(sorted(set(worker_numbers(text))))


def _read(paths: Sequence[Path]) -> tuple[list[Run], list[Probe], list[str]]:
    """All runs that can be read, those whose times can be used, and why others cannot."""
    folders = find_folders(paths)
    if not folders:
        raise UsageError(f"there is no run folder in {', '.join(map(str, paths))}: give the folders of short runs")
    runs, probes, unused = [], [], []
    for folder in folders:
        found = read_run(folder)
        if isinstance(found, LeftOut):
            unused.append(f"{folder} cannot be used: {found.why}")
            continue
        runs.append(found)
        try:
            probes.append(checked_probe(found))
        except UsageError as error:
            unused.append(str(error))
    check_alike(probes)
    if not probes:
        raise UsageError(f"no verdict: {unused[0]}")
    return runs, probes, unused


def _spent(probes: Sequence[Probe]) -> float:
    return sum(probe.run.summary.total_seconds or 0.0 for probe in probes)


def _training(
    spec: RunSpec, options: Mapping[str, Any], batch: int, steps: int | None, samples: int | None
) -> Training:
    assert spec.lr is not None
    return Training(spec.model, spec.data, options, batch, steps, samples, spec.lr, spec.optimizer)


def _strategies(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in TABLE:
            raise unknown("strategy", name, [each.name for each in TABLE.values() if each.simulation])
        if not TABLE[name].simulation or TABLE[name].single:
            raise UsageError(f"--strategy {name}: give strategies of several workers whose steps can be predicted")
        if not TABLE[name].exact:
            raise UsageError(f"--strategy {name} trains another model, and how many updates it needs is not known")
    return tuple(names)


def _from_training(args: argparse.Namespace) -> Advice:
    wanted = _wanted(args)
    options, spec, workers, names = job_of(args.command)
    if why := busy_now():
        raise UsageError(
            f"no verdict: this machine is busy ({why} in the last second), and runs that are made now would say "
            "nothing about an idle one. End the other programs, and run the same command again"
        )
    batch = spec.update_batch
    title = f"Runs for {shlex.join(args.command)}"
    # Messages between other machines go through sockets: then those of the runs do, too.
    elsewhere = GLOO.name if args.link or args.cluster or args.prices else None
    probing = Probing(options, names or USUAL, workers, batch, args.lab, _runs_dir(args), title, emulated=spec.emulated,
                      transport=options.get("transport") or elsewhere)  # fmt: skip
    limit = read_length(args.time_limit, "--time-limit")
    asked, advice, why = None, None, ""
    rounds = probing.rounds(lambda *said: _say(args.json, *said), fresh=args.fresh)
    for number, (probes, unused, spent) in enumerate(rounds, 1):
        why = unused[0] if unused else "no run could be used"
        if _complete(probes, probing):
            if asked is None:
                samples = data_of(spec).train - spec.validation_samples(data_of(spec))
                steps = spec.steps or Course(samples, batch).per_epoch * spec.epochs
                training = _training(spec, options, batch, steps, samples)
                asked = Asked(args, training, workers, names, **wanted)
            # A deadline that is missed now may be met with more certainty.
            advice = _from_probes(replace(asked, deadline=None, budget=None), probes)
            if (number > 1 and _clear(advice)) or _enough(advice):
                break
            _say(args.json, f"After {number} round{'s' * (number > 1)}: {_so_far(advice)}", "\n")
        if spent * (number + 1) / number > limit:
            break
    if advice is None or asked is None:
        raise ProbesFailed(f"no verdict: {why}; end other programs, and run the same command with --fresh")
    if not args.batches:
        return _from_probes(asked, probes)
    part = math.ceil(LEAST_PART * (asked.training.steps or 0) * batch)
    folders = probing.branches(part, asked.training.lr, spec.optimizer, lambda *said: _say(args.json, *said))
    branches = [run for run in map(read_run, folders) if isinstance(run, Run)]
    return _from_probes(asked, [*probes, *usable_probes(folders)[0]], branches)


def _from_probes(asked: Asked, probes: Sequence[Probe], others: Sequence[Run] = ()) -> Advice:
    return _advice(asked, probes, [*others, *(probe.run for probe in probes)], _spent(probes), [])


def _runs_dir(args: argparse.Namespace) -> Path:
    """The folder of the runs that are made: that of the model and data, unless it is given."""
    if args.runs_dir:
        return Path(args.runs_dir)
    _, spec, _, _ = job_of(args.command)
    name = "".join(c if c.isalnum() or c in "-_." else "-" for c in f"advise-{spec.model}-{spec.data}")
    return Path("runs", name)


def job_of(words: list[str]) -> tuple[dict[str, Any], RunSpec, tuple[int, ...], tuple[str, ...] | None]:
    """The training: its options as they were given, its spec for one process, numbers of workers, and strategies."""
    if words[0] != "train":
        raise UsageError(
            "give the training after --, such as: paceline advise -- train --model resnet18 --data cifar10"
        )
    parser = Parser(prog="paceline train", allow_abbrev=False)
    train.add_arguments(parser)
    layers = train.layers_of(parser.parse_args(words[1:]))
    given: dict[str, Any] = {}
    for _, values in layers:
        given |= values
    workers, strategy = given.pop("workers", None), given.pop("strategy", None)
    names = _strategies(str(strategy)) if strategy else None
    numbers = _workers(str(workers)) if workers else WORKERS
    decided = ("workers", "strategy")
    plain = [(source, {key: value for key, value in values.items() if key not in decided}) for source, values in layers]
    alone = [(source, {key: value for key, value in values.items() if key not in OWN}) for source, values in plain]
    spec = resolve(*alone, here=False).spec
    for name in names or USUAL:  # refuses wrong values before any run
        few = max(2, *numbers) if TABLE[name].part else 2
        own = [(source, {key: value for key, value in values.items() if key not in OWN or key in TABLE[name].names})
               for source, values in plain]  # fmt: skip
        resolve(*own, ("flag", {"strategy": name, "workers": few}), here=False)
    known = {key for name in names or TABLE for key in TABLE[name].names}
    for key in given:
        if key in OWN and key not in known:
            raise UsageError(f"--{key.replace('_', '-')}: {', '.join(names or ())} has no such option; leave it out")
    return given, spec, numbers, names


def _complete(probes: Sequence[Probe], probing: Probing) -> bool:
    """Whether there is a run of one process, and one of several if that is possible."""
    several, there = set(probing.several), {probe.workers for probe in probes}
    return 1 in there and (not several or bool(several & there))


def _clear(advice: Advice) -> bool:
    return advice.best is None or not CLEAR < advice.best.faster < 1 - CLEAR


def _enough(advice: Advice) -> bool:
    """Whether the runs have taken their part of the training's time."""
    alone = advice.alone
    return bool(alone and alone.seconds and advice.probe_seconds > MOST_PROBES * alone.seconds.value)


def _so_far(advice: Advice) -> str:
    if advice.best is None:
        return "nothing to compare"
    return f"{within(advice.best.relative)} of the time of one process; not certain yet"


def _advice(asked: Asked, probes: Sequence[Probe], runs: Sequence[Run], spent: float, unused: Sequence[str]) -> Advice:
    args, training = asked.args, asked.training
    fit = fit_probes(probes)
    if args.device:
        fit = on_device(fit, probes, device_named(args.device))
    names, left_out = asked.strategies, list(unused)
    if names is None:
        able = [name for name, each in TABLE.items() if each.simulation and each.exact and not each.single]
        reasons = {name: unsupported(probes, name, {}) for name in able}
        names = tuple(name for name in able if not reasons[name])
        left_out += [reason for reason in reasons.values() if reason]
        others = [name for name, each in TABLE.items() if each.simulation and not each.exact]
        left_out.append(f"{', '.join(others)}: they train another model, and how many updates it needs is not known")
    ranks = max(*asked.workers, *STAGES) + max(1, *(probe.servers for probe in probes))
    own = own_place(probes, asked.memory)
    places = asked_places(
        fit, probes, ranks, rate=asked.rate, cluster=args.cluster, prices=asked.prices, memory=asked.memory
    )
    total = training.steps * training.batch if training.steps else None
    law, learning = learned(runs, total)
    question = Question(
        training,
        own,
        places or [own],
        names,
        asked.workers,
        args.margin,
        asked.deadline,
        asked.budget,
        asked.prices.pricing if asked.prices else None,
        spent,
        left_out,
    )
    return advise(question, Predictor.of(fit, probes, args.seed), law, learning)


def rendered(advice: Advice) -> str:
    lines = [*textwrap.wrap(advice.sentence, 110), ""]
    for reason in advice.reasons:
        command = reason.rpartition(": `")
        if reason.endswith("`") and command[1]:
            lines += [*textwrap.wrap(f"{command[0]}:", 110, initial_indent="- ", subsequent_indent="  ")]
            lines.append(f"    {command[2].rstrip('`')}")
        else:
            lines += textwrap.wrap(reason, 110, initial_indent="- ", subsequent_indent="  ")
    if advice.emulated:
        lines.append(f"- EMULATED compute ({advice.emulated}): nothing was trained.")
    return "\n".join(lines)


def _say(as_json: bool, text: str, end: str) -> None:
    print(text, end=end, flush=True, file=sys.stderr if as_json else sys.stdout)

"""paceline predict: step time and throughput at numbers of workers, links and strategies that nobody has run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from paceline.cli.main import add_json
from paceline.cli.output import check_output, make_folder, write_text
from paceline.comm import table as transports
from paceline.emulation.table import TABLE as DEVICES
from paceline.errors import EXIT_OK, UsageError, unknown, visible
from paceline.lab.plan import MOST_PREDICTED_RATE, PRESETS, Table, read_plan
from paceline.predict.calibration import (
    SHIPPED,
    UNCALIBRATED,
    Calibration,
    calibrate,
    calibration_text,
    check_disjoint,
    distance,
    fingerprint,
    read_calibration,
)
from paceline.predict.cluster import Cluster, alike, of_lab
from paceline.predict.device import device_named, on_device
from paceline.predict.fit import fit_probes
from paceline.predict.forecast import MOST_WORKERS, Forecast, forecasts, score, unsupported
from paceline.predict.outlook import outlook
from paceline.predict.probes import Probe, read_probes
from paceline.predict.ranges import Range
from paceline.report.plotly_js import plotly_js
from paceline.report.prediction import prediction_page
from paceline.strategies.table import TABLE

EPILOG = """\
examples:
  paceline predict runs/one runs/two runs/four --workers 1,2,4,8,16
  paceline predict runs/probes --workers 2,8,64 --link 10gbit --strategy all
  paceline predict runs/probes --workers 6 --lab cluster.toml --strategy ring
  paceline predict runs/probes --workers 8 --link 10gbit --device v100
  paceline predict runs/probes --workers 1,2,4,8,16,32,64 --link 1gbit -o prediction.html
  paceline predict runs/probes --score runs/larger      how good predictions of runs that you have made are

RUNS are short runs of the same training with 1, 2 and 4 workers, on one machine or in a lab.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    parser.add_argument("runs", metavar="RUNS", type=Path, nargs="+", help="folders of short runs, or of many of them")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workers", metavar="N,N", help=f"numbers of workers, up to {MOST_WORKERS:,}")
    what.add_argument("--score", metavar="RUN", type=Path, nargs="+",
                      help="predict these runs, and show how far that is from what was measured")  # fmt: skip
    parser.add_argument(
        "--strategy", metavar="NAME,NAME", help="strategies to predict, or all (default: those of the runs)"
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--link", metavar="RATE", help="one worker per machine, with links of this speed, such as 10gbit"
    )
    where.add_argument("--lab", metavar="FILE", help="the machines that a lab file or preset describes")
    parser.add_argument("--device", metavar="NAME", help=f"compute on a device that was not measured, by published "
                        f"figures: {', '.join(DEVICES)}")  # fmt: skip
    parser.add_argument("--batch-size", type=int, metavar="N", help="samples of a worker's batch (that of the runs)")
    parser.add_argument("--calibrate", type=Path, metavar="FILE",
                        help="with --score: write how wide intervals must be for 90 %% of such runs")  # fmt: skip
    parser.add_argument("--calibration", type=Path, metavar="FILE",
                        help="widen intervals by what --calibrate has written (not widened)")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="random seed (0)")
    parser.add_argument("-o", "--output", metavar="FILE", type=Path,
                        help="also write a page with charts, what limits each strategy, and all numbers")  # fmt: skip
    add_json(parser, "the predictions")


def run(args: argparse.Namespace) -> int:
    if args.seed < 0:
        raise UsageError(f"--seed {args.seed}: give a whole number, 0 or more")
    if args.score:
        return _score(args)
    workers = worker_numbers(args.workers)
    if args.batch_size is not None and args.batch_size < 1:
        raise UsageError(f"--batch-size {args.batch_size}: give a whole number, at least 1")
    if args.calibrate:
        raise UsageError("--calibrate needs --score: runs to compare predictions with")
    known = _calibration(args)
    if args.output:
        check_output(args.output, "prediction.html")
    device = device_named(args.device) if args.device else None
    probes = read_probes(args.runs)
    check_disjoint(probes, known.runs, [])
    given: dict[str, Any] = {"batch_size": args.batch_size} if args.batch_size else {}
    strategies, left_out = _strategies(args.strategy, probes, given)
    cluster = _cluster(args, probes, max(workers))
    fit = fit_probes(probes)
    if device:
        fit = on_device(fit, probes, device)
    impossible = left_out if args.strategy == "all" else None
    found = list(forecasts(fit, probes, strategies, workers, cluster, given, args.seed, impossible, known))
    if not found:
        why = "; ".join(left_out) or f"{', '.join(strategies)} cannot have so many workers"
        raise UsageError(f"--workers {args.workers}: no setting can be predicted: {why}; try --strategy all")
    if args.output:
        own = not args.link and not args.lab and not args.device
        where = f"{_where(args)}, each with a {args.device}" if args.device else _where(args)
        shown = outlook(fit, probes, found, where, given, own=own, left_out=left_out)
        make_folder(args.output.parent)
        write_text(args.output, prediction_page(shown, plotly_js()))
    if args.json:
        page = {"page": str(args.output.resolve())} if args.output else {}
        emulated = probes[0].run.emulated
        print(json.dumps({"emulated": emulated, "predictions": [asdict(each) for each in found], **page}))
        return EXIT_OK
    print(_introduction(probes, args))
    for line in [*rows_of(found), *(f"Not predicted: {reason}" for reason in left_out)]:
        print(line)
    if args.output:
        print(visible(f"The page is {args.output.resolve()}"))
    return EXIT_OK


def _score(args: argparse.Namespace) -> int:
    for name in ("link", "lab", "device", "strategy", "batch_size", "output"):
        if getattr(args, name):
            raise UsageError(
                f"--{name.replace('_', '-')} with --score: runs are predicted as they were made; leave it out"
            )
    if args.calibrate and args.calibrate.is_dir():
        raise UsageError(f"--calibrate {args.calibrate} is a folder: name a file in it")
    if args.calibrate and args.calibration:
        raise UsageError("--calibrate with --calibration: it is measured without any; leave one out")
    probes = read_probes(args.runs)
    held = read_probes(args.score)
    known = UNCALIBRATED if args.calibrate else _calibration(args)
    found = score(fit_probes(probes), probes, held, args.seed, known)
    if args.calibrate:
        used = {fingerprint(run) for run in (*probes, *held)}
        made = calibrate([distance(each.measured, each.predicted) for each in found], used)
        make_folder(args.calibrate.parent)
        write_text(args.calibrate, calibration_text(made))
    errors = np.array([abs(each.error) for each in found])
    figures = {"runs": len(found), "mean_error": float(errors.mean()), "error_95": float(np.quantile(errors, 0.95)),
               "covered": sum(each.inside for each in found) / len(found)}  # fmt: skip
    if args.json:
        factor = {"factor": made.factor} if args.calibrate else {}
        print(json.dumps({**figures, **factor, "scored": [asdict(each) for each in found]}))
        return EXIT_OK
    rows = [("run", "strategy", "workers", "measured", "predicted (90 % interval)", "error", "")]
    rows += [(each.name, each.strategy, f"{each.workers:,}", f"{each.measured:.4g} s",
              f"{each.predicted.value:.4g} s ({each.predicted.low:.4g}–{each.predicted.high:.4g})",
              f"{100 * each.error:+.1f} %", "" if each.inside else "outside") for each in found]  # fmt: skip
    print("\n".join(_columns(rows)))
    print(f"Mean error {100 * figures['mean_error']:.1f} %, 95 % of errors up to {100 * figures['error_95']:.1f} %; "
          f"{100 * figures['covered']:.0f} % of {len(found)} runs are inside their interval")  # fmt: skip
    if args.calibrate:
        print(f"For 90 % of such runs, intervals must be {made.factor:.2f} times as wide as without calibration:"
              f"\n  paceline predict … --calibration {args.calibrate}")  # fmt: skip
    return EXIT_OK


def _calibration(args: argparse.Namespace) -> Calibration:
    return read_calibration(args.calibration) if args.calibration else SHIPPED


def worker_numbers(text: str) -> list[int]:
    try:
        found = [int(word) for word in text.split(",")]
    except ValueError:
        raise UsageError(f"--workers {text}: give whole numbers with commas, such as 1,2,4,8") from None
    if not all(1 <= each <= MOST_WORKERS for each in found):
        raise UsageError(f"--workers {text}: give numbers from 1 to {MOST_WORKERS:,}")
    return found


def _strategies(text: str | None, probes: list[Probe], given: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The strategies to predict, and why others of `all` are left out."""
    able = [name for name, strategy in TABLE.items() if strategy.simulation]
    if text == "all":
        reasons = {name: unsupported(probes, name, given) for name in able}
        return [name for name in able if not reasons[name]], [reason for reason in reasons.values() if reason]
    names = text.split(",") if text else list(dict.fromkeys(probe.run.summary.strategy for probe in probes))
    for name in names:
        if name not in TABLE:
            raise unknown("strategy", name, able)
        if name not in able:
            raise UsageError(f"--strategy {name}: its steps cannot be predicted; these can: {', '.join(able)}")
    return names, []


def _cluster(args: argparse.Namespace, probes: list[Probe], workers: int) -> Cluster | None:
    ranks = workers + max(1, *(probe.servers for probe in probes))
    if args.link or args.lab:
        _check_sent(probes)
    if args.link:
        rate = Table({"--link": args.link}, "paceline predict", ("--link",)).rate("--link", MOST_PREDICTED_RATE)
        return alike(ranks, rate or 0, 1.0 if args.device else probes[0].cluster.nodes[0].speed)
    plan = read_plan(args.lab) if args.lab and args.lab not in PRESETS else None
    if plan and any(node.processes for node in plan.nodes):
        raise UsageError(f"--lab {args.lab}: several processes on a node are not predicted: leave `processes` out")
    if args.lab in PRESETS:
        return of_lab(read_plan(f"{args.lab}:{ranks}"))
    return of_lab(plan) if plan else None


def _check_sent(probes: list[Probe]) -> None:
    """Refuse runs whose ranks sent no messages: they do not tell what messages cost."""
    together = [probe for probe in probes if probe.workers > 1]
    used = [transports.TABLE.get(probe.spec.transport) for probe in together]
    if used and all(each and each.on_one_machine for each in used):
        raise UsageError(
            f"the workers of {together[0].run.folder} share memory, which does not tell what messages between machines "
            "cost: make the runs with `paceline probe`, or with --transport gloo"
        )


def _where(args: argparse.Namespace) -> str:
    if args.link:
        return f"links of {args.link}"
    return f"the machines of {args.lab}" if args.lab else "the machines of the runs"


def _introduction(probes: list[Probe], args: argparse.Namespace) -> str:
    first, where = probes[0], _where(args)
    kind = f"emulated compute ({first.spec.compute}); " if first.run.emulated else ""
    kind = f"compute of a {args.device}, by published figures; " if args.device else kind
    numbers = ", ".join(str(count) for count in sorted({probe.workers for probe in probes}))
    return (
        f"Predicted, not measured: {first.spec.model} on {first.spec.data}, {where}; {kind}runs used: {len(probes)}, "
        f"workers: {numbers}; 90 % intervals"
    )


def rows_of(found: list[Forecast]) -> list[str]:
    rows = [("strategy", "workers", "step", "samples/s", "efficiency", "memory", "", "")]
    for each in found:
        step, speed = each.step_seconds, each.samples_per_second
        part = each.efficiency
        rows.append((
            each.strategy,
            f"{each.workers:,}",
            f"{step.value:.4g} s ({step.low:.4g}–{step.high:.4g})",
            f"{speed.value:,.4g} ({speed.low:,.4g}–{speed.high:,.4g})",
            f"{100 * part.value:.0f} % ({100 * part.low:.0f}–{100 * part.high:.0f})",
            megabytes(each.memory),
            f"limited by {each.limit} ({each.limit_seconds:.2g} s)",
            _remarks(each),
        ))  # fmt: skip
    return _columns(rows)


def megabytes(memory: Range) -> str:
    value, low, high = (f"{each / 1e6:,.0f}" for each in (memory.value, memory.low, memory.high))
    return f"{value} MB ({low}–{high})"


def _remarks(each: Forecast) -> str:
    extrapolated = f"EXTRAPOLATED: {'; '.join(each.beyond)}" if each.beyond else ""
    return "; ".join(filter(None, ["memory estimated" if each.memory_estimated else "", extrapolated]))


def _columns(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows]

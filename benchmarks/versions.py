"""Two versions of this project beside each other: samples/s of every strategy, interleaved in one run, as ratios.

    python benchmarks/versions.py path/to/another/paceline [--rounds 8] [--steps 80] [--workers 2]

Every round trains with every strategy in both versions, one right after the other, in a new random order, with one
thread a process; nothing else should run on the machine. Shown is the mean ratio of this version to the other, with its
95 % interval: a version is slower where the whole interval is below 1.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from data_parallel import measure
from scipy import stats

from paceline.strategies.table import TABLE

BIN = Path(sys.executable).parent


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """The mean of the ratios, and the 95 % interval of it."""
    mean = statistics.fmean(ratios)
    if len(ratios) < 2:
        return mean, float("-inf"), float("inf")
    margin = stats.t.ppf(0.975, len(ratios) - 1) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return mean, mean - margin, mean + margin


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("other", help="the command of the version to compare with")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", default=list(TABLE))
    args = parser.parse_args()
    known = subprocess.run([args.other, "train", "--help"], capture_output=True, text=True, check=True).stdout
    args.strategies = [name for name in args.strategies if name in known]
    both = (str(BIN / "paceline"), args.other)
    words = ["train", "--steps", str(args.steps), "--threads", "1", "--log-every", "0", "--json", "--no-test"]
    rates: dict[str, list[tuple[float, float]]] = {name: [] for name in args.strategies}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for turn in range(args.rounds):
            dice, order = random.Random(turn), list(rates)
            dice.shuffle(order)
            for number, name in enumerate(order, 1):
                print(f"\rround {turn + 1}/{args.rounds}, strategy {number}/{len(order)}   ", end="", file=sys.stderr)
                workers = 1 if TABLE[name].single else args.workers
                found = {}
                for version in dice.sample(both, 2):
                    command = [version, *words, "--strategy", name, "--workers", str(workers)]
                    found[version] = measure([command], folder)
                rates[name].append((found[both[0]], found[both[1]]))
    print(file=sys.stderr)
    print(f"mnist-cnn, batch 128 a worker, {args.steps} steps, {args.rounds} rounds, {os.cpu_count()} cores\n")
    print(f"{'':<14}{'this, samples/s':>16}{'other':>10}   {'this ÷ other (95 % interval)'}")
    for name, pairs in rates.items():
        mean, low, high = interval([ours / theirs for ours, theirs in pairs])
        ours, theirs = (statistics.median(side) for side in zip(*pairs, strict=True))
        slower = "   slower" if high < 1 else ""
        print(f"{name:<14}{ours:>16,.0f}{theirs:>10,.0f}   {mean:.3f} ({low:.3f}–{high:.3f}){slower}")


if __name__ == "__main__":
    main()

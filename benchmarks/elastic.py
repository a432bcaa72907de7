"""What --elastic costs without faults, and how a training fares when its workers are killed and stopped.

    python benchmarks/elastic.py cost [--rounds 20] [--workers 4]
    python benchmarks/elastic.py kills [--minutes 5] [--workers 4]                 # time until the next update
    python benchmarks/elastic.py storm [--minutes 4] [--rounds 1] [--workers 4 2]  # goodput beside runs without faults

mnist-cnn, 128 samples for each worker and update, one thread each; nothing else should run on the machine. `cost` runs
both kinds in turn, in random order; shown is the median ratio of their speeds within a round, with its 95 % interval.
`storm` makes runs of equal length in turn, without faults and with 60 and 120 faults an hour, and compares updates.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from allreduce import interval
from data_parallel import BIN, interleaved, measure

from paceline.run.folder import read_summary

TRAIN = ["train", "--model", "mnist-cnn", "--dropout", "0", "--data", "mnist-mini", "--strategy", "allreduce",
         "--threads", "1", "--log-every", "0", "--no-test", "--resume", "never"]  # fmt: skip
ENDLESS = ["--steps", "1000000", "--epochs", "100000", "--decay", "none"]


def cost(rounds: int, workers: int) -> None:
    command = [str(BIN / "paceline"), *TRAIN, "--workers", str(workers), "--steps", "60", "--json"]
    kinds = {"fixed": [], "elastic": ["--elastic", "1"]}
    rates: dict[str, list[float]] = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for name in interleaved(kinds, rounds):
            rates[name].append(measure([[*command, *kinds[name]]], folder))
    ratios = [a / b for a, b in zip(rates["elastic"], rates["fixed"], strict=True)]
    print(f"\n{workers} workers, {rounds} rounds: elastic ÷ fixed {interval(ratios)}")


def run_for(seconds: float, words: list[str], folder: str, name: str) -> str:
    """Run a training for so long, and stop it; what it printed."""
    command = [str(BIN / "paceline"), *words, "--output-dir", folder, "--name", name]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          start_new_session=True) as process:  # fmt: skip
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
        said, _ = process.communicate(timeout=60)
    return said


def kills(minutes: float, workers: int) -> None:
    words = ["chaos", "--kill", "every=3s", "--", *TRAIN, *ENDLESS, "--workers", str(workers), "--elastic", "1"]
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        print("\n".join(run_for(60 * minutes, words, folder, "kills").splitlines()[-8:]))


def storm(minutes: float, workers: int, turn: int) -> None:
    elastic = [*TRAIN, *ENDLESS, "--workers", str(workers), "--elastic", "1"]
    updates = {}
    for faults in (0, 60, 120):
        each = f"every={2 * 3600 / faults:.0f}s" if faults else ""
        chaos = (
            ["chaos", "--json", "--seed", str(turn), "--kill", each, "--stop", f"{each},for=5s", "--"] if faults else []
        )
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            said = run_for(60 * minutes, [*chaos, *elastic], folder, "run")
            summary = read_summary(Path(folder) / "run")
        assert summary is not None
        updates[faults] = summary.steps
        line = f"{workers} workers, {faults} faults an hour: {summary.steps} updates, ÷ without faults "
        line += f"{updates[faults] / updates[0]:.3f}"
        if faults:
            found = json.loads(said.splitlines()[-1])
            line += f", {len(found['faults'])} faults, participation {found['participation']:.3f}, recovered in "
            line += f"{[round(seconds, 2) for seconds in found['recovered']]} s, back in "
            line += f"{[round(seconds, 2) for seconds in found['back']]} s"
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("cost", "kills", "storm"))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--minutes", type=float)
    parser.add_argument("--workers", type=int, nargs="+", default=[4])
    args = parser.parse_args()
    print(time.strftime("%Y-%m-%d"), f"{os.cpu_count()} cores")
    for turn in range(args.rounds or 1) if args.what == "storm" else (0,):
        for workers in args.workers:
            if args.what == "cost":
                cost(args.rounds or 20, workers)
            elif args.what == "kills":
                kills(args.minutes or 5.0, workers)
            else:
                storm(args.minutes or 4.0, workers, turn)


if __name__ == "__main__":
    main()

"""This project beside plain PyTorch and PyTorch DDP: samples/s on a model, interleaved in one run, as ratios.

    python benchmarks/data_parallel.py [--model mnist-cnn] [--rounds 5] [--steps 80] [--workers 2]
    python benchmarks/data_parallel.py --model gpt-10m --steps 16

Every round runs every contender once, in a new random order, each in fresh processes with one thread; nothing else
should run on the machine. A ratio compares the two sides within each round; shown are its median, smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

BIN = Path(sys.executable).parent
PEER = Path(__file__).parent / "peer.py"
# What launch/memory.py does for this project's ranks.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(2047 << 20),
               "MALLOC_TOP_PAD_": str(64 << 20)}  # fmt: skip
STRATEGIES = ("allreduce", "ring", "reduce-bcast", "gather")


# By model: samples of a process's batch, and what trains it otherwise than by default.
MODELS = {"mnist-cnn": (128, []), "gpt-10m": (4, ["--data", "shakespeare:block=256", "--optimizer", "adamw"])}


def contenders(model: str, steps: int, workers: int, transports: list[str]) -> dict[str, list[str]]:
    skip = min(30, steps // 4)  # as samples_per_second in a summary does
    batch, more = MODELS[model]
    both = ["--model", model, "--steps", str(steps)]
    peer = [str(PEER), *both, "--skip", str(skip), "--batch", str(batch)]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", str(workers)]
    ours = [str(BIN / "paceline"), "train", *both, *more, "--batch-size", str(batch), "--threads", "1", "--log-every",
            "0", "--no-test", "--resume", "never", "--json"]  # fmt: skip
    found = {
        "plain PyTorch, 1 process": [sys.executable, *peer],
        "plain PyTorch, tuned, 1 process": [sys.executable, *peer, "--tuned"],
        "paceline sequential, 1 process": ours,
        f"DDP gloo, {workers} processes": [*torchrun, *peer],
        f"DDP gloo, tuned, {workers} processes": [*torchrun, *peer, "--tuned"],
    }
    for transport in transports:
        for strategy in STRATEGIES:
            name = f"paceline {strategy}, {transport}, {workers} processes"
            found[name] = [*ours, "--workers", str(workers), "--strategy", strategy, "--transport", transport]
    return found


def measure(command: list[str], folder: str) -> float:
    """Samples/s of one run."""
    own = "paceline" in Path(command[0]).name
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    if "--tuned" in command:
        variables |= KEEP_MEMORY
    done = subprocess.run(
        [*command, *(["--output-dir", folder] if own else [])],
        env=variables, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    last = done.stdout.strip().splitlines()[-1]
    if not own:
        return float(last)
    summary = json.loads(last)
    return float(summary.get("samples_per_second") or summary["images_per_second"])  # in earlier versions


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="mnist-cnn")
    parser.add_argument("--transports", nargs="*", default=["gloo", "mpi"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    commands = contenders(args.model, args.steps, args.workers, args.transports)
    rates: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for turn in range(args.rounds):
            order = list(commands)
            random.Random(turn).shuffle(order)
            for number, name in enumerate(order, 1):
                print(
                    f"\rround {turn + 1}/{args.rounds}, run {number}/{len(order)}   ",
                    end="",
                    file=sys.stderr,
                    flush=True,
                )
                rates[name].append(measure(commands[name], folder))
    print(file=sys.stderr)
    ddp, tuned = (f"DDP gloo, {t}{args.workers} processes" for t in ("", "tuned, "))
    alone = "paceline sequential, 1 process"
    batch, cores = MODELS[args.model][0], os.cpu_count()
    print(f"{args.model}, batch {batch} a process, {args.steps} steps, {args.rounds} rounds, {cores} cores\n")
    print(f"{'':<38}{'samples/s':>10}{'÷ DDP':>20}{'÷ DDP tuned':>20}{'÷ paceline alone':>20}")
    for name, mine in rates.items():
        cells = []
        for rival in (ddp, tuned, alone):
            ratios = [a / b for a, b in zip(mine, rates[rival], strict=True)]
            cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})")
        print(f"{name:<38}{statistics.median(mine):>10,.0f}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()

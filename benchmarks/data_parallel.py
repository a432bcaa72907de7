"""This project beside plain PyTorch and PyTorch DDP: samples/s on a model, interleaved in one run, as ratios.

    python benchmarks/data_parallel.py [--model mnist-cnn] [--rounds 5] [--steps 80] [--workers 2]
    python benchmarks/data_parallel.py --model resnet50v2 --transports shm --strategies allreduce sharded --steps 16
    python benchmarks/data_parallel.py --workers 8 --steps 40      # more processes than cores, beside as many as cores

Every round runs every contender once, in a new random order, each in fresh processes with one thread; nothing else
should run on the machine. A ratio compares the two sides within each round; shown are its median, smallest and largest.
`at once` are as many processes that each train alone at the same time: what no data parallelism can exceed. `recovered`
is the part of the time that tuned DDP loses to `at once` that a contender does not lose.
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
from collections.abc import Iterable, Iterator
from pathlib import Path

BIN = Path(sys.executable).parent
PEER = Path(__file__).parent / "peer.py"
# What launch/memory.py does for this project's ranks.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(2047 << 20), "MALLOC_TRIM_THRESHOLD_": str(2047 << 20),
               "MALLOC_TOP_PAD_": str(64 << 20)}  # fmt: skip
STRATEGIES = ("allreduce", "ring", "sharded", "reduce-bcast", "gather")
ADAMW = ["--optimizer", "adamw"]
# By model: samples of a process's batch, data, and what trains it otherwise than by default.
MODELS = {
    "mnist-cnn": (128, "mnist-mini", []),
    "resnet18": (32, "synthetic:3x32x32,train=2000,test=100", []),
    "resnet50v2": (16, "synthetic:3x64x64,classes=1000,train=2000,test=100", []),
    "gpt-10m": (4, "shakespeare:block=256", ADAMW),
}
AT_ONCE, ALONE = "at once", "paceline alone"
Commands = list[list[str]]  # that run at the same time


def contenders(
    model: str, steps: int, workers: int, transports: list[str], strategies: list[str]
) -> dict[str, Commands]:
    skip = min(30, steps // 4)  # as samples_per_second in a summary does
    batch, data, more = MODELS[model]
    both = ["--model", model, "--data", data, "--steps", str(steps)]
    peer = [str(PEER), *both, "--skip", str(skip), "--batch", str(batch)]
    ours = [str(BIN / "paceline"), "train", *both, *more, "--batch-size", str(batch), "--threads", "1", "--log-every",
            "0", "--no-test", "--resume", "never", "--json"]  # fmt: skip
    found = {
        "plain PyTorch": [[sys.executable, *peer]],
        "plain PyTorch, tuned": [[sys.executable, *peer, "--tuned"]],
        ALONE: [ours],
        AT_ONCE: [ours] * workers,
    }
    for number in sorted({workers, min(workers, os.cpu_count() or workers)}):
        torchrun = [str(BIN / "torchrun"), "--nproc-per-node", str(number), *peer]
        found[f"DDP, {number}"] = [torchrun]
        found[f"DDP tuned, {number}"] = [[*torchrun, "--tuned"]]
        for transport in transports:
            for strategy in strategies:
                chosen = ["--workers", str(number), "--strategy", strategy, "--transport", transport]
                found[f"{strategy}, {transport}, {number}"] = [[*ours, *chosen]]
    return found


def measure(commands: Commands, folder: str) -> float:
    """Samples/s of all these commands, run at the same time."""
    started = []
    for number, command in enumerate(commands):
        own = "paceline" in Path(command[0]).name
        variables = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | (KEEP_MEMORY if "--tuned" in command else {})
        words = [*command, *(["--output-dir", f"{folder}/{number}"] if own else [])]
        pipe = subprocess.PIPE
        started.append(subprocess.Popen(words, env=variables, stdout=pipe, stderr=pipe, text=True))
    rates = []
    for command, process in zip(commands, started, strict=True):
        out, errors = process.communicate(timeout=600)
        if process.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{errors}")
        last = out.strip().splitlines()[-1]
        rates.append(float(json.loads(last)["samples_per_second"]) if last.startswith("{") else float(last))
    return sum(rates)


def interleaved(names: Iterable[str], rounds: int) -> Iterator[str]:
    """Every name once in each round, in a new random order; shows how far it is."""
    for turn in range(rounds):
        order = list(names)
        random.Random(turn).shuffle(order)
        for number, name in enumerate(order, 1):
            where = f"round {turn + 1}/{rounds}, run {number}/{len(order)}"
            print(f"\r{where}   ", end="", file=sys.stderr, flush=True)
            yield name


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="mnist-cnn")
    parser.add_argument("--transports", nargs="*", default=["shm", "gloo", "mpi"])
    parser.add_argument("--strategies", nargs="*", choices=STRATEGIES, default=[*STRATEGIES])
    parser.add_argument("--only", nargs="*", help="contenders whose names begin so, besides those compared with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    commands = contenders(args.model, args.steps, args.workers, args.transports, args.strategies)
    compared = [AT_ONCE, f"DDP, {args.workers}", f"DDP tuned, {args.workers}", ALONE]
    if args.only is not None:
        commands = {
            name: each for name, each in commands.items() if name in compared or name.startswith(tuple(args.only))
        }
    rates: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for name in interleaved(commands, args.rounds):
            rates[name].append(measure(commands[name], folder))
    print(file=sys.stderr)
    batch, cores = MODELS[args.model][0], os.cpu_count()
    print(f"{args.model}, batch {batch} a process, {args.steps} steps, {args.rounds} rounds, {cores} cores\n")
    crowded = args.workers > (cores or args.workers)
    titles = [f"÷ {rival}" for rival in compared] + ["recovered", *([f"÷ itself, {cores}"] if crowded else [])]
    print(f"{'':<26}{'samples/s':>10}" + "".join(f"{title:>22}" for title in titles))
    for name, mine in rates.items():
        cells = [middle([a / b for a, b in zip(mine, rates[rival], strict=True)]) for rival in compared]
        lost = zip(mine, rates[compared[2]], rates[AT_ONCE], strict=True)
        cells.append(middle([(1 / tuned - 1 / own) / (1 / tuned - 1 / best) for own, tuned, best in lost]))
        if fewer := rates.get(f"{name.removesuffix(f', {args.workers}')}, {cores}") if crowded else None:
            cells.append(middle([a / b for a, b in zip(mine, fewer, strict=True)]))
        print(f"{name:<26}{statistics.median(mine):>10,.1f}" + "".join(f"{cell:>22}" for cell in cells))


def middle(ratios: list[float]) -> str:
    return f"{statistics.median(ratios):.3f} ({min(ratios):.2f}–{max(ratios):.2f})"


if __name__ == "__main__":
    main()

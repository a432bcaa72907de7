"""`sharded` beside `ring`, PyTorch's ZeroRedundancyOptimizer and FSDP2: memory and samples/s with Adam.

    python benchmarks/divided_state.py [--model gpt2] [--workers 4] [--rounds 5] [--steps 8]

Real runs, in a new random order in every round, with one thread a process; nothing else should run on the machine. The
peers are peer.py's tuned DDP, over gloo, with ZeroRedundancyOptimizer, and FSDP2, which divides weights and gradients,
too, and refuses the channels_last layout. Ratios compare two contenders within each round; shown are median, smallest
and largest. Memory is from a first round of its own: the largest sum of the kernel's proportional set sizes (Pss, in
which shared pages count once) of all processes of a run, its launcher included.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from data_parallel import BIN, KEEP_MEMORY, PEER, measure, middle
from memory import proportional

# By model: samples of a process's batch, and data.
MODELS = {
    "resnet152": (4, "synthetic:3x32x32,classes=1000,train=2000,test=100"),
    "gpt2": (1, "tokens:{tokens},block=64,dtype=uint16,vocabulary=50257"),
}
OURS = ("ring", "sharded")
ZERO = "ZeroRedundancyOptimizer"
PEERS = {ZERO: "optimizer", "FSDP2": "all"}


def family(pid: int) -> list[int]:
    """A process and its descendants."""
    try:
        tasks = Path(f"/proc/{pid}/task").glob("*/children")
        children = [int(word) for task in tasks for word in task.read_text().split()]
    except OSError:
        return []
    return [pid, *(each for child in children for each in family(child))]


def peak_memory(command: list[str], folder: str) -> int:
    own = "paceline" in Path(command[0]).name
    variables = {"OMP_NUM_THREADS": "1"} | ({} if own else KEEP_MEMORY)
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), *command]
    words += ["--output-dir", f"{folder}/memory"] if own else []
    peak = 0
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while process.poll() is None:
            total = 0
            for pid in family(process.pid):
                try:
                    total += proportional(pid)
                except (OSError, StopIteration):
                    continue  # it has just ended
            peak = max(peak, total)
            time.sleep(0.2)
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed")
    return peak


def contenders(model: str, data: str, steps: int, workers: int) -> dict[str, list[str]]:
    batch = MODELS[model][0]
    both = ["--model", model, "--data", data, "--steps", str(steps)]
    torchrun = [str(BIN / "torchrun"), "--nproc-per-node", str(workers), str(PEER), *both, "--skip",
                str(min(30, steps // 4)), "--batch", str(batch), "--tuned"]  # fmt: skip
    ours = [str(BIN / "paceline"), "train", *both, "--optimizer", "adamw" if model == "gpt2" else "adam",
            "--batch-size", str(batch), "--workers", str(workers), "--threads", "1", "--log-every", "0", "--no-test",
            "--resume", "never", "--json"]  # fmt: skip
    return {strategy: [*ours, "--strategy", strategy] for strategy in OURS} | {
        name: [*torchrun, "--divide", divided] for name, divided in PEERS.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="resnet152")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--workers", type=int, default=4)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        tokens = Path(folder) / "tokens.bin"
        np.random.default_rng(0).integers(50257, size=200_000, dtype=np.uint16).tofile(tokens)
        data = MODELS[args.model][1].format(tokens=tokens)
        commands = contenders(args.model, data, args.steps, args.workers)
        peaks: dict[str, int] = {}
        rates: dict[str, list[float]] = {name: [] for name in commands}
        for turn in range(args.rounds + 1):
            order = list(commands)
            random.Random(turn).shuffle(order)
            for number, name in enumerate(order, 1):
                where = f"round {turn}/{args.rounds}, run {number}/{len(order)}"
                print(f"\r{where}   ", end="", file=sys.stderr, flush=True)
                if turn:
                    rates[name].append(measure([commands[name]], folder))
                else:
                    peaks[name] = peak_memory(commands[name], folder)
    print(f"\n{args.model}, {args.workers} processes, batch {MODELS[args.model][0]} each, {args.rounds} rounds\n")
    print(f"{'':<32}{'MB of all':>10}{'samples/s':>12}{'÷ ring':>20}{'÷ ZeroRedundancy…':>20}")
    for name, mine in rates.items():
        rivals = [rates["ring"], rates[ZERO]]
        cells = [middle([a / b for a, b in zip(mine, rival, strict=True)]) if mine else "" for rival in rivals]
        rate = statistics.median(mine) if mine else 0
        print(f"{name:<32}{peaks[name] / 1e6:>10,.0f}{rate:>12,.2f}" + "".join(f"{cell:>20}" for cell in cells))


if __name__ == "__main__":
    main()

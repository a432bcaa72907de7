"""Parameter servers beside PyTorch's RPC tutorial and beside our ring: time of an update, and the server's own work.

    python benchmarks/parameter_server.py [--rounds 3] [--workers 2,4] [--models mnist-cnn big]

Every round runs every contender once, in a new random order, each in fresh processes with one thread; nothing else
should run on the machine. A ratio compares the two sides within each round; shown are its median, smallest and largest.
`at once` are as many processes that each train alone at the same time.
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
import time
from collections.abc import Callable
from pathlib import Path

import rpc_server
import torch
from data_parallel import AT_ONCE, KEEP_MEMORY
from data_parallel import measure as measure_together

PACELINE = [str(Path(sys.executable).parent / "paceline"), "train"]
RIVAL, RING = "RPC tutorial", "paceline ring"
# Model: steps of all contenders, samples per worker and update, flags.
MODELS = {
    "mnist-cnn": (80, 64, ["--model", "mnist-cnn", "--dropout", "0"]),
    "big": (24, 16, ["--model", "mlp", "--hidden", ",".join(map(str, rpc_server.BIG_HIDDEN))]),
}
OURS = {
    RING: ["--strategy", "ring"],
    "paceline ps-sync": ["--strategy", "ps-sync"],
    "paceline ps-sync, 2 servers": ["--strategy", "ps-sync", "--servers", "2"],
    "paceline ps-bounded, 2": ["--strategy", "ps-bounded", "--staleness", "2"],
    "paceline ps-async": ["--strategy", "ps-async"],
}
Numbers = dict[str, float]


def ours(flags: list[str], model: str, workers: int, folder: str) -> Numbers:
    """Samples/s, and the processor's milliseconds of all servers per megabyte of gradients that came."""
    steps, batch, chosen = MODELS[model]
    # An asynchronous update is one worker's gradient.
    steps *= workers if "ps-async" in flags else 1
    command = [*PACELINE, *chosen, *flags, "--workers", str(workers), "--steps", str(steps), "--batch-size", str(batch),
               "--optimizer", "sgd", "--threads", "1", "--log-every", "0", "--no-test", "--output-dir", folder,
               "--json"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    summary = json.loads(done.stdout.strip().splitlines()[-1])
    found: Numbers = {"rate": summary["samples_per_second"]}
    if summary["servers"]:
        received = sum(summary["bytes_received"][: summary["servers"]]) / 1e6
        found["ms per MB"] = 1e3 * sum(summary["cpu_seconds"][: summary["servers"]]) / received
    return found


def at_once(model: str, workers: int, folder: str) -> Numbers:
    steps, batch, chosen = MODELS[model]
    command = [*PACELINE, *chosen, "--steps", str(steps), "--batch-size", str(batch), "--optimizer", "sgd", "--threads",
               "1", "--log-every", "0", "--no-test", "--resume", "never", "--json"]  # fmt: skip
    return {"rate": measure_together([command] * workers, folder)}


def rival(model: str, workers: int) -> Numbers:
    steps, batch, _ = MODELS[model]
    found = rpc_server.measure(model, workers, steps, batch, 1)
    gradients = workers * found["model_bytes"] / 1e6
    return {"rate": found["samples_per_second"], "ms per MB": 1e3 * found["server_cpu_seconds_per_step"] / gradients}


def copy_ms_per_mb() -> float:
    """The processor's time to copy a megabyte in memory, in pieces that no cache holds."""
    source, target = torch.ones(2**26), torch.empty(2**26)
    target.copy_(source)
    start = time.process_time()
    for _ in range(4):
        target.copy_(source)
    return 1e3 * (time.process_time() - start) / (4 * source.nbytes / 1e6)


def compare(model: str, workers: int, rounds: int, folder: str) -> None:
    contenders: dict[str, Callable[[], Numbers]] = {
        RIVAL: lambda: rival(model, workers),
        AT_ONCE: lambda: at_once(model, workers, folder),
    }
    for name, flags in OURS.items():
        contenders[name] = lambda flags=flags: ours(flags, model, workers, folder)  # type: ignore[misc]
    results: dict[str, list[Numbers]] = {name: [] for name in contenders}
    copying = []
    for turn in range(rounds):
        order = list(contenders)
        random.Random(turn).shuffle(order)
        copying.append(copy_ms_per_mb())
        for number, name in enumerate(order, 1):
            print(f"\r{model}, {workers} workers: round {turn + 1}/{rounds}, run {number}/{len(order)}  ", end="",
                  file=sys.stderr, flush=True)  # fmt: skip
            results[name].append(contenders[name]())
    print(file=sys.stderr)
    _, batch, _ = MODELS[model]
    copy = statistics.median(copying)
    print(f"\n{model}, {workers} workers, batch {batch} a worker, {rounds} rounds, {os.cpu_count()} cores; "
          f"copying a megabyte takes {copy:.2f} ms\n")  # fmt: skip
    print(f"{'':<30}{'samples/s':>10}{'÷ RPC tutorial':>20}{'÷ ring':>20}{'server ms/MB':>14}{'in copies':>11}")
    for name, mine in results.items():
        row = f"{name:<30}{statistics.median(n['rate'] for n in mine):>10,.0f}"
        for other in (RIVAL, RING):
            ratios = [a["rate"] / b["rate"] for a, b in zip(mine, results[other], strict=True)]
            row += f"{f'{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})':>20}"
        if "ms per MB" in mine[0]:
            work = statistics.median(n["ms per MB"] for n in mine)
            row += f"{work:>14.2f}{work / copy:>11.1f}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", default="2,4")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    # All contenders keep freed memory, as our ranks do by themselves.
    os.environ |= {"OMP_NUM_THREADS": "1"} | KEEP_MEMORY
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for model in args.models:
            for workers in map(int, args.workers.split(",")):
                compare(model, workers, args.rounds, folder)


if __name__ == "__main__":
    main()

"""How long a training of one step takes from the command to its end, beside torchrun with a hello of DDP.

    python benchmarks/startup.py [--rounds 5] [--workers 8] [--also NAME=path/to/another/paceline ...]

Every round runs every contender once, in a new random order; nothing else should run on the machine. A ratio compares
two sides within each round; shown are its median, smallest and largest. `--also` adds another installed version of this
project.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

BIN = Path(sys.executable).parent
ATTEMPTS = 3
HELLO = Path(__file__).parent / "ddp_hello.py"


def seconds(command: list[str], folder: str) -> float:
    """Of a run that succeeds: DDP's processes sometimes abort when they exit, after all is done."""
    for _ in range(ATTEMPTS):
        start = time.perf_counter()
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
        taken = time.perf_counter() - start
        if not done.returncode:
            return taken
        print(f"\n{' '.join(command)} failed, and is tried again", file=sys.stderr)
    sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PACELINE")
    args = parser.parse_args()
    one_step = ["train", "--steps", "1", "--workers", str(args.workers)]
    ours, ddp = f"paceline train, {args.workers} workers", f"torchrun, DDP hello, {args.workers} processes"
    commands = {
        ours: [str(BIN / "paceline"), *one_step],
        ddp: [str(BIN / "torchrun"), "--nproc-per-node", str(args.workers), str(HELLO)],
        "paceline train, 1 worker": [str(BIN / "paceline"), "train", "--steps", "1"],
        "paceline --help": [str(BIN / "paceline"), "--help"],
        "python -c pass": [sys.executable, "-c", "pass"],
    }
    commands |= {f"{ours} ({name})": [path, *one_step] for name, _, path in (each.partition("=") for each in args.also)}
    times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for turn in range(args.rounds):
            order = list(commands)
            random.Random(turn).shuffle(order)
            for name in order:
                print(f"\rround {turn + 1}/{args.rounds}: {name:<60}", end="", file=sys.stderr, flush=True)
                times[name].append(seconds(commands[name], folder))
    print(file=sys.stderr)
    print(f"{args.rounds} rounds, {os.cpu_count()} cores\n\n{'':<50}{'seconds':>10}{'÷ paceline train':>24}")
    for name, mine in times.items():
        ratios = [a / b for a, b in zip(mine, times[ours], strict=True)]
        shown = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"
        print(f"{name:<50}{statistics.median(mine):>10.2f}{shown:>24}")


if __name__ == "__main__":
    main()

"""How long a training step waits for its batch: this project beside PyTorch's DataLoader, on CIFAR-10.

    python benchmarks/input.py [--rounds 3] [--steps 12] [--large-steps 5]

Two settings: resnet18 on the images as they are (32 pixels), and resnet50v2 on images resized to 128 pixels, both with
random crops, flips and normalisation. Every round runs every contender once, in a new random order, each in fresh
processes. Shown is the part of a step's time that was spent waiting for input, the first two steps left out: its
median, smallest and largest over the rounds. Nothing else should run on the machine.
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
PEER = Path(__file__).parent / "input_peer.py"
SKIP = 2


def contenders(model: str, size: int, batch: int, steps: int) -> dict[str, list[str]]:
    setting = ["--model", model, "--image-size", str(size), "--steps", str(steps)]
    ours = [str(BIN / "paceline"), "train", *setting, "--data", "cifar10", "--augment", "crop-flip", "--optimizer",
            "sgd", "--no-test", "--log-every", "0", "--json"]  # fmt: skip
    peer = [sys.executable, str(PEER), *setting, "--batch", str(batch)]
    return {
        "paceline, 1 worker": [*ours, "--batch-size", str(batch)],
        "paceline, 2 workers": [*ours, "--batch-size", str(batch // 2), "--workers", "2"],
        "DataLoader, in the same process": [*peer, "--processes", "0"],
        "DataLoader, 2 processes": [*peer, "--processes", "2"],
    }


def measure(command: list[str], folder: Path) -> tuple[float, float]:
    """Samples/s, and the part of the time that the slowest rank waited for input."""
    own = "paceline" in Path(command[0]).name
    name = f"run-{len(list(folder.iterdir()))}"
    place = ["--output-dir", str(folder), "--name", name] if own else []
    done = subprocess.run([*command, *place], capture_output=True, text=True, timeout=1200, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    if not own:
        rate, waiting = map(float, done.stdout.split())
        return rate, waiting
    parts, rates = [], []
    for path in (folder / name).glob("rank_*.jsonl"):
        steps = [line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "step"][SKIP:]
        seconds = sum(step["seconds"] for step in steps)
        parts.append(sum(step["spans"]["input"] for step in steps) / seconds)
        rates.append(sum(step["samples"] for step in steps) / seconds)
    return rates[0], max(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--large-steps", type=int, default=5)
    args = parser.parse_args()
    settings = (("resnet18", 32, 128, args.steps), ("resnet50v2", 128, 64, args.large_steps))
    for setting in settings:
        commands = contenders(*setting)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            for turn in range(args.rounds):
                order = list(commands)
                random.Random(turn).shuffle(order)
                for name in order:
                    print(f"\rround {turn + 1}/{args.rounds}: {name:<40}", end="", file=sys.stderr, flush=True)
                    found[name].append(measure(commands[name], Path(folder)))
        print(file=sys.stderr)
        model, size, batch, steps = setting
        print(
            f"{model}, {size}x{size} pixels, batch {batch}, {steps} steps, {args.rounds} rounds, {os.cpu_count()} cores"
        )
        for name, rows in found.items():
            rates, waits = zip(*rows, strict=True)
            print(f"  {name:<34}{statistics.median(rates):>8,.1f} samples/s   waits for input "
                  f"{statistics.median(waits):>7.3%} ({min(waits):.3%}–{max(waits):.3%})")  # fmt: skip


if __name__ == "__main__":
    main()

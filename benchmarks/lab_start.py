"""How long the ranks of an emulated training on the nodes of a lab take from the command to their first step.

    python benchmarks/lab_start.py [--rounds 3] [--nodes 16] [--also NAME=path/to/another/paceline ...]

Every round runs every version once, in a new random order. `--also` adds another installed version of this project; a
ratio compares it with this one within each round. Shown are medians, with the smallest and the largest value.
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

from paceline.run.folder import rank_file
from paceline.run.lines import read_sound_lines
from paceline.run.records import Step

HERE = "this version"


def measure(paceline: str, nodes: int, folder: str, name: str) -> tuple[float, float]:
    """Seconds from the command to the begin of the first step, and to the end of the command."""
    options = [
        "--model",
        "resnet18",
        "--data",
        "cifar10",
        "--compute",
        "emulated:0.1",
        "--shrink",
        "16",
        "--steps",
        "3",
    ]
    train = [paceline, "train", "--strategy", "ring", "--workers", str(nodes), *options, "--name", name]
    begun = time.time()
    words = [paceline, "lab", "run", f"1gbit:{nodes}", "--", *train]
    subprocess.run(words, cwd=folder, capture_output=True, check=True, timeout=600)
    whole = time.time() - begun
    first = next(iter(read_sound_lines(rank_file(Path(folder, "runs", name), 0), Step)))
    return first.time - first.seconds - begun, whole


def shown(values: list[float], unit: str = " s") -> str:
    return f"{statistics.median(values):.1f}{unit} ({min(values):.1f}-{max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--also", action="append", default=[], metavar="NAME=PACELINE")
    args = parser.parse_args()
    versions = {HERE: str(Path(sys.executable).parent / "paceline")}
    versions |= {name: path for name, _, path in (each.partition("=") for each in args.also)}
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in versions}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for turn in range(args.rounds):
            order = list(versions)
            random.Random(turn).shuffle(order)
            for name in order:
                found[name].append(measure(versions[name], args.nodes, folder, f"{name.replace(' ', '-')}-{turn}"))
                print(f"{name}: first step after {found[name][-1][0]:.1f} s, end after {found[name][-1][1]:.1f} s")
    for part, what in enumerate(("to the first step", "whole command")):
        for name, pairs in found.items():
            ratios = [other[part] / own[part] for other, own in zip(pairs, found[HERE], strict=True)]
            versus = "" if name == HERE else f", {shown(ratios, ' times')} this version"
            print(f"{what}, {name}: {shown([pair[part] for pair in pairs])}{versus}")


if __name__ == "__main__":
    main()

"""The memory of a model in stages beside the whole in one process, and beside what the plan predicts.

    python benchmarks/pipeline_memory.py [--model vgg19] [--stages 4] [--image-size 128] [--repeats 3]

Peak resident memory of each process (getrusage) of real runs of `paceline train`: SGD with momentum, the same batches
and micro-batches. Predictions are of plan.json, made before the first step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

PACELINE = Path(sys.executable).parent / "paceline"


def run(folder: str, name: str, args: argparse.Namespace, *more: str) -> list[int]:
    """The peak memory of each rank."""
    size = args.image_size
    flags = ["--model", args.model, "--data", f"synthetic:3x{size}x{size},train=96,test=8", "--optimizer", "sgd",
             "--batch-size", "16", "--microbatches", "8", "--steps", "4", "--no-test", "--log-every", "0"]  # fmt: skip
    command = [str(PACELINE), "train", *flags, *more, "--output-dir", folder, "--name", name, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    peaks: list[int] = json.loads(done.stdout.splitlines()[-1])["peak_rss_bytes"]
    return peaks


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vgg19")
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--image-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    pipeline = ("--strategy", "pipeline", "--workers", str(args.stages))
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for turn in range(args.repeats):
            (whole,) = run(folder, f"whole-{turn}", args)
            peaks = run(folder, f"stages-{turn}", args, *pipeline)
            stages = json.loads((Path(folder) / f"stages-{turn}" / "plan.json").read_text())["stages"]
            planned = [sum(stage["memory"].values()) for stage in stages]
            print(f"{args.model}, {args.image_size} pixels: the whole in one process {whole / 1e6:.0f} MB")
            for number, (peak, plan) in enumerate(zip(peaks, planned, strict=True)):
                largest = " (the largest)" if peak == max(peaks) else ""
                beside = (
                    f"{peak / whole:.0%} of the whole; planned {plan / 1e6:5.0f} MB, measured {peak / plan - 1:+.0%}"
                )
                print(f"  stage {number}: {peak / 1e6:5.0f} MB, {beside}{largest}", flush=True)


if __name__ == "__main__":
    main()

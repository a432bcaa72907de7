"""What this project chooses by itself beside fixed choices of transport, size of buckets and overlap: samples/s.

    python benchmarks/choices.py [--model mnist-cnn] [--rounds 5] [--steps 80] [--workers 2]

Every round runs every choice once, in a new random order, with one thread a process; nothing else should run on the
machine. `auto` is `--strategy allreduce` without further options. Ratios to it compare within each round; shown are
median, smallest and largest.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from data_parallel import BIN, MODELS, interleaved, measure, middle

CHOICES = {
    "auto": [],
    "shm, buckets of 1 MB": ["--transport", "shm", "--bucket-mb", "1"],
    "shm, 4 MB": ["--transport", "shm", "--bucket-mb", "4"],
    "shm, 16 MB": ["--transport", "shm", "--bucket-mb", "16"],
    "gloo, 4 MB, overlap": ["--transport", "gloo", "--bucket-mb", "4", "--overlap", "on"],
    "gloo, 4 MB, no overlap": ["--transport", "gloo", "--bucket-mb", "4", "--overlap", "off"],
    "gloo, 4 MB, overlap auto": ["--transport", "gloo", "--bucket-mb", "4", "--overlap", "auto"],
    "gloo, 16 MB, overlap": ["--transport", "gloo", "--bucket-mb", "16", "--overlap", "on"],
    "mpi, 4 MB, overlap": ["--transport", "mpi", "--bucket-mb", "4", "--overlap", "on"],
    "mpi, 4 MB, no overlap": ["--transport", "mpi", "--bucket-mb", "4", "--overlap", "off"],
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, default="mnist-cnn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    batch, data, more = MODELS[args.model]
    train = [str(BIN / "paceline"), "train", "--model", args.model, "--data", data, *more, "--steps", str(args.steps),
             "--batch-size", str(batch), "--strategy", "allreduce", "--workers", str(args.workers), "--threads", "1",
             "--log-every", "0", "--no-test", "--resume", "never", "--json"]  # fmt: skip
    rates: dict[str, list[float]] = {name: [] for name in CHOICES}
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for name in interleaved(CHOICES, args.rounds):
            rates[name].append(measure([[*train, *CHOICES[name]]], folder))
    print(f"\n{args.model}, batch {batch} a process, {args.workers} processes, {args.rounds} rounds\n")
    print(f"{'':<26}{'samples/s':>10}{'÷ auto':>20}")
    for name, mine in rates.items():
        ratio = middle([a / b for a, b in zip(mine, rates["auto"], strict=True)])
        print(f"{name:<26}{statistics.median(mine):>10,.1f}{ratio:>20}")


if __name__ == "__main__":
    main()

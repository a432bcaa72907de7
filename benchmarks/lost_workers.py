"""What losing workers costs: accuracy and time of 4 workers of a parameter server, of which 0, 1 or 2 are killed.

    python benchmarks/lost_workers.py [--data mnist] [--epochs 2]

The workers are real processes, killed with SIGKILL once a third and two thirds of the samples have been used (as far as
the leader has written that down, which it does once a second).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from raw_lines import raw_lines

from paceline.run.folder import read_summary

PACELINE = [str(Path(sys.executable).parent / "paceline"), "train"]
STRATEGIES = {
    "ps-sync": ["--strategy", "ps-sync"],
    "ps-bounded, 4": ["--strategy", "ps-bounded", "--staleness", "4"],
    "ps-async": ["--strategy", "ps-async"],
}
WORKERS = 4


def run(flags: list[str], killed: int, data: str, epochs: int, samples: int, folder: Path) -> str:
    """One training; a row of the table."""
    command = [*PACELINE, *flags, "--workers", str(WORKERS), "--data", data, "--epochs", str(epochs), "--threads", "1",
               "--batch-size", "32", "--log-every", "0", "--output-dir", str(folder.parent), "--name",
               folder.name]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    for victim in range(killed):
        while _samples(folder) < (victim + 1) / 3 * epochs * samples and process.poll() is None:
            time.sleep(0.2)
        ranks = json.loads((folder / "env.json").read_text())["ranks"]
        os.kill(next(row["pid"] for row in ranks if row["rank"] == 2 + victim), signal.SIGKILL)
    process.wait(3600)
    summary = read_summary(folder)
    if process.returncode or summary is None:
        sys.exit(f"{' '.join(command)} failed")
    own = summary.own_figures
    lost = ", ".join(str(worker["update"]) for worker in own["lost_workers"])
    return (
        f"{killed:>7}{sum(summary.epoch_seconds):>9.1f} s{summary.test_accuracy or 0:>10.2%}{summary.steps:>9}"
        f"{own['staleness_mean'] or 0:>7.2f}{own['staleness_max'] or 0:>5}  {lost or '-'}"
    )


def _samples(folder: Path) -> int:
    return sum(record["samples"] for record in raw_lines(folder / "rank_0.jsonl") if record["kind"] == "step")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=60_000, help="in the training set")
    args = parser.parse_args()
    print(
        f"{'':<15}{'killed':>7}{'training':>11}{'accuracy':>10}{'updates':>9}{'stale':>7}{'max':>5}  lost after update"
    )
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for name, flags in STRATEGIES.items():
            for killed in range(3):
                place = Path(folder) / f"{flags[1]}-{killed}"
                row = run(flags, killed, args.data, args.epochs, args.samples, place)
                print(f"{name:<15}{row}", flush=True)


if __name__ == "__main__":
    main()

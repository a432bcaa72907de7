"""The table of docs/guide.md: what `paceline advise` says about each network on typical clusters.

    python benchmarks/guide.py experiments/advice.toml      after benchmarks/advice.py, whose short runs it reads

A cell is the best setting with several machines: its time as a part of that of one machine, with its 90 % interval.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from pathlib import Path
from typing import Any

from advice import ask, folder_of

# Where, and how `paceline advise` is asked about it; the first is the machine of the runs itself.
CLUSTERS = {
    "this laptop, 2 cores": ["--workers", "1,2"],
    "two office PCs, 1 Gbit/s": ["--link", "1gbit", "--workers", "1,2"],
    "four laptops, Wi-Fi of 50 Mbit/s": ["--link", "50mbit", "--workers", "1,2,4"],
    "four cloud nodes, 10 Gbit/s": ["--link", "10gbit", "--workers", "1,2,4"],
    "a supercomputer, V100 GPUs, 100 Gbit/s": ["--link", "100gbit", "--workers", "1,4,16,64", "--device", "v100",
                                               "--batch", "2048"],
}  # fmt: skip


def cell(advice: dict[str, Any]) -> str:
    best = advice["best"]
    if best is None:
        return "–"
    value, low, high = (f"{best['relative'][end]:.2f}" for end in ("value", "low", "high"))
    mark = {"measured": "", "predicted": "", "extrapolated": "*"}[best["basis"]]
    said = f"**yes**, {best['workers']} with {best['strategy']}" if advice["distribute"] else "no"
    return f"{said}: {value} ({low}–{high}){mark}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("space", type=Path)
    parser.add_argument("-o", "--output", type=Path, default=Path("runs/advice-scored"))
    args = parser.parse_args()
    print("| network | batch | " + " | ".join(CLUSTERS) + " |")
    print("|---|---|" + "---|" * len(CLUSTERS))
    for each in tomllib.loads(args.space.read_text())["real"]:
        folder = folder_of(args.output, each["name"])
        cells = []
        for number, words in enumerate(CLUSTERS.values()):
            asked = [str(folder / "probes"), "--strategy", "allreduce,ring", *words]
            advice = ask(asked, folder / f"guide-{number}.json")
            cells.append(cell(advice))
        print(f"| {each['name']} | {each['options']['batch_size']} | " + " | ".join(cells) + " |", flush=True)
        changes = [line for line in json.loads((folder / "guide-1.json").read_text())["reasons"] if "from" in line]
        print(f"<!-- {changes[:1]} -->", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

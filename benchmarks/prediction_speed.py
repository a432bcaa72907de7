"""How long predictions of 10,240 ranks take, and how much memory: all strategies, 1,000 draws.

    python benchmarks/prediction_speed.py runs/prediction/scored-06/probes        VGG-16, of benchmarks/prediction.py

Runs `paceline predict` as a user would, several times, with imports, reading of runs and fits; the predictions must be
the same each time.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--workers", default="10240")
    parser.add_argument("--link", default="10gbit")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    command = [sys.executable, "-m", "paceline", "predict", *map(str, args.runs), "--workers", args.workers,
               "--link", args.link, "--strategy", "all", "--json"]  # fmt: skip
    seen = set[str]()
    for number in range(args.repeats):
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        seen.add(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
        took, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"run {number + 1}: {took:.1f} s, {cpu:.1f} s of processor time, at most {after.ru_maxrss / 1024:.0f} MB")
    rows = json.loads(seen.pop())["predictions"]
    names = ", ".join(dict.fromkeys(row["strategy"] for row in rows))
    print(f"{len(rows)} predictions ({names}); {'different each time' if seen else 'the same each time'}")
    return bool(seen)


if __name__ == "__main__":
    sys.exit(main())

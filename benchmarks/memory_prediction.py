"""Predicted beside measured peak memory of real runs.

    python benchmarks/memory_prediction.py PROBES... --score RUNS...

Each is a run folder, or a folder of them; a run that is in both is only a probe. Other programs do not change the
memory of a run: disturbed runs count, too. Runs of several models are predicted model by model.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from paceline.analysis.runs import LeftOut, read_run
from paceline.predict.memory import fit_memory
from paceline.predict.probes import Probe, probe_of
from paceline.run.folder import find_folders


def read(paths: Sequence[Path]) -> dict[str, list[Probe]]:
    """Completed runs with real compute, by model."""
    found: dict[str, list[Probe]] = {}
    for folder in find_folders(paths):
        run = read_run(folder)
        if isinstance(run, LeftOut) or run.emulated or not run.summary.peak_rss_bytes:
            print(f"{folder.name} is left out: {run.why if isinstance(run, LeftOut) else 'it has no peak memory'}")
            continue
        found.setdefault(run.summary.model, []).append(probe_of(run))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("probes", metavar="PROBES", type=Path, nargs="+")
    parser.add_argument("--score", metavar="RUNS", type=Path, nargs="+", required=True)
    args = parser.parse_args()
    probes, held = read(args.probes), read(args.score)
    errors, inside = list[float](), 0
    for model, own in probes.items():
        fitted, seen = fit_memory(own, own[0].spec), {probe.run.folder.resolve() for probe in own}
        print(f"{model}: {len(own)} probes")
        for run in held.get(model, []):
            if run.run.folder.resolve() in seen:
                continue
            peak = max(run.run.summary.peak_rss_bytes)
            value, low, high = fitted.predict(run.spec)
            errors.append(value / peak - 1)
            inside += low <= peak <= high
            print(f"  {run.name:<32} measured {peak / 1e6:7.0f} MB  predicted {value / 1e6:7.0f} "
                  f"({low / 1e6:.0f}–{high / 1e6:.0f})  {100 * errors[-1]:+6.1f} %")  # fmt: skip
    if errors:
        sizes = np.abs(errors)
        print(f"Mean error {100 * sizes.mean():.1f} %, 95 % of errors up to {100 * np.quantile(sizes, 0.95):.1f} %; "
              f"{inside} of {len(errors)} are inside their interval")  # fmt: skip


if __name__ == "__main__":
    main()

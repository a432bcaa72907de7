"""Trains a CNN with 690,590 parameters on digits, on one process and on two workers with four strategies; reports."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from paceline.analysis.headline import over_one_process
from paceline.analysis.scaling import Group
from paceline.analysis.study import read_study
from paceline.cli import main as paceline

HERE = Path(__file__).parent
FOLDER = Path("runs", "demo")
COLUMNS = ("update ms", "epoch s", "total s", "samples/s", "speedup", "test loss", "test acc")


def row(one: Group, groups: Sequence[Group]) -> tuple[str, ...]:
    s, speed, speedup = one.first.summary, one.samples_per_second().value, over_one_process(one, groups)
    return (
        f"{1000 * one.step().value:.1f}",
        f"{min(s.epoch_seconds):.2f}",
        f"{s.total_seconds:.2f}",
        f"{speed:,.0f}",
        f"{speedup.value:.2f}" if speedup else "–",
        f"{s.test_loss:.4f}",
        f"{s.test_accuracy:.2%}",
    )


def main() -> int:
    if code := paceline(["bench", str(HERE / "demo.toml"), "-o", str(FOLDER), "--fresh"]):
        return code
    study = read_study([FOLDER])
    groups = sorted(study.groups, key=lambda one: (one.workers, one.setting.get("threads")))
    table = {one.label(groups): row(one, groups) for one in groups}
    width = max(map(len, table))
    print("\n" + " " * width + "".join(f"{column:>11}" for column in COLUMNS))
    for name, cells in table.items():
        print(f"{name:<{width}}" + "".join(f"{cell:>11}" for cell in cells))
    print("\nspeedup: over the best single process. update: the whole step, median. epoch: the faster of two.\n")
    return paceline(["report", str(FOLDER), "-o", str(FOLDER / "report.html")])


if __name__ == "__main__":
    sys.exit(main())

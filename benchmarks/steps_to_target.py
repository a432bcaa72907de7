"""How well steps to a loss are predicted for 4 and 16 times the batch: three tasks, real training, five seeds.

    python benchmarks/steps_to_target.py               train what is missing, and score; can be interrupted
    python benchmarks/steps_to_target.py --quick       one task, one seed that is not scored
    python benchmarks/steps_to_target.py --score       only compare what there is

Each task and seed has a run with the base batch to its target, a loss. The prediction is made from the noise scale of
this run, and from branches: its first quarter, and runs with 2 and 8 times the batch to about the same loss. It is
written down before the runs with 4 and 16 times the batch, which have the advised learning rate. Targets and learning
rates were chosen with seed 100, which is not scored.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from paceline.advise.noise_scale import NoiseScale, Unknown, of_run
from paceline.advise.steps_needed import StepsLaw, branch_points, fit_steps, learning_rate, smoothed, steps_to
from paceline.analysis.runs import Run, read_run
from paceline.predict.ranges import Range

SEEDS = range(5)
CHOSEN_WITH = 100  # the seed
BRANCHES, SCORED = (2, 8), (4, 16)  # times the base batch
PART = 0.25  # of the steps to the target, that branches have
LONGER = 1.5  # than predicted, so that runs reach their loss
CLOSE = 0.2  # relative error
SAME = (
    "--strategy allreduce --workers 2 --threads 1 --overlap off --record-norms 1 --no-scale-lr --decay none --no-test"
)
QUIET = "--quiet --log-every 0 --checkpoint-seconds 0 --resume never --epochs 1000"


@dataclass(frozen=True)
class Task:
    """What is trained, and the loss that is to be reached; `steps` are those of the base run, which goes beyond it."""

    name: str
    flags: str
    optimizer: str
    lr: float
    batch: int
    steps: int
    target: float


TASKS = (
    Task("mnist", "--model shallow-cnn --data mnist --momentum 0", "sgd", 0.1, 32, 850, 0.15),
    Task("fashion-mnist", "--model shallow-cnn --data fashion-mnist", "adam", 0.001, 32, 900, 0.46),
    Task("shakespeare", "--model gpt --data shakespeare", "adamw", 0.0005, 2, 750, 2.55),
)


def train(task: Task, folder: Path, batch: int, lr: float, steps: int, seed: int) -> Run:
    """The run in this folder, trained if it is not there as a whole."""
    found = read_run(folder)
    if isinstance(found, Run) and found.summary.steps >= steps:
        return found
    shutil.rmtree(folder, ignore_errors=True)
    own = f"--optimizer {task.optimizer} --lr {lr:.6g} --global-batch {batch} --steps {steps} --seed {seed}"
    where = ["--output-dir", str(folder.parent), "--name", folder.name]
    words = f"{task.flags} {own} {SAME} {QUIET}".split()
    print(f"{task.name}, seed {seed}: {steps} steps with batch {batch} and learning rate {lr:.4g}", flush=True)
    subprocess.run([sys.executable, "-m", "paceline", "train", *words, *where], check=True)
    found = read_run(folder)
    assert isinstance(found, Run), found
    return found


def steps_of(run: Run, loss: float) -> float | None:
    """Steps to a loss; None if the run ended above it."""
    curve = smoothed(np.array([step.loss for step in run.steps[0]]))
    return float(steps_to(curve, loss)) if curve[-1] <= loss else None


def first_part(run: Run, steps: int) -> Run:
    return replace(run, steps={rank: each[:steps] for rank, each in run.steps.items()})


def predict(task: Task, folder: Path, seed: int) -> StepsLaw:
    """The law from the base run and the branches."""
    base = train(task, folder / "base", task.batch, task.lr, task.steps, seed)
    reached = steps_of(base, task.target)
    assert reached, f"{folder}: the base run ended above its target"
    quarter = round(PART * reached)
    scale = of_run(first_part(base, round(reached)))
    expected = fit_steps([], scale, reached)
    branches = [first_part(base, quarter)]
    for factor in BRANCHES:
        batch = factor * task.batch
        fewer = 1 / factor if isinstance(expected, Unknown) else float(expected.ratio(batch, task.batch)[0])
        lr = learning_rate(task.optimizer, task.lr, task.batch, batch, expected)
        steps = max(20, round(LONGER * quarter * fewer))
        branches.append(train(task, folder / f"branch-{factor}", batch, lr, steps, seed))
    points = branch_points(branches)
    laws = {"norms": expected, "branches": fit_steps(points, None, reached), "both": fit_steps(points, scale, reached)}
    write(task, folder / "prediction.json", reached, scale, laws)
    law = laws["both"]
    assert isinstance(law, StepsLaw), law
    return law


def write(
    task: Task, path: Path, base: float, scale: NoiseScale | Unknown, laws: dict[str, StepsLaw | Unknown]
) -> None:
    """What is predicted, from norms alone, from branches alone and from both: once, before it is measured."""
    if path.exists():
        return
    rows = {
        name: {
            "critical": vars(law.critical_batch),
            **{str(f): vars(Range.of(base * law.ratio(f * task.batch, task.batch))) for f in SCORED},
        }
        for name, law in laws.items()
        if isinstance(law, StepsLaw)
    }
    noise = vars(scale.batch) if isinstance(scale, NoiseScale) else scale.why
    path.write_text(json.dumps({"base": base, "noise_scale": noise, **rows}, indent=1))


def measure(task: Task, folder: Path, seed: int) -> None:
    """Runs with 4 and 16 times the batch, longer ones if they do not reach the target."""
    law = predict(task, folder, seed)
    for factor in SCORED:
        batch = factor * task.batch
        lr = learning_rate(task.optimizer, task.lr, task.batch, batch, law)
        expected = json.loads((folder / "prediction.json").read_text())["both"][str(factor)]["value"]
        for longer in (LONGER, 2 * LONGER):
            run = train(task, folder / f"measured-{factor}", batch, lr, round(longer * expected), seed)
            if steps_of(run, task.target) is not None:
                break


@dataclass(frozen=True)
class Cell:
    """A task, seed and batch: steps to the target, measured and predicted; inf if it was not reached."""

    task: Task
    seed: int
    factor: int
    steps: float
    predicted: Range

    @property
    def error(self) -> float:
        return self.predicted.value / self.steps - 1

    @property
    def inside(self) -> bool:
        return self.predicted.low <= self.steps <= self.predicted.high


def cells(folder: Path, seeds: range, source: str) -> Iterator[Cell]:
    for task in TASKS:
        for seed in seeds:
            place = folder / task.name / str(seed)
            for factor in SCORED:
                run = read_run(place / f"measured-{factor}")
                if isinstance(run, Run):
                    written = json.loads((place / "prediction.json").read_text())
                    if source in written:
                        steps = steps_of(run, task.target) or float("inf")
                        yield Cell(task, seed, factor, steps, Range(**written[source][str(factor)]))


def score(folder: Path, seeds: range) -> None:
    print("| task | batch | seed | measured | predicted | 90 % interval | error |\n|---|---|---|---|---|---|---|")
    for cell in cells(folder, seeds, "both"):
        p, batch = cell.predicted, cell.factor * cell.task.batch
        print(f"| {cell.task.name} | {batch} | {cell.seed} | {cell.steps:.0f} | {p.value:.0f} | "
              f"{p.low:.0f}–{p.high:.0f} | {100 * cell.error:+.0f} % |")  # fmt: skip
    for source in ("both", "branches", "norms"):
        found = list(cells(folder, seeds, source))
        if found:
            errors = np.abs([cell.error for cell in found])
            print(f"From {source}: {(errors <= CLOSE).sum()} of {len(found)} within {CLOSE:.0%}, median error "
                  f"{np.median(errors):.1%}; {sum(cell.inside for cell in found)} inside their interval")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/steps"))
    parser.add_argument("--quick", action="store_true", help="one task, one seed that is not scored")
    parser.add_argument("--seeds", type=int, nargs=2, metavar=("FIRST", "END"), default=(SEEDS.start, SEEDS.stop))
    parser.add_argument("--score", action="store_true", help="only compare what there is")
    args = parser.parse_args()
    seeds = range(CHOSEN_WITH, CHOSEN_WITH + 1) if args.quick else range(*args.seeds)
    for seed in seeds if not args.score else ():
        for task in TASKS[:1] if args.quick else TASKS:
            measure(task, args.folder / task.name / str(seed), seed)
    score(args.folder, seeds)


if __name__ == "__main__":
    main()

"""The short runs of advice are real trainings, and their folders tell what advice reads from them.

Times say nothing while other tests use the cores, so that no verdict is asked for.
"""

from __future__ import annotations

from pathlib import Path

from paceline.advise.noise_scale import norms_of
from paceline.advise.probing import FEWEST, TRIAL, Probing
from paceline.advise.steps_needed import Reached, branch_points
from paceline.analysis.runs import Run, read_run


def test_runs_of_a_round_and_of_several_batches(tmp_path: Path) -> None:
    options = {"model": "mlp", "data": "mnist-mini", "optimizer": "sgd", "lr": 0.05, "epochs": 9, "bucket_mb": 2.0}
    probing = Probing(options, ("allreduce",), (1, 2), 32, None, tmp_path / "runs", "a title")
    next(probing.rounds(lambda *_: None))
    made = [run for run in map(read_run, sorted((tmp_path / "runs").glob("mlp-*"))) if isinstance(run, Run)]
    found = [(run.summary.strategy, run.summary.workers, run.summary.global_batch) for run in made]
    alone, several = ("sequential", 1, 32), ("allreduce", 2, 32)
    assert sorted(found) == sorted([alone, alone, ("sequential", 1, 16), several])  # the first is the trial
    assert min(run.summary.steps for run in made) == TRIAL
    # An option of one of the strategies only: the other has the default.
    assert {run.summary.workers: run.spec["bucket_mb"] for run in made} == {1: 4.0, 2: 2.0}

    branches = [read_run(folder) for folder in probing.branches(80 * 32, 0.05, "sgd", lambda *_: None)]
    runs = [run for run in branches if isinstance(run, Run)]
    assert [run.summary.global_batch for run in sorted(runs, key=lambda run: run.summary.global_batch)] == [32, 64, 256]
    assert all(run.summary.steps >= FEWEST for run in runs)
    # Every step after the first quarter has norms, of two ranks.
    assert all(len(norms_of(run)) >= run.summary.steps * 0.7 for run in runs)
    points = branch_points(runs)
    assert isinstance(points, list)
    assert all(isinstance(point, Reached) for point in points)

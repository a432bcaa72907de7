"""paceline probe: rounds of short runs until the prediction is stable; a busy machine and a wrong command are refused.

The runs of the first tests are made up, because real ones say nothing while other tests use the cores.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run

from paceline.bench.run import Outcome
from paceline.cli import probe
from paceline.cli.main import main

TRAINING = ["--", "train", "--model", "mnist-cnn", "--data", "mnist", "--strategy", "ring", "--epochs", "5"]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The workers of the runs of each round, which take no time; the first round is 20 % slower than the others."""
    rounds: list[list[int]] = []

    def bench(experiment: Any, store: Any, _say: Any, **_: Any) -> Outcome:
        tasks = [task for task in experiment.tasks() if not (store.folder / task.name).exists()]
        for task in tasks:
            spec = task.point.resolved.spec
            assert (spec.steps, spec.test) == (probe.STEPS, False)
            seconds = (0.1 if spec.workers == 1 else 0.12) * (1.2 if not rounds else 1.0)
            write_run(store.folder / task.name, steady(seconds, probe.STEPS, seed=len(rounds)), workers=spec.workers,
                      strategy=spec.strategy, spec={"model": "mnist-cnn", "data": "mnist"},
                      total_seconds=1.0)  # fmt: skip
        rounds.append(sorted(task.point.resolved.spec.workers for task in tasks))
        return Outcome(made=len(tasks))

    monkeypatch.setattr(probe, "bench", bench)
    monkeypatch.setattr(probe, "busy_now", lambda: None)
    return rounds


def test_rounds_are_made_until_the_prediction_is_stable(
    made: list[list[int]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--workers", "1,2", "-o", str(tmp_path / "probes"), *TRAINING]) == 0
    assert 2 < len(made) <= probe.MOST_ROUNDS
    assert all(workers == [1, 2] for workers in made)
    said = capsys.readouterr().out
    assert f"Predicted from {2 * len(made)} runs" in said
    assert f"paceline predict {tmp_path / 'probes'} --workers" in said


def test_probes_take_a_twentieth_of_the_training_at_most(made: list[list[int]], tmp_path: Path) -> None:
    """Two runs of a second each are more than that of a training of 100 steps."""
    assert main(["probe", "--workers", "1,2", "-o", str(tmp_path / "probes"), *TRAINING[:-2], "--steps", "100"]) == 0
    assert len(made) == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the training after --"),
        (["--", "bench", "x.toml"], "give the training after --"),
        (["--", "train", "--model", "mnist-cn"], "did you mean 'mnist-cnn'"),
        (["--workers", "1,x", *TRAINING], "give whole numbers with commas"),
        (["--lab", "1gibt", *TRAINING], "did you mean '1gbit'"),
        (["--steps", "20", *TRAINING], "at least 33 are needed"),
    ],
)
def test_wrong_commands_are_refused_before_any_run(
    made: list[list[int]], words: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "-o", str(tmp_path / "probes"), *words]) == 2
    assert said in capsys.readouterr().err
    assert made == []


def test_a_busy_machine_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spin = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        assert main(["probe", "-o", str(tmp_path / "probes"), *TRAINING]) == 2
    finally:
        for each in spin:
            each.kill()
            each.wait()
    assert "this machine is busy" in capsys.readouterr().err
    assert not (tmp_path / "probes").exists()

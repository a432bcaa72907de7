"""paceline bench: what it prints of an experiment whose runs are there already."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from made_up import steady, write_run

from paceline.bench.experiment import read_experiment
from paceline.bench.store import Store
from paceline.cli.main import main
from paceline.run.folder import check_summary, write_summary


def test_what_experiments_and_runs_say_cannot_control_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, store = tmp_path / "try.toml", Store(tmp_path / "runs")
    path.write_text('title = "A \\u001b[2J title"\nrepeats = 1\n[[grid]]\nmodel = "mlp"\nbatch_size = 8\n')
    experiment = read_experiment(path)
    with store.locked():
        store.open(experiment)
    [task] = experiment.tasks()
    run = write_run(store.folder / task.name, steady(0.1))
    write_summary(run, replace(check_summary(run), strategy="seq\x1b[2J\ud800"))
    assert main(["bench", str(path), "-o", str(store.folder)]) == 0
    said = capsys.readouterr().out
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    assert r"A \x1b[2J title" in said
    assert r"One setting was run, seq\x1b[2J\ud800" in said

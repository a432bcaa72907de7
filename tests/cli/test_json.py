"""--json: one line of strict JSON on standard output and nothing else, of every verb that prints facts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import steady, write_run

from paceline.bench.experiment import read_experiment
from paceline.bench.store import Store
from paceline.cli.completion import actions, whole_parser
from paceline.cli.main import VERBS, main
from paceline.data.table import TABLE as DATA
from paceline.models.table import TABLE as MODELS

Facts = Callable[..., Any]
# They print a script, and JSON anyway.
WITHOUT = {"slurm", "completion", "schema", "export", "watch"}


@pytest.fixture
def facts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Facts:
    """What a command says; it has to say it strictly."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)

    def run(*words: str, code: int = 0) -> Any:
        assert main([*words, "--json"]) == code
        (line,) = capsys.readouterr().out.splitlines()
        return json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    return run


def test_every_verb_that_prints_facts_has_it() -> None:
    parser = whole_parser()
    (verbs,) = (action for action in actions(parser) if action.dest == "verb")
    assert verbs.choices is not None
    having = {
        name
        for name in VERBS
        if any("--json" in action.option_strings for action in actions(dict(verbs.choices)[name]))
    }
    assert having == VERBS.keys() - WITHOUT


def test_tables(facts: Facts) -> None:
    assert [row["name"] for row in facts("models")] == list(MODELS)
    assert facts("models")[0]["parameters"] == 690_590
    assert {row["name"]: row["images"] for row in facts("models", "--devices")}["v100"] == {"resnet50": 1075}
    rows = facts("data", "list")
    assert [(row["name"], row["train"]) for row in rows] == [(info.name, info.train) for info in DATA.values()]
    assert rows[0]["where"] == "in the package"
    assert facts("doctor")["cores"].isdecimal()


def test_a_data_set(facts: Facts, tmp_path: Path) -> None:
    images, labels = np.zeros((6, 4, 5), np.float32), np.arange(6) % 3
    np.savez(tmp_path / "own.npz", x_train=images, y_train=labels, x_test=images, y_test=labels)
    got = facts("data", "get", "arrays:own.npz")
    assert (got["train"], got["shape"], got["classes"]) == (6, [1, 4, 5], 3)
    assert facts("data", "path", "arrays:own.npz") == {"name": "arrays:own.npz", "path": got["file"]}
    assert facts("data", "get", "synthetic:train=50")["file"] is None


def test_a_comparison(facts: Facts) -> None:
    write_run(Path("a"), steady(0.1))
    write_run(Path("b"), steady(0.2, seed=1), workers=2)
    found = facts("compare", "a", "b", "--fail-if-slower", "5")
    assert found["faster"]["low"] < found["faster"]["value"] == pytest.approx(1.0, rel=0.1)
    assert {"where": "spec", "name": "workers", "first": 1, "second": 2} in found["differences"]
    assert (found["slower"]["percent"], found["first"]["runs"], found["too_short"]) == (5, 1, False)
    write_run(Path("c"), steady(0.2, seed=1))
    assert facts("compare", "a", "c", "--fail-if-slower", "5", code=1)["slower"]["is_slower"] is True
    assert facts("compare", "a", "c")["slower"] is None


def test_a_report(facts: Facts, tmp_path: Path) -> None:
    for workers in (1, 2):
        write_run(tmp_path / "runs" / f"r{workers}", steady(0.1), workers=workers)
    (tmp_path / "runs" / "half").mkdir()
    (tmp_path / "runs" / "half" / "summary.json").write_text('{"status": "comp')
    found = facts("report", "runs", "-o", "a.html")
    assert (found["runs"], found["settings"], found["report"]) == (2, 2, str(tmp_path / "a.html"))
    assert found["headline"]
    assert "no summary that can be read" in found["left_out"][0]["why"]
    assert Path("a.html").is_file()


def test_an_experiment(facts: Facts, tmp_path: Path) -> None:
    path, store = tmp_path / "try.toml", Store(tmp_path / "runs")
    path.write_text('title = "A title"\nrepeats = 1\n[[grid]]\nmodel = "mlp"\nbatch_size = 8\n')
    experiment = read_experiment(path)
    with store.locked():
        store.open(experiment)
    [task] = experiment.tasks()
    assert facts("bench", str(path), "--list") == [{"name": task.name, "about": str(task)}]
    write_run(store.folder / task.name, steady(0.1))
    found = facts("bench", str(path), "-o", str(store.folder))
    assert (found["runs"], found["there"], found["made"], found["failed"], found["stopped"]) == (1, 1, 0, {}, False)
    assert found["headline"]


def test_labs(facts: Facts) -> None:
    assert all(lab["name"] for lab in facts("lab", "status")["labs"])

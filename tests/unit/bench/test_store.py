"""The folder of an experiment: one bench at a time, nothing of another program or machine, nothing removed in error."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from paceline.bench.experiment import Experiment, read_experiment
from paceline.bench.store import COMMON, Store, here
from paceline.errors import UsageError
from paceline.run.folder import BENCH, read_bench, write_bench, write_summary
from paceline.run.records import COMPLETED, Summary


@pytest.fixture
def experiment(tmp_path: Path) -> Experiment:
    path = tmp_path / "try.toml"
    path.write_text('title = "Try"\nrepeats = 2\n[[grid]]\nmodel = "mlp"\nbatch_size = [8, 16]\n')
    return read_experiment(path)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "runs")


HOLD = """
import sys
from pathlib import Path
from paceline.bench.store import Store
with Store(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_a_second_bench_is_refused_until_the_first_has_gone_even_if_it_was_killed(store: Store) -> None:
    command = [sys.executable, "-c", HOLD, str(store.folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(UsageError, match="another bench is writing"), store.locked():
            pass
        other.kill()
        other.wait()
    with store.locked():
        assert (store.folder / ".lock").exists()


def test_what_is_run_on_what_is_written_down(store: Store, experiment: Experiment) -> None:
    with store.locked():
        store.open(experiment)
        store.open(experiment)
    bench = read_bench(store.folder)
    assert bench
    assert (bench.name, bench.title, bench.repeats, bench.here) == ("try", "Try", 2, here())
    assert set(bench.runs) == {task.name for task in experiment.tasks()}


@pytest.mark.parametrize("key", COMMON)
def test_results_of_something_else_are_never_mixed(store: Store, experiment: Experiment, key: str) -> None:
    with store.locked():
        store.open(experiment)
        bench = read_bench(store.folder)
        assert bench
        write_bench(store.folder, replace(bench, here=bench.here | {key: "another"}))
        with pytest.raises(UsageError, match=f"runs of another {COMMON[key]} .*--fresh"):
            store.open(experiment)
        store.begin_again()
        store.open(experiment)
    again = read_bench(store.folder)
    assert again
    assert again.here == here()


def test_a_folder_of_something_else_is_refused_and_left_alone(store: Store, experiment: Experiment) -> None:
    store.folder.mkdir()
    (store.folder / "thesis.txt").write_text("years of work")
    with store.locked():
        with pytest.raises(UsageError, match=r"not an experiment's folder \(it has 'thesis.txt'\)"):
            store.open(experiment)
        with pytest.raises(UsageError, match="--fresh removes nothing else"):
            store.begin_again()
    assert (store.folder / "thesis.txt").read_text() == "years of work"


def test_another_experiment_and_a_damaged_record_are_refused(store: Store, experiment: Experiment) -> None:
    with store.locked():
        store.open(experiment)
        with pytest.raises(UsageError, match="runs of the experiment try"):
            store.open(replace(experiment, name="other"))
        (store.folder / BENCH).write_text("{")
        with pytest.raises(UsageError, match=f"{BENCH} cannot be read"):
            store.open(experiment)


def test_fresh_removes_runs_and_nothing_else(store: Store, experiment: Experiment) -> None:
    with store.locked():
        store.open(experiment)
        for name, file in (("a-run", "spec.toml"), ("pictures", "a.png")):
            (store.folder / name).mkdir()
            (store.folder / name / file).write_text("")
        store.begin_again()
    assert sorted(path.name for path in store.folder.iterdir()) == [".lock", "pictures"]


def test_only_a_completed_run_is_done_and_failures_are_remembered_until_they_are_not(
    store: Store, experiment: Experiment
) -> None:
    task, other, *_ = experiment.tasks()
    summary = Summary("failed", "sequential", 1, "gloo", "mlp", "mnist-mini", 8, 8, 1, 0)
    with store.locked():
        store.open(experiment)
        (store.folder / task.name).mkdir()
        write_summary(store.folder / task.name, summary)
        assert store.done(task) is None
        store.note(task, "rank 0 died")
        store.note(other, "no memory")
        store.open(experiment)
        assert json.loads((store.folder / BENCH).read_text())["failed"] == {
            task.name: "rank 0 died", other.name: "no memory"}  # fmt: skip
        assert not store.clear(task).exists()
        (store.folder / task.name).mkdir()
        write_summary(store.folder / task.name, replace(summary, status=COMPLETED, steps=1))
        store.note(task, None)
        assert store.done(task) is None  # its step is not written down
        step = {"kind": "step", "step": [0], "epoch": 0, "time": 1.0, "seconds": 1.0, "samples": 8, "spans": {}}
        (store.folder / task.name / "rank_0.jsonl").write_text(json.dumps(step) + "\n")
        assert store.done(task) is None  # it is damaged
        (store.folder / task.name / "rank_0.jsonl").write_text(json.dumps(step | {"step": 0}) + "\n")
        assert store.done(task)
    bench = read_bench(store.folder)
    assert bench
    assert bench.failed == {other.name: "no memory"}

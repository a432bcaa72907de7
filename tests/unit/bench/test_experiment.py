"""Experiments as files: grids, repeats, labs, and what is refused, with its place."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from paceline.analysis.statistics import ENOUGH_SAMPLES
from paceline.bench import experiment as module
from paceline.bench.experiment import Experiment, Point, read_experiment
from paceline.cli.main import main
from paceline.data.table import describe
from paceline.errors import UsageError

EXPERIMENTS = Path(__file__).parents[3] / "experiments"
# The files that benchmarks/prediction.py and benchmarks/advice.py read are no experiments themselves.
FILES = sorted(path for path in EXPERIMENTS.glob("*.toml") if path.stem not in ("prediction", "advice"))
DEMO = EXPERIMENTS.parent / "examples" / "demo.toml"
GRID = """
repeats = 3
[fixed]
model = "mlp"
global_batch = 24
steps = 5
[[grid]]
strategy = "sequential"
[[grid]]
strategy = ["ring", "allreduce"]
workers = [1, 2, 4]
lr = [0.1, 0.2]
"""


def read(folder: Path, text: str, *, quick: bool = False, repeats: int | None = None) -> Experiment:
    path = folder / "try.toml"
    path.write_text(text)
    return read_experiment(path, quick=quick, repeats=repeats)


def refusal(folder: Path, text: str, *, quick: bool = False) -> str:
    with pytest.raises(UsageError) as caught:
        read(folder, text, quick=quick)
    return str(caught.value)


def test_a_grid_is_every_combination_and_a_global_batch_is_divided(tmp_path: Path) -> None:
    found = read(tmp_path, GRID)
    specs = [point.resolved.spec for point in found.points]
    seen = [(s.strategy, s.workers, s.batch_size, s.lr) for s in specs]
    rest = [(s, w, 24 // w, lr) for s in ("ring", "allreduce") for w in (1, 2, 4) for lr in (0.1, 0.2)]
    assert seen == [("sequential", 1, 24, 0.001), *rest]
    assert len(found.tasks()) == 3 * 13


def test_the_batch_of_a_grid_is_meant_and_not_the_fixed_one_of_the_other_kind(tmp_path: Path) -> None:
    text = "[fixed]\nbatch_size = 8\nworkers = 2\n[[grid]]\nlr = 0.1\n[[grid]]\nglobal_batch = 32\n"
    assert [point.resolved.spec.batch_size for point in read(tmp_path, text).points] == [8, 16]
    text = "[fixed]\nglobal_batch = 8\nworkers = 2\n[[grid]]\nlr = 0.1\n[[grid]]\nbatch_size = 32\n"
    assert [point.resolved.spec.batch_size for point in read(tmp_path, text).points] == [4, 32]


def test_a_global_batch_need_not_be_a_multiple_of_the_workers(tmp_path: Path) -> None:
    (point,) = read(tmp_path, "[[grid]]\nglobal_batch = 10\nworkers = 4\n").points
    spec = point.resolved.spec
    assert (spec.update_batch, spec.batch_size, spec.scale_lr) == (10, 3, False)


def test_an_option_applies_to_the_runs_whose_strategy_has_it(tmp_path: Path) -> None:
    text = '[fixed]\noverlap = "off"\n[[grid]]\nstrategy = ["sequential", "ring"]\nworkers = 1\nbucket_mb = [1, 2]\n'
    text += "[[grid]]\nworkers = [1, 2]\n"
    specs = [point.resolved.spec for point in read(tmp_path, text).points]
    seen = [(s.strategy, s.workers, s.overlap, s.bucket_mb) for s in specs if "overlap" in s.names]
    assert seen == [("ring", 1, "off", 1.0), ("ring", 1, "off", 2.0), ("allreduce", 2, "off", 4.0)]
    assert [s.strategy for s in specs if "overlap" not in s.names] == ["sequential"]


def test_options_of_other_strategies_are_no_part_of_a_digest(tmp_path: Path) -> None:
    (point,) = read(tmp_path, '[[grid]]\nstrategy = "ring"\n').points

    def digest(**values: Any) -> str:
        return Point(replace(point.resolved, spec=replace(point.resolved.spec, **values))).digest()

    assert digest(staleness=7) == point.digest() != digest(overlap="off")


def test_repeats_are_interleaved_each_in_another_order_that_stays_the_same(tmp_path: Path) -> None:
    tasks = read(tmp_path, GRID).tasks()
    thirds = [tasks[i : i + 13] for i in (0, 13, 26)]
    orders = [[task.point.digest() for task in third] for third in thirds]
    assert [{task.repeat for task in third} for third in thirds] == [{0}, {1}, {2}]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(orders[2])
    assert orders[0] != orders[1] != orders[2]
    assert [task.name for task in tasks] == [task.name for task in read(tmp_path, GRID).tasks()]
    assert max(Counter(task.name for task in tasks).values()) == 1
    assert [task.seed for task in (tasks[0], tasks[13], tasks[26])] == [0, 1, 2]


def test_a_setting_of_two_grids_is_run_once(tmp_path: Path) -> None:
    text = '[[grid]]\nworkers = [1, 2]\nstrategy = "ring"\n[[grid]]\nworkers = [2, 4]\nstrategy = "ring"\n'
    assert [point.resolved.spec.workers for point in read(tmp_path, text).points] == [1, 2, 4]


def test_the_quick_form_takes_the_place_of_what_it_names(tmp_path: Path) -> None:
    text = 'limits = ["slow"]\n' + GRID
    text += '[quick]\nrepeats = 1\nlimits = ["short"]\nfixed = { steps = 2 }\n[[quick.grid]]\nstrategy = "sequential"\n'
    quick, full = read(tmp_path, text, quick=True), read(tmp_path, text)
    assert (len(quick.tasks()), quick.limits, quick.quick) == (1, ("slow", "short"), True)
    assert quick.points[0].resolved.spec.steps == 2
    assert (len(full.tasks()), full.limits) == (39, ("slow",))
    assert len(read(tmp_path, text, repeats=2).tasks()) == 26


def test_a_lab_has_as_many_nodes_as_it_needs(tmp_path: Path) -> None:
    text = '[[grid]]\nmodel = "mlp"\nstrategy = "ps-sync"\nworkers = 3\nservers = 2\nlab = "1gbit:{ranks}"\n'
    text += '[[grid]]\nmodel = "mlp"\nstrategy = "ring"\nworkers = 4\nnodes = [1, 2]\n'
    text += 'lab = { rate = "50mbit", nodes = "{nodes}", speed = 8 }\n'
    served, one, two = read(tmp_path, text).points
    assert served.plan
    assert one.plan
    assert two.plan
    assert [len(point.plan.nodes) for point in (served, one, two) if point.plan] == [5, 1, 2]
    assert {(node.up, node.speed) for node in two.plan.nodes} == {(50_000_000, 8.0)}
    (tmp_path / "slow.toml").write_text('nodes = 2\nrate = "10mbit"\n')
    (point,) = read(tmp_path, '[[grid]]\nworkers = 2\nlab = "slow.toml"\n').points
    assert point.plan
    assert [node.down for node in point.plan.nodes] == [10_000_000] * 2


def test_grids_that_need_a_gpu_are_left_out_where_there_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '[[grid]]\nmodel = "mlp"\n[[grid]]\nneeds = "gpu"\nmodel = "mlp"\nbatch_size = 7\n'
    monkeypatch.setattr(module, "count_gpus", lambda: 0)
    without = read(tmp_path, text)
    assert (len(without.points), without.left_out) == (1, ("grid 2 needs 1 GPU, and this machine has none",))
    assert "nothing can be run here" in refusal(tmp_path, '[[grid]]\nneeds = "gpu"\n')
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    assert len(read(tmp_path, text).points) == 2
    several = read(tmp_path, text.replace('"gpu"', '"gpu:4"'))
    assert several.left_out == ("grid 2 needs 4 GPUs, and this machine has 1",)
    fixed = '[fixed]\nneeds = "gpu"\n[[grid]]\nmodel = "mlp"\n'
    assert len(read(tmp_path, fixed).points) == 1


def test_all_threads_are_the_cores_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: 6)
    found = read(tmp_path, '[[grid]]\nmodel = "mlp"\nthreads = [1, "all", 6]\n')
    assert [point.resolved.spec.threads for point in found.points] == [1, 6]
    assert "threads" in refusal(tmp_path, '[[grid]]\nmodel = "mlp"\nthreads = "some"\n')


WRONG = {
    "ttle = 'x'": "try.toml: unknown key 'ttle'; did you mean 'title'?",
    "[fixed]\nbatchsize = 3": "try.toml: fixed: unknown key 'batchsize'; did you mean 'batch_size'?",
    "[[grid]]\nmodel = 'mlp'\n[[grid]]\nworkers = [1, 2]\nstrategy = ['sequential', 'ring']": "grid 2 (workers = 2, "
    "strategy = 'sequential'): strategy sequential with 2 workers",
    "[[grid]]\nworkers = ['two']": "grid 1: --workers is 'two'; it takes a whole number",
    "[[grid]]\nworkers = []": "grid 1: workers is an empty list",
    "[grid]\nworkers = 2": "is not a list of tables; write [[grid]]",
    "[[grid]]\nglobal_batch = 'ten'\nworkers = 4": "grid 1: --global-batch is 'ten'; it takes a whole number",
    "[fixed]\nglobal_batch = 10\nbatch_size = 4": "global_batch and batch_size are both given",
    "[[grid]]\nstrategy = ['ring', 'sequential']\nworkers = 1\nstages = 1": "grid 1: no run uses stages: leave it out, "
    "or use one of the strategies that have it (pipeline)",
    "[fixed]\nstaleness = 2\n[[grid]]\nstrategy = 'ring'": "fixed: no run uses staleness",
    "[[grid]]\nglobal_batch = 10\nbatch_size = 4": "global_batch and batch_size are both given",
    "[[grid]]\nnodes = 2\nworkers = 2": "nodes is for runs in a lab",
    "[[grid]]\nnodes = 3\nworkers = 2\nlab = '1gbit:{nodes}'": "nodes is 3; 2 ranks can be on 1 to 2",
    "[[grid]]\nlab = '2gbit:4'": "did you mean '1gbit'?",
    "[[grid]]\nlab = { rate = '1mbit', nods = 2 }": "unknown key 'nods'",
    "[[grid]]\nname = 'mine'": "name is set for every run",
    "[[grid]]\nneeds = 'tpu'": 'needs is \'tpu\'; it can be "gpu", or "gpu:4"',
    "[[grid]]\nseed = [0, 1]": "grid 1: seed is a list; every repeat already has another seed",
    "[fixed]\nseed = 4294967295": "seed: 3 repeats, each with the next seed, would exceed",
    "[[grid]]\nbatch-size = 3\nbatch_size = 4": "grid 1: batch_size is given twice",
    "repeats = 0": "repeats: 0 is not a whole number from 1 to 1000",
    "repeats = 1000\n[[grid]]\nlr = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]": "6000 runs; an experiment can have up to 5000",
    "draw = ['stong']": "draw: unknown chart 'stong'; did you mean 'strong'?",
    "title = 3": "title: 3 is not a string",
    "limits = 'x'": "limits: 'x' is not a list of strings",
    "[quick]\ndraw = ['strong']": "quick: unknown key 'draw'",
    "[[paper]]\nmatch = { wrkers = 2 }": "paper 1: match: unknown key 'wrkers'; did you mean 'workers'?",
    "[[paper]]\ntest_accuracy = 98.8": "it takes a number from 0 to 1, not a percentage",
    "[[paper]]\nepoch_secs = 3.0": "paper 1: unknown key 'epoch_secs'; did you mean 'epoch_seconds'?",
    "[[paper]]\nepoch_seconds = 'long'": "paper 1: epoch_seconds is 'long'; it takes a number",
    "a = ": "not valid TOML",
}


@pytest.mark.parametrize("text", WRONG, ids=[text.replace("\n", " ") for text in WRONG])
def test_what_is_wrong_is_said_with_its_place(tmp_path: Path, text: str) -> None:
    said = refusal(tmp_path, text)
    assert "try.toml" in said
    assert WRONG[text] in said


def test_no_file_and_no_quick_form(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read the experiment .*none\.toml"):
        read_experiment(tmp_path / "none.toml")
    assert "has no quick form" in refusal(tmp_path, GRID, quick=True)


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_experiments_that_come_with_the_project_can_be_run(path: Path, quick: bool) -> None:
    found = read_experiment(path, quick=quick)
    assert found.points
    assert found.title
    assert found.about
    assert found.source
    assert found.limits
    assert found.draw


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_they_make_enough_steps_to_be_ranked(path: Path, quick: bool) -> None:
    """Over the repeats of a setting, as reports count them; a third of them may be warm-up or like their neighbours."""
    found = read_experiment(path, quick=quick)
    for point in found.points:
        spec, data = point.resolved.spec, describe(point.resolved.spec.data)
        assert data
        an_epoch = -(-(data.train - spec.validation_samples(data)) // spec.update_batch)
        steps = spec.steps or spec.epochs * an_epoch
        if spec.method.updates_by_worker:
            steps //= spec.workers or 1
        assert steps * found.repeats >= 1.5 * ENOUGH_SAMPLES, point


@pytest.mark.parametrize("quick", [True, False], ids=["quick", "full"])
@pytest.mark.parametrize("path", [*FILES, DEMO], ids=lambda path: path.stem)
def test_they_have_one_process_with_all_cores_to_compare_with(
    path: Path, quick: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cores", lambda: 16)
    specs = [point.resolved.spec for point in read_experiment(path, quick=quick and path != DEMO).points]
    real = [spec for spec in specs if not spec.emulated]
    rivals = [(spec.model, spec.batch_size) for spec in real if spec.workers == 1 and spec.threads in (None, 16)]
    for spec in real:
        assert {(spec.model, spec.batch_size), (spec.model, spec.update_batch)} & {*rivals}, spec


CLAIM = """
[[claim]]
name = "ring-wins"
text = "A ring is faster."
of = { strategy = "ring" }
measure = "speed"
faster_than = { strategy = "allreduce" }
"""


def test_claims_are_kept_and_one_that_cannot_be_judged_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    [claim] = read(tmp_path, GRID + CLAIM).claims
    assert claim["faster_than"] == {"strategy": "allreduce"}
    said = refusal(tmp_path, GRID + CLAIM.replace('"speed"', '"sped"'))
    assert "try.toml: claim 1: unknown measure 'sped'; did you mean 'speed'?" in said
    assert main(["bench", str(tmp_path / "try.toml"), "-o", str(tmp_path / "out")]) == 2
    assert "unknown measure 'sped'" in capsys.readouterr().err


def test_a_run_is_named_as_in_the_report(tmp_path: Path) -> None:
    names = [str(task) for task in sorted(read(tmp_path, GRID, repeats=1).tasks(), key=lambda task: task.name)]
    assert "mlp, sequential, 1 worker, batch 24, learning rate 0.001, repeat 1" in names
    assert "mlp, ring, 4 workers, batch 6, learning rate 0.2, repeat 1" in names
    assert len(set(names)) == 13
    text = '[[grid]]\nstrategy = "ring"\nworkers = 4\nnodes = [2, 4]\nlab = "1gbit:{nodes}"\n'
    assert sorted(map(str, read(tmp_path, text, repeats=1).tasks())) == [
        "mnist-cnn, ring, 4 workers, batch 128, 2 nodes, repeat 1",
        "mnist-cnn, ring, 4 workers, batch 128, 4 nodes, repeat 1",
    ]

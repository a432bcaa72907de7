"""The command of a run: its files say what the experiment asked for, and nothing that was chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from paceline.bench.experiment import read_experiment
from paceline.bench.run import _command
from paceline.lab.plan import read_plan
from paceline.spec import read_config, resolve

LAB = 'lab = { preset = "1gbit", node = [{ name = "a", processes = 2 }, { name = "b" }], share = ["/größe"] }'


def test_the_files_of_a_run_have_what_was_asked_for(tmp_path: Path) -> None:
    path, private, out = tmp_path / "try.toml", tmp_path / "private", tmp_path / 'a "b" \\'
    private.mkdir()
    path.write_text(f'[[grid]]\nmodel = "mlp"\nhidden = [16, 8]\nworkers = 2\nlr = 1e-3\n{LAB}\n')
    (task,) = read_experiment(path, quick=False, repeats=1).tasks()
    words = _command(task, out, private)
    assert words[3:6] == ["lab", "run", str(private / "lab.toml")]
    assert task.point.plan is not None
    assert read_plan(words[5]) == replace(task.point.plan, shared=("/größe", str(out)))
    given = read_config(words[words.index("--config") + 1])
    assert given == {"model": "mlp", "hidden": [16, 8], "workers": 2, "lr": 1e-3}
    assert resolve(("run.toml", given), one_machine=False).spec == task.point.resolved.spec

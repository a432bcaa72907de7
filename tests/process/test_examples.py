"""Ordinary scripts become data-parallel by a few lines, and train the same model."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from live_run import BIN, MPIEXEC
from torch import Tensor

from paceline.run.folder import read_summary
from paceline.run.records import COMPLETED

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
# Few samples, so that the last batch of an epoch is uneven: 5 samples of 32, for 2 and 3 ranks.
OPTIONS = {
    "mnist": ["--samples", "101", "--batch-size", "32", "--epochs", "2", "--dropout", "0"],
    "gpt": ["--steps", "6", "--batch-size", "5", "--block", "16", "--layers", "2", "--width", "32", "--warmup", "2"],
}
LAUNCHERS = {
    "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", "2"],
    "mpiexec": [*MPIEXEC, "-n", "3", sys.executable],
}


def lines_of(name: str) -> list[str]:
    """The lines of a script, without its docstring and indentation."""
    text = (EXAMPLES / f"{name}.py").read_text().split('"""', 2)[2]
    return [line.strip() for line in text.splitlines() if line.strip()]


@pytest.mark.parametrize("name", OPTIONS)
def test_the_lines_that_change_are_few_and_marked(name: str) -> None:
    changes = list(difflib.ndiff(lines_of(name), lines_of(f"{name}_parallel")))
    new = [line for line in changes if line.startswith("+ ")]
    assert len(new) <= 10
    assert all(line.endswith("  # changed") for line in new)
    assert len([line for line in changes if line.startswith("- ")]) < len(new)


def run(command: list[str], name: str, folder: Path, *more: str) -> dict[str, Tensor]:
    """Run it in float64, so that rounding does not hide a difference; the weights that it saves."""
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    weights = folder / f"{name}-{len(list(folder.iterdir()))}.pt"
    done = subprocess.run(
        [*command, str(EXAMPLES / f"{name}.py"), *more, "--float64", "--save", str(weights)],
        capture_output=True, text=True, timeout=100, check=False, env=variables, cwd=folder,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("loss") > 0
    found: dict[str, Tensor] = torch.load(weights, weights_only=True)
    return found


@pytest.mark.parametrize(("name", "launchers"), [("mnist", ["torchrun", "mpiexec"]), ("gpt", ["torchrun"])])
def test_the_same_model_is_trained(name: str, launchers: list[str], tmp_path: Path) -> None:
    wanted = run([sys.executable], name, tmp_path, *OPTIONS[name])
    for launcher in launchers:
        runs = tmp_path / launcher
        found = run(LAUNCHERS[launcher], f"{name}_parallel", tmp_path, *OPTIONS[name], "--folder", str(runs))
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            assert (found[key] - value).abs().max() < 1e-10, key
        summary = read_summary(runs)
        assert summary
        assert summary.status == COMPLETED
        assert summary.steps == (8 if name == "mnist" else 6)

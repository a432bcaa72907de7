"""Ranks compile nothing, so they do not import torch's compiler: that takes longer than importing torch itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
SCRIPT = """
import sys
from pathlib import Path
import parity_cases as cases
from served import train_served
from worlds import ThreadWorld

common = {"data": "synthetic:1x9x9,train=24,test=6", "batch_size": 4, "steps": 3}
workers = {"sequential": 1, "ring": 2, "pipeline": 2, "tensor": 2, "ps-sync": 2}
real = {"model": "mlp", "hidden": (256,)}
variants = [real | {"strategy": one, "optimizer": name} for one in workers for name in ("adam", "adamw", "sgd")]
emulated = {"model": "resnet18", "compute": "emulated:0.01", "test": False}
variants += [emulated | {"strategy": one} for one in ("ring", "ps-sync")]
for number, variant in enumerate(variants):
    folder = Path(sys.argv[1]) / str(number)
    folder.mkdir()
    values = common | {"workers": workers[variant["strategy"]]} | variant
    if variant["strategy"].startswith("ps"):
        train_served(values, folder)
    else:
        ThreadWorld(values["workers"]).run(cases.train_here, folder=str(folder), values=values)
    assert "torch._dynamo" not in sys.modules, variant
"""


def test_no_strategy_imports_the_compiler_or_leaves_its_folder(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "runs").mkdir()
    folders = os.pathsep.join(str(TESTS / name) for name in (".", "parity"))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "runs")],
        env=dict(os.environ) | {"TMPDIR": str(tmp_path / "tmp"), "PYTHONPATH": folders, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not os.listdir(tmp_path / "tmp")

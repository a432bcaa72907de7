"""With --on-nan skip, all strategies leave out the same updates, and train the same model without them."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from live_run import PACELINE
from safetensors.torch import load_file

STRATEGIES = {
    "ring": ["--workers", "2"],
    "sharded": ["--workers", "3"],
    "ps-sync": ["--workers", "2", "--servers", "2"],
    "pipeline": ["--workers", "2", "--microbatches", "2", "--cut", "layers"],
    "tensor": ["--workers", "2"],
}
MODEL = """
from torch import nn

class Inverse(nn.Module):
    def forward(self, x):
        return x / (x != 99)

def build(channels, classes):
    return nn.Sequential(Inverse(), nn.Flatten(), nn.Linear(36, 512), nn.ReLU(), nn.Linear(512, classes))
"""


def train(folder: Path, strategy: str, *words: str, code: int = 0) -> str:
    command = [*PACELINE, "--model", "net.py:build", "--data", "arrays:data.npz", "--dtype", "float64",
               "--threads", "1", "--global-batch", "8", "--epochs", "2", "--no-normalize", "--strategy", strategy,
               "--output-dir", str(folder), "--name", strategy, *words]  # fmt: skip
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model divides by zero for one of 60 samples: of 8 updates of each of 2 epochs, one cannot be made."""
    folder = tmp_path_factory.mktemp("skipped")
    dice = np.random.default_rng(0)
    images, labels = dice.normal(size=(60, 6, 6)).astype(np.float32), np.arange(60) % 3
    images[7, 2, 2] = 99
    np.savez(folder / "data.npz", x_train=images, y_train=labels, x_test=images[10:30], y_test=labels[10:30])
    (folder / "net.py").write_text(MODEL)
    train(folder, "sequential", "--on-nan", "skip")
    return folder


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_updates_are_skipped(folder: Path, strategy: str) -> None:
    said = train(folder, strategy, "--on-nan", "skip", *STRATEGIES[strategy])
    assert said.count("Skipped update ") == 2
    one, other = (json.loads((folder / name / "summary.json").read_text()) for name in ("sequential", strategy))
    assert one["skipped"] == other["skipped"] == 2
    assert (one["status"], other["steps"]) == ("completed", 16)
    models = [load_file(folder / name / "model.safetensors") for name in ("sequential", strategy)]
    for name, values in models[0].items():
        torch.testing.assert_close(models[1][name], values, rtol=0, atol=1e-11)
    assert all(values.isfinite().all() for values in models[0].values())


def test_without_it_the_training_ends_before_the_update(folder: Path) -> None:
    said = train(folder, "ring", "--workers", "2", "--name", "stops", code=1)
    assert "the loss is nan after step" in said
    assert not (folder / "stops" / "model.safetensors").exists()


def test_too_many_in_a_row_end_it(folder: Path) -> None:
    with np.load(folder / "data.npz") as data:
        arrays = dict(data)
    arrays["x_train"] = np.full_like(arrays["x_train"], 99)
    np.savez(folder / "bad.npz", **arrays)
    said = train(folder, "gather", "--workers", "2", "--on-nan", "skip", "--data", "arrays:bad.npz", code=1)
    assert said.count("Skipped update ") == 10
    assert "the loss is nan after step 11" in said

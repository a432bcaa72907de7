"""A user's own model and data: what is wrong with them, every rank says, and exits with 2."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from live_run import MPIEXEC, PACELINE, launchers
from own_modules import write_modules
from PIL import Image
from safetensors.torch import load_file

from paceline.run.folder import read_summary
from paceline.run.records import COMPLETED


def run(folder: Path, launcher: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    write_modules(folder)
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(folder / "cache")}
    command = [*launchers(2)[launcher], "--batch-size", "4", "--epochs", "1", "--name", "run", *arguments]
    return subprocess.run(
        command, cwd=folder, env=variables, capture_output=True, text=True, timeout=100, check=False,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip


def pictures(folder: Path) -> Path:
    """Three classes of eight grey images, 8 pixels a side."""
    for kind in range(3):
        place = folder / "pictures" / f"kind-{kind}"
        place.mkdir(parents=True)
        for number in range(8):
            Image.fromarray(np.full((8, 8), 80 * kind + number, np.uint8)).save(place / f"{number}.png")
    return folder / "pictures"


MODEL = (["--model", "mine:one_too_many", "--data", "mine:load"], ["mine:one_too_many", "4 numbers instead of 3"])
RANDOM = (["--model", "mine:build", "--data", "mine:unseeded"], ["different data than rank 0", "seed"])
LABELS = (["--model", "mine:build", "--data", "mine:wild"], ["mine:wild", "-1"])
IMAGE = (["--model", "mlp", "--data", "images:pictures"], ["broken.png"])


@pytest.mark.parametrize(
    ("launcher", "arguments", "parts"),
    [
        *((launcher, *MODEL) for launcher in ("shm", "mpi", "torchrun")),
        ("shm", *LABELS),
        ("shm", *RANDOM),
        ("mpiexec", *IMAGE),
    ],
    ids=lambda part: part if isinstance(part, str) else part[1] if part[0].startswith("--") else "",
)
def test_what_is_wrong_is_said_by_every_rank_with_exit_code_2(
    launcher: str, arguments: list[str], parts: list[str], tmp_path: Path
) -> None:
    (pictures(tmp_path) / "kind-1" / "broken.png").write_bytes(b"not an image")
    done = run(tmp_path, launcher, *arguments)
    lines = [line for line in done.stderr.splitlines() if not line.startswith("paceline: warning: ")]
    told = [line for line in lines if line.startswith("paceline: ") and not re.search("images (to train on|of)", line)]
    # torchrun has one exit code for all failures; each of its ranks ends with 2.
    assert done.returncode == (1 if launcher == "torchrun" else 2), done.stderr
    assert told
    assert all(part in line for line in told for part in parts), told
    if launcher == "torchrun":
        assert "exitcode  : 2" in done.stderr
    else:
        assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs" / "run").exists(), "nothing was trained"


def test_where_rank_0_scatters_nobody_else_needs_the_data(tmp_path: Path) -> None:
    """Three ranks in two folders, as on two machines; the images are in the first."""
    (tmp_path / "elsewhere").mkdir()
    pictures(tmp_path)
    train = [*PACELINE, "--model", "mlp", "--data", "images:pictures", "--batch-size", "4", "--epochs", "1", "--read"]
    train += ["scatter", "--output-dir", str(tmp_path), "--name", "run"]
    command = [*MPIEXEC, "-n", "1", "--wdir", str(tmp_path), *train, ":"]
    command += ["-n", "2", "--wdir", str(tmp_path / "elsewhere"), *train]
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1", "PACELINE_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary.status, summary.workers, summary.steps) == (COMPLETED, 3, 2)


def test_a_script_finds_its_own_modules_from_any_folder(tmp_path: Path) -> None:
    (tmp_path / "tools").mkdir()
    write_modules(tmp_path / "tools")
    (tmp_path / "tools" / "go.py").write_text(
        "import paceline\n"
        "spec = paceline.RunSpec(model='mine:build', data='mine:load', workers=2, batch_size=4, epochs=1)\n"
        "print(paceline.train(spec).status)\n"
    )
    command = [sys.executable, "tools/go.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stdout) == (0, "completed\n"), done.stderr


ROWS = ["--model", "mlp", "--data", "arrays:rows.npz", "--optimizer", "sgd"]
TOKENS = ["--model", "gpt", "--data", "tokens:row.bin,block=8", "--optimizer", "sgd"]


@pytest.mark.parametrize(
    ("common", "arguments"),
    [
        (ROWS, ["--read", "scatter", "--strategy", "ring"]),
        (ROWS, ["--strategy", "ps-sync"]),
        (TOKENS, ["--read", "scatter", "--strategy", "ring"]),
        (TOKENS, ["--read", "mpi-io", "--strategy", "ring"]),
    ],
    ids=lambda each: "-".join(each[1:4:2]),
)
def test_other_data_than_images_train_the_same_model_however_they_are_read(
    common: list[str], arguments: list[str], tmp_path: Path
) -> None:
    """64-bit floats with classes, and a row of tokens; compared with one process."""
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = {}
    for part, count in (("train", 30), ("test", 11)):
        arrays |= {f"x_{part}": random.normal(size=(count, 5)), f"y_{part}": np.arange(count) % 3}
    np.savez(tmp_path / "rows.npz", **arrays)
    random.integers(0, 60, 300).astype("<u2").tofile(tmp_path / "row.bin")
    common = [*common, "--dtype", "float64", "--epochs", "2", "--threads", "1", "--global-batch", "8"]
    variables = dict(os.environ) | {"PACELINE_CACHE": str(tmp_path / "cache")}
    for name, own in (("one", ["--workers", "1"]), ("two", ["--workers", "2", *arguments])):
        done = subprocess.run(
            [*PACELINE, *common, *own, "--name", name], cwd=tmp_path, env=variables, capture_output=True, text=True,
            timeout=100, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / "runs" / name / "model.safetensors") for name in ("one", "two"))
    for key, weights in one.items():
        torch.testing.assert_close(two[key], weights, rtol=0, atol=1e-12)

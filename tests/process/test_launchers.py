"""The same command trains the same model, whoever starts the ranks."""

from __future__ import annotations

import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from live_run import LAUNCHERS, PACELINE, LiveRun, on_a_terminal
from own_modules import write_modules
from safetensors.torch import load_file
from torch import Tensor

import paceline
from paceline.collectives.ring import RING
from paceline.errors import UsageError
from paceline.run.folder import read_nodes
from paceline.strategies.synchronous import RIDERS

SHORT = [
    *("--model", "mine:build", "--data", "mine:load", "--strategy", "ring", "--epochs", "1", "--batch-size", "4"),
    *("--optimizer", "sgd", "--dtype", "float64", "--json", "--validation", "0.2"),
    *("--threads", str(os.cpu_count())),  # more threads than cores, on every machine
]
# `python -m` puts the working folder first on the import path.
EVERY = LAUNCHERS | {
    "shm": [sys.executable, "-m", "paceline", *LAUNCHERS["shm"][1:]],
    "threads": [*PACELINE, "--workers", "3", "--transport", "threads"],
}
Trained = tuple[dict[str, Tensor], dict[str, Any]]  # the weights and the summary


@pytest.fixture(scope="module")
def by_shm(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return train_by("shm", tmp_path_factory.mktemp("shm"))


@pytest.mark.parametrize("launcher", [name for name in EVERY if name != "shm"])
def test_every_launcher_trains_the_same_model(launcher: str, by_shm: Trained, tmp_path: Path) -> None:
    """Bit for bit: the ring adds in the same order on every transport."""
    (wanted, first), (found, summary) = by_shm, train_by(launcher, tmp_path)
    assert all((found[key] == wanted[key]).all() for key in wanted)
    assert summary["test_loss"] == pytest.approx(first["test_loss"], rel=1e-14)  # transports have orders of their own


def train_by(launcher: str, folder: Path) -> Trained:
    """Train a user's model on a user's data; their modules replace none of a library."""
    write_modules(folder)
    for name in ("json", "random", "torch", "typing"):
        (folder / f"{name}.py").write_text("open('executed', 'a').write(__file__)\nraise ImportError(__file__)\n")
    with LiveRun(EVERY[launcher] + SHORT, folder, cwd=folder) as run:
        assert run.end() == 0, run.stderr()
        assert not (folder / "executed").exists()
        lines = run.stdout().strip().splitlines()
        assert len(lines) == 1, "only the summary goes to standard output"
        assert len(re.findall(r"paceline: warning: 3 workers.* take turns", run.stderr())) == 1
        assert run.stderr().count(f"to watch it: paceline watch {run.folder}\n") == 1
        check_folder(run)
        run.check_nothing_is_left()
        summary = json.loads(lines[0])
        assert summary["status"] == "completed"
        assert summary["transport"] == {"torchrun": "shm", "mpiexec": "mpi"}.get(launcher, launcher)
        return load_file(run.folder / "model.safetensors"), summary


def check_folder(run: LiveRun) -> None:
    """Everything that docs/architecture.md promises is in the run folder."""
    summary = run.summary()
    assert (summary.model, summary.data) == ("mine:build", "mine:load")
    parameters = 4 * 9 + 4 + 3 * 144 + 3
    assert (summary.steps, summary.parameters, summary.global_batch) == (4, parameters, 12)
    assert len(summary.validation_loss) == len(summary.validation_accuracy) == 1
    assert summary.best_epoch == 0
    assert len(summary.bytes_sent) == len(summary.peak_rss_bytes) == 3
    assert summary.wire == "exact"
    # Gradients, a flag for each of the 4 parameters, the extras and 2 numbers of its own, in float64, 4 times.
    cost = RING.cost(3, parameters + 4 + RIDERS + 2, 8)
    assert tuple(summary.bytes_sent) == tuple(4 * sent for sent in cost.bytes_sent)
    assert summary.total_seconds is not None
    assert summary.total_seconds >= sum(summary.epoch_seconds)
    environment = json.loads((run.folder / "env.json").read_text())
    assert [row["rank"] for row in environment["ranks"]] == [0, 1, 2]
    (node,) = read_nodes(run.folder).values()
    assert node.name == environment["ranks"][0]["host"]
    assert all(earlier.time < later.time for earlier, later in pairwise(node.samples))
    for rank in range(3):
        records = [json.loads(line) for line in (run.folder / f"rank_{rank}.jsonl").read_text().splitlines()]
        times = [record["time"] for record in records if record["kind"] == "step"]
        assert node.samples[0].time < times[0] < times[-1] < node.samples[-1].time
        spans = next(record["spans"] for record in records if record["kind"] == "step")
        assert spans.keys() == {"input", "forward", "backward", "wait", "optimizer"}
    assert 'optimizer = "sgd"' in (run.folder / "spec.toml").read_text()
    assert "# flag" in (run.folder / "spec.toml").read_text()
    for words in ("Time taken to read the data", "Start of epoch 0", "Validation acc", "Test loss", "Total run time"):
        assert words in (run.folder / "logs" / "rank_0.log").read_text()


def test_the_whole_trainer_is_a_function(tmp_path: Path) -> None:
    spec = paceline.RunSpec(model="mlp", hidden=(20, 10), data="synthetic:train=300,test=40", epochs=1, batch_size=30,
                            strategy="gather", workers=2, threads=os.cpu_count(), transport="mpi",
                            output_dir=str(tmp_path), name="r")  # fmt: skip
    with pytest.warns(UserWarning, match="take turns"), pytest.warns(UserWarning, match="mpiexec listens on all"):
        summary = paceline.train(spec)
    assert (summary.status, summary.steps, summary.workers) == ("completed", 5, 2)
    assert summary.parameters == 784 * 20 + 20 + 210 + 110
    assert summary.folder == tmp_path / "r"
    saved = load_file(summary.folder / "model.safetensors")
    again = paceline.train(
        paceline.RunSpec(
            model="mlp",
            hidden=(20, 10),
            data="synthetic:train=300,test=40,classes=7",
            steps=1,
            batch_size=30,
            weights=str(tmp_path / "r" / "model.safetensors"),
            lr=0.0,
            output_dir=str(tmp_path),
            name="s",
        )
    )
    assert again.status == "completed"
    moved = load_file(tmp_path / "s" / "model.safetensors")
    assert (moved["hidden.0.weight"] == saved["hidden.0.weight"]).all()
    assert moved["out.weight"].shape == (7, 10)


def test_a_failure_is_an_error_in_python(tmp_path: Path) -> None:
    with pytest.raises(paceline.PacelineError, match="no such file"):
        paceline.train(paceline.RunSpec(weights=str(tmp_path / "nowhere"), output_dir=str(tmp_path)))
    assert not [entry for entry in tmp_path.iterdir() if entry.is_dir()]
    broken = tmp_path / "broken.safetensors"
    broken.write_bytes(b"not weights" * 10)
    with pytest.raises(UsageError, match=r"^--weights .* cannot be read as safetensors"):
        paceline.train(paceline.RunSpec(weights=str(broken), output_dir=str(tmp_path)))
    assert list(tmp_path.iterdir()) == [broken], "a failed start leaves no run folder"


BARS = [
    *("--model", "mlp", "--data", "synthetic:train=300,test=40", "--batch-size", "10", "--epochs", "1"),
]


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    """Elsewhere there is no bar, as other tests show."""
    code, text = on_a_terminal([*PACELINE, *BARS, "--workers", "2", "--output-dir", str(tmp_path)])
    assert code == 0
    assert b"epoch 0:   0%|" in text
    said = rb"At step 10, update time for each batch: [\d.]+ s, loss: [\d.]+, acc: [\d.]+%, "
    assert re.search(said + rb"[\d,]+ samples/s, \d+:\d\d:\d\d left", text)
    assert b"Total run time" in text


def test_quiet_shows_nothing_on_a_terminal_and_the_log_has_it_all(tmp_path: Path) -> None:
    code, text = on_a_terminal(
        [*PACELINE, *BARS, "--workers", "2", "--quiet", "--output-dir", str(tmp_path), "--name", "run"]
    )
    assert (code, re.sub(rb"The machine was busy.*", b"", text).strip()) == (0, b"")
    assert "Total run time" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.parametrize("launcher", ["shm", "mpi", "torchrun"])
def test_quiet_shows_warnings_and_verbose_where_ranks_run(launcher: str, tmp_path: Path) -> None:
    for flag in ("--quiet", "--verbose"):
        output = tmp_path / flag
        output.mkdir()
        busy = ["--strategy", "ring", "--threads", str(os.cpu_count())]  # more threads than cores: a warning
        with LiveRun([*LAUNCHERS[launcher], *BARS, *busy, flag], output) as run:
            assert run.end() == 0, run.stderr()
            assert "paceline: warning: 3 workers" in run.stderr()
            pids = [f"rank {rank}: process {run.pid(rank)} on " for rank in range(3)]
            log = run.folder / "logs" / "mpiexec.log"  # what its ranks say
            said = run.stderr() + (log.read_text() if log.exists() else "")
            if flag == "--quiet":
                assert re.sub("The machine was busy.*\n", "", run.stdout()) == ""
                assert not any(pid in said for pid in pids)
            else:
                assert " ".join(run.stdout().split()).count("momentum 0.9") == 1, "every option is shown"
                assert all(f"paceline: {pid}" in said for pid in pids)
                assert re.search("paceline: rank 0 of 3 is process .* ranks meet at /", said) or launcher == "torchrun"

"""paceline bench with real runs: failures, Ctrl-C, kill, and going on without repeating a run."""

from __future__ import annotations

import math
import os
import signal
import subprocess
from pathlib import Path

import pytest
from live_run import BIN, until

from paceline.analysis.study import read_study
from paceline.bench.store import Store
from paceline.errors import UsageError
from paceline.run.folder import read_bench, read_summary
from paceline.run.records import COMPLETED

BENCH = [str(BIN / "paceline"), "bench"]


def write(folder: Path, grid: str) -> list[str]:
    (folder / "try.toml").write_text(f'repeats = 1\n[fixed]\nmodel = "mlp"\ntest = false\n{grid}')
    return [*BENCH, str(folder / "try.toml"), "-o", str(folder / "out")]


def run_folders(folder: Path) -> list[Path]:
    return sorted(path.parent for path in (folder / "out").glob("*/spec.toml"))


def pids_of(folder: Path) -> list[int]:
    """Processes that have the folder's name on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if str(folder).encode() in words and int(path.parent.name) != os.getpid():
            found.append(int(path.parent.name))
    return found


def closing_lines(output: str) -> list[str]:
    """What bench prints after its last run, without empty lines."""
    lines = output.splitlines()
    last = max(number for number, line in enumerate(lines) if line.startswith("["))
    return [line for line in lines[last + 1 :] if line]


def test_a_failed_run_does_not_stop_the_rest_and_is_tried_again(tmp_path: Path) -> None:
    """The verdict is told at the end, and then all else."""
    weights = tmp_path / "w.safetensors"
    weights.write_text("no weights")
    command = write(tmp_path, f'[[grid]]\nsteps = 2\n[[grid]]\nsteps = 3\nweights = "{weights}"\n')
    first = subprocess.run(command, check=False, capture_output=True, text=True)
    assert first.returncode == 1, first.stderr
    verdict = read_study([tmp_path / "out"]).headline
    lines = closing_lines(first.stdout)
    assert lines[: len(verdict.text.splitlines())] == verdict.text.splitlines()
    assert verdict.sentence == lines[0]
    assert ": nothing is ranked." in lines[0]
    assert "1 run was made in " in first.stdout
    assert "1 failed" in first.stdout
    bench = read_bench(tmp_path / "out")
    assert bench
    ((name, why),) = bench.failed.items()
    assert "w.safetensors" in why
    good = next(path for path in run_folders(tmp_path) if path.name != name)
    before = (good / "summary.json").stat().st_mtime_ns
    second = subprocess.run(command, check=False, capture_output=True, text=True)
    assert second.returncode == 1
    assert "1 of 2 runs are already done" in second.stdout
    assert (good / "summary.json").stat().st_mtime_ns == before
    assert not list((tmp_path / "out").glob(".run-*"))


def test_ctrl_c_stops_and_the_same_command_goes_on(tmp_path: Path) -> None:
    command = write(tmp_path, '[[grid]]\nstrategy = "ring"\nworkers = 2\nsteps = 1000000\n')
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        until("a rank trains", lambda: any(path.stat().st_size > 500 for path in tmp_path.glob("out/*/rank_1.jsonl")))
        process.send_signal(signal.SIGINT)
        shown, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "stopped" in shown
    assert "the same command continues" in errors
    assert not pids_of(tmp_path)
    assert not list((tmp_path / "out").glob(".run-*"))
    text = (tmp_path / "try.toml").read_text().replace("1000000", "3")
    (tmp_path / "try.toml").write_text(text)
    assert subprocess.run(command, check=False, capture_output=True).returncode == 0
    bench = read_bench(tmp_path / "out")
    assert bench
    summaries = [read_summary(tmp_path / "out" / name) for name in bench.runs]
    assert [summary.status for summary in summaries if summary] == [COMPLETED]


def test_nothing_is_left_of_a_bench_that_was_killed(tmp_path: Path) -> None:
    command = write(tmp_path, '[[grid]]\nstrategy = "ring"\nworkers = 2\nsteps = 1000000\n')
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        until("a rank trains", lambda: any(path.stat().st_size > 500 for path in tmp_path.glob("out/*/rank_1.jsonl")))
        process.kill()
        process.wait()
        with pytest.raises(UsageError, match="another bench is writing"), Store(tmp_path / "out").locked():
            pass  # what is left of it still runs
    until("all processes have ended", lambda: not pids_of(tmp_path))
    until("its files have gone", lambda: not list((tmp_path / "out").glob(".run-*")))


def test_a_wrong_grid_is_refused_before_anything_is_made(tmp_path: Path) -> None:
    command = write(tmp_path, '[[grid]]\nsteps = 2\n[[grid]]\nworkers = [1, 2]\nstrategy = "sequential"\n')
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert "grid 2 (workers = 2): strategy sequential with 2 workers" in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_language_model_is_run_and_reported_by_its_loss(tmp_path: Path) -> None:
    """Trained for real, from the experiment's file to the page: one process and two workers learn the same."""
    (tmp_path / "text.txt").write_text("to be or not to be " * 350)
    (tmp_path / "try.toml").write_text(
        f'repeats = 1\n[fixed]\nmodel = "gpt"\ndata = "text:{tmp_path / "text.txt"}"\nglobal_batch = 8\nepochs = 2\n'
        'validation = 0.2\noptimizer = "adamw"\nwarmup_steps = 2\ndecay = "linear"\nthreads = 1\ndtype = "float64"\n'
        '[[grid]]\nstrategy = "sequential"\n[[grid]]\nstrategy = "ring"\nworkers = 2\n'
    )
    done = subprocess.run([*BENCH, str(tmp_path / "try.toml"), "-o", str(tmp_path / "out")],
                          check=False, capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    study = read_study([tmp_path / "out"])
    one, two = (run.summary for run in study.runs)
    assert one.task == two.task == "language-model"
    assert two.validation_loss == pytest.approx(one.validation_loss, rel=1e-9)
    for run in study.runs:
        tokens = [(step.tokens or 0) / step.samples for step in run.steps[0]]
        assert tokens == pytest.approx([tokens[0]] * len(tokens))
        assert run.summary.samples_per_second
        assert run.summary.tokens_per_second
        assert run.summary.tokens_per_second / run.summary.samples_per_second == pytest.approx(tokens[0])
    assert one.test_metrics["perplexity"] == pytest.approx(math.exp(one.test_loss or 0))
    said = [each.text for each in study.findings if each.kind == "learned"]
    assert any("test losses of the 2 settings cannot be distinguished" in text for text in said), said
    assert not any("accurac" in text for text in said)
    page = tmp_path / "report.html"
    subprocess.run([str(BIN / "paceline"), "report", str(tmp_path / "out"), "-o", str(page)], check=True)
    assert "test perplexity" in page.read_text()

"""Users' own loops under torchrun: recorded however the model is distributed, and however they end."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
import recorded_loops
from live_run import BIN

from paceline.analysis.breakdown import by_rank
from paceline.analysis.runs import Run, read_run
from paceline.cli.main import main
from paceline.run.folder import read_summary
from paceline.run.records import FAILED


def torchrun(out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "torchrun"), "--nproc-per-node", "2", recorded_loops.__file__, str(out), *arguments]
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TMPDIR": str(out)}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, env=variables)


def complete(folder: Path) -> Run:
    run = read_run(folder)
    assert isinstance(run, Run), run
    return run


def test_every_kind_of_loop_is_recorded_and_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = torchrun(tmp_path, "kinds")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith("Run folder: ")] == [
        f"Run folder: {tmp_path / name}" for name in ("ours", "ddp", "again", "hooked", "fsdp")
    ]
    steps = recorded_loops.EPOCHS * -(-recorded_loops.SAMPLES // recorded_loops.BATCH)
    for name, strategy in (("ours", "data-parallel"), ("ddp", "ddp"), ("hooked", "ddp"), ("fsdp", "fsdp2")):
        transport = "shm" if name == "ours" else "gloo"
        run = complete(tmp_path / name)
        summary = run.summary
        assert (summary.strategy, summary.model, summary.workers) == (strategy, "Sequential", 2)
        assert (summary.steps, summary.epochs, summary.transport, summary.parameters) == (steps, 2, transport, 212)
        assert (summary.batch_size, summary.global_batch) == (recorded_loops.BATCH // 2, recorded_loops.BATCH)
        assert summary.train_loss[0] > summary.train_loss[1], "the training was real"
        assert summary.validation_steps == [steps // 2, steps]
        for lines in run.steps.values():
            assert [line.step for line in lines] == list(range(steps))
            assert sum(line.samples for line in lines) == recorded_loops.EPOCHS * recorded_loops.SAMPLES
            expected = {"input", "forward", "backward", "wait", "optimizer"}
            assert all(line.spans.keys() | {"input"} == expected for line in lines)
        assert by_rank(run).keys() == {0, 1}
    measured = {name: complete(tmp_path / name).summary for name in ("ours", "ddp", "hooked", "fsdp")}
    assert {name: len(summary.comm_seconds) for name, summary in measured.items()} == {
        "ours": 2, "ddp": 2, "hooked": 0, "fsdp": 0
    }  # fmt: skip
    again = complete(tmp_path / "again").summary
    assert measured["ddp"].bytes_sent == again.bytes_sent == [steps * 212 * 4] * 2, "the gradients, in float32"
    assert min(measured["ours"].bytes_sent) > steps * 212 * 4, "and a few numbers of its own"
    assert all(0 < seconds < 100 for seconds in measured["ddp"].comm_seconds)
    assert measured["ddp"].train_loss == pytest.approx(measured["fsdp"].train_loss)

    assert main(["compare", str(tmp_path / "ours"), str(tmp_path / "ddp")]) in (0, 1)
    shown = capsys.readouterr().out
    assert "strategy        data-parallel -> ddp" in shown
    assert "gamma 0.7 -> gamma 0.9" in shown
    report = tmp_path / "report.html"
    assert main(["report", *(str(tmp_path / name) for name in measured), "--output", str(report)]) == 0
    assert "fsdp2" in report.read_text()


def test_a_loop_that_fails_twice_is_continued_from_its_checkpoints_as_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for how, steps, why in (
        ("raise", 7, f"ValueError: a bad sample ({recorded_loops.__file__}, line "),
        ("kill", 12, "its process exited without an error message"),
    ):
        done = torchrun(tmp_path, "fault", how)
        assert done.returncode != 0
        summary = read_summary(folder)
        assert summary
        assert (summary.status, summary.failed_rank) == (FAILED, 1), done.stderr
        assert steps - 2 <= summary.steps <= steps, (
            "steps since the last checkpoint, and of the last second, may be missing"
        )
        assert (summary.error or "").startswith(why)
        if how == "raise":
            assert "ValueError: a bad sample" in done.stderr, "the error reaches the user"
    done = torchrun(tmp_path, "fault", "nothing")
    assert done.returncode == 0, done.stderr
    run = complete(folder)
    assert (run.summary.steps, run.summary.resumed, run.summary.epochs) == (recorded_loops.STEPS, [5, 10], 4)
    for lines in run.steps.values():
        assert [line.step for line in lines] == list(range(recorded_loops.STEPS))
        assert [line.epoch for line in lines] == [number // 4 for number in range(recorded_loops.STEPS)]
        losses = [line.loss or 0.0 for line in lines]
        assert losses == sorted(losses, reverse=True), "the training was continued, not started again"

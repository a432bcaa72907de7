"""A training that was killed, interrupted or starved of disk space goes on as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import resumes
import torch
from live_run import PACELINE, LiveRun, is_janitor, until
from raw_lines import raw_lines
from refusal import refusal
from safetensors.torch import load_file

from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.manifest import checkpoints
from paceline.run.folder import read_steps
from paceline.run.records import COMPLETED, INTERRUPTED, RUNNING


@pytest.mark.parametrize("family", resumes.FAMILIES)
def test_a_killed_training_goes_on_to_the_same_weights(family: str, tmp_path: Path) -> None:
    assert resumes.kill_and_continue(family, random.Random(4), tmp_path)[f"{family} continued to the end"] == 1


def test_what_cleans_up_after_a_killed_launcher_leaves_the_run_alone_that_continues(tmp_path: Path) -> None:
    """However late it comes, it removes no checkpoint that is being written, and does not call the run failed."""
    words = [*PACELINE, "--model", "mlp", "--workers", "1", "--steps", "1000000", "--checkpoint-every", "5"]
    with LiveRun(words, tmp_path) as run:
        until("there is a checkpoint", lambda: checkpoints(run.folder / "checkpoints"))
        janitor = run.janitor()
        os.kill(janitor, signal.SIGSTOP)
        resumes.kill_all(run)
    words[-1] = "0"
    try:
        with LiveRun(words, tmp_path) as run:
            run.wait_until_training(run.logged())
            written = run.folder / "checkpoints" / ".step_7.mark"
            written.mkdir()
            os.kill(janitor, signal.SIGCONT)
            until("it has cleaned up", lambda: not is_janitor(janitor))
            assert written.exists()
            assert run.summary().status == RUNNING
    finally:
        if is_janitor(janitor):
            os.kill(janitor, signal.SIGCONT)


MLP = ["--model", "mlp", "--hidden", "256", "--data", "synthetic:1x8x8,classes=10,train=310,test=20"]


def train(output: Path, *words: str, code: int = 0, name: str = "run") -> subprocess.CompletedProcess[str]:
    """Train in float64 on 310 samples, in batches of 20."""
    usual = [] if "--model" in words else MLP
    done = subprocess.run(
        [*PACELINE, *usual, "--dtype", "float64", "--global-batch", "20", "--decay", "none", "--optimizer", "sgd",
         "--threads", "1", "--output-dir", str(output), "--name", name, *words],
        capture_output=True, text=True, check=False, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done


CHAIN_DATA = ["--data", "synthetic:1x28x28,classes=10,train=310,test=20"]
CHAIN = [
    ["--strategy", "sequential"],
    ["--strategy", "sharded", "--workers", "3"],
    ["--strategy", "sharded", "--workers", "2"],
    ["--strategy", "ring", "--workers", "2"],
    ["--strategy", "sharded", "--workers", "3", "--transport", "threads", "--bucket-mb", "0.05"],
    ["--strategy", "sequential"],
    ["--strategy", "ps-sync", "--workers", "3", "--servers", "2"],
    ["--strategy", "sharded", "--workers", "2", "--transport", "threads"],
    ["--strategy", "pipeline", "--workers", "2", "--microbatches", "2", "--cut", "layers"],
    ["--strategy", "tensor", "--workers", "2"],
    ["--strategy", "sharded", "--workers", "4", "--transport", "threads"],
    ["--strategy", "gather", "--workers", "5", "--transport", "threads"],
    ["--strategy", "allreduce", "--workers", "7", "--transport", "threads"],
    ["--strategy", "tensor", "--workers", "4", "--tensor", "2"],
    ["--strategy", "ps-sync", "--workers", "1"],
    ["--strategy", "sequential"],
]


@pytest.mark.parametrize(("optimizer", "chain"), [("sgd", CHAIN), ("adamw", CHAIN[:11])])
def test_every_synchronous_strategy_continues_every_other(
    optimizer: str, chain: list[list[str]], tmp_path: Path
) -> None:
    """In the middle of epochs; together they train what one process trains, and use each sample once an epoch."""
    # Convolutions in channels-last layout, and the best epoch's weights.
    each, net = 7, ["--model", "mnist-cnn", "--dropout", "0", "--validation", "0.2", *CHAIN_DATA]
    net += ["--optimizer", optimizer]
    for number, words in enumerate(chain, 1):
        resume = ["--resume", str(tmp_path / "run")] if number > 1 else []
        train(tmp_path, "--steps", str(number * each), "--checkpoint-every", str(each), *net, *words, *resume)
    train(tmp_path, "--steps", str(len(chain) * each), "--strategy", "sequential", *net, name="whole")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    for name, values in one.items():
        torch.testing.assert_close(other[name], values, rtol=0, atol=1e-12)
    steps = read_steps(tmp_path / "run" / "rank_0.jsonl")
    assert [step.step for step in steps] == list(range(len(chain) * each))
    assert [step.samples for step in steps] == [20 if i % 13 < 12 else 8 for i in range(len(steps))]  # 248 an epoch
    whole, summary = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("whole", "run"))
    assert summary["best_epoch"] == whole["best_epoch"]
    assert summary["validation_loss"] == pytest.approx(whole["validation_loss"], abs=1e-11)
    assert summary["train_loss"] == pytest.approx(whole["train_loss"], abs=1e-11)
    assert summary["resumed"] == [each * number for number in range(1, len(chain))]


def test_a_weight_that_several_stages_have_is_saved_once_and_loaded_by_all_of_them(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_bytes(bytes(random.Random(1).choices(b"to be or not", k=2000)))
    net = ["--model", "gpt", "--data", f"text:{text},block=16", "--validation", "0.1", "--checkpoint-every", "3"]
    pipeline = ["--strategy", "pipeline", "--microbatches", "2"]
    chain = [
        [*pipeline, "--workers", "3", "--cut", "blocks.0,blocks.2"],
        [*pipeline, "--workers", "2", "--cut", "blocks.1"],
        ["--strategy", "sequential"],
    ]
    for number, words in enumerate(chain, 1):
        resume = ["--resume", str(tmp_path / "run")] if number > 1 else []
        train(tmp_path, "--steps", str(3 * number), *net, *words, *resume)
        tensors = Checkpoint(checkpoints(tmp_path / "run" / "checkpoints")[0]).manifest.tensors
        assert [len(tensors[name]) for name in ("model.tokens.weight", "optimizer.tokens.weight.momentum_buffer")] == [
            1,
            1,
        ]
    train(tmp_path, "--steps", "9", "--strategy", "sequential", *net, name="whole")
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    for name, values in one.items():
        torch.testing.assert_close(other[name], values, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    "words", [["--strategy", "ring", "--workers", "2"], ["--strategy", "ps-sync", "--workers", "2"]]
)
def test_a_training_that_was_continued_stops_early_where_it_would_have(words: list[str], tmp_path: Path) -> None:
    """What was validated before each checkpoint counts, also if the training is continued where one is due."""
    words = [*words, "--validation", "0.2", "--evaluate-every", "5", "--patience", "3", "--lr", "0.05"]
    done = train(tmp_path, "--steps", "400", "--checkpoint-every", "3", *words, name="whole")
    whole = json.loads((tmp_path / "whole" / "summary.json").read_text())
    steps = whole["steps"]
    assert steps == whole["best_step"] + 15 < 400
    assert whole["status"] == COMPLETED
    assert whole["stopped_early"] == "no better loss in the last 3 validations"
    assert f"Stopped early after step {steps}: no better loss in the last 3 validations" in done.stdout
    for last in (whole["best_step"], steps - 5, steps - 2, 400):
        resume = ["--resume", str(tmp_path / "run")] if (tmp_path / "run").exists() else []
        train(tmp_path, "--steps", str(last), "--checkpoint-every", str(last), *words, *resume)
    parts = json.loads((tmp_path / "run" / "summary.json").read_text())
    for name in ("steps", "validation_steps", "validation_loss", "best_step", "stopped_early", "test_loss"):
        assert parts[name] == whole[name], name
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_another_batch_takes_the_rest_of_the_epoch_and_is_announced(tmp_path: Path) -> None:
    train(tmp_path, "--steps", "4", "--checkpoint-every", "4", "--workers", "1")
    done = train(tmp_path, "--steps", "12", "--global-batch", "50", "--workers", "2", "--resume", str(tmp_path / "run"))
    assert "An update has 50 samples from here on, and had 20 before" in done.stdout
    steps = read_steps(tmp_path / "run" / "rank_0.jsonl")
    # 310 = 4 x 20 + 4 x 50 + 30, then a new epoch.
    assert [step.samples for step in steps] == [*[20] * 4, *[50] * 4, 30, 50, 50, 50]
    assert [step.epoch for step in steps] == [*[0] * 9, 1, 1, 1]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_saves_and_the_same_command_continues(number: signal.Signals, tmp_path: Path) -> None:
    words = [*PACELINE, "--model", "mlp", "--strategy", "ring", "--workers", "2", "--steps", "1000000"]
    with LiveRun(words, tmp_path) as run:
        run.wait_until_training()
        os.kill(run.process.pid, number)
        assert run.end(30) == 130
        summary = run.summary()
        assert summary.status == INTERRUPTED
        (saved,) = checkpoints(run.folder / "checkpoints")
        assert saved.name == f"step_{summary.steps}"
        run.check_nothing_is_left()
    words[-1] = str(summary.steps + 5)
    with LiveRun(words, tmp_path) as run:
        assert run.end() == 0, run.stderr()
        assert f"Continuing {run.folder} after {summary.steps} updates" in run.stdout()
        after = run.summary()
        assert (after.status, after.steps, after.resumed) == (COMPLETED, summary.steps + 5, [summary.steps])
        assert [s.step for s in read_steps(run.folder / "rank_1.jsonl")] == list(range(after.steps))


def test_without_a_name_the_newest_incomplete_run_of_these_options_is_continued(tmp_path: Path) -> None:
    words = [*PACELINE, "--model", "mlp", "--workers", "1", "--batch-size", "16", "--output-dir", str(tmp_path)]
    for seed in ("1", "2"):
        process = subprocess.Popen([*words, "--steps", "1000000", "--seed", seed], stdout=subprocess.DEVNULL)
        until("it trains", lambda: any('"step"' in f.read_text() for f in tmp_path.glob("*/rank_0.jsonl")
                                       if f'seed = {seed}' in (f.parent / "spec.toml").read_text()))  # noqa: B023  # fmt: skip
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130
    folders = {json.loads((f / "summary.json").read_text())["seed"]: f for f in tmp_path.iterdir()}

    def run(*more: str) -> str:
        done = subprocess.run([*words, *more], capture_output=True, text=True, check=True)
        return done.stdout

    steps = str(json.loads((folders[1] / "summary.json").read_text())["steps"] + 3)
    assert "Continuing" not in run("--steps", steps, "--seed", "1")  # --steps is another: this is another run
    again = subprocess.Popen([*words, "--steps", "1000000", "--seed", "1"], stdout=subprocess.PIPE, text=True)
    assert again.stdout
    assert any(f"Continuing {folders[1]} after" in line for line in iter(again.stdout.readline, ""))
    again.send_signal(signal.SIGINT)
    again.communicate(timeout=60)
    assert "Continuing" not in run("--steps", "3", "--seed", "2", "--resume", "never")


def test_saving_changes_nothing(tmp_path: Path) -> None:
    """Batch-norm statistics of two workers differ, and are only averaged in the file that is saved."""
    (tmp_path / "net.py").write_text(resumes.MODEL)
    found = []
    for every in ("0", "3"):
        words = [*PACELINE, "--model", "net.py:build", *resumes.DATA, "--strategy", "ring", "--workers", "2", "--steps",
                 "20", "--checkpoint-every", every, "--output-dir", str(tmp_path), "--name", every]  # fmt: skip
        subprocess.run(words, cwd=tmp_path, check=True, stdout=subprocess.DEVNULL)
        found.append(load_file(tmp_path / every / "model.safetensors"))
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    saved = Checkpoint(checkpoints(tmp_path / "3" / "checkpoints")[0])
    assert not torch.equal(saved.tensor("model.1.running_mean", 0), saved.tensor("model.1.running_mean", 1))
    lines = list(raw_lines(tmp_path / "3" / "rank_0.jsonl"))
    made = [line["step"] for line in lines if line["kind"] == "checkpoint"]
    assert made[0] == 3
    assert [line["step"] + 1 for line in lines if line["kind"] == "step" and "save" in line["spans"]] == made


def test_the_command_lists_verifies_and_exports(tmp_path: Path) -> None:
    for steps in ("2", "4", "6"):
        resume = [] if steps == "2" else ["--resume", str(tmp_path / "run")]
        train(
            tmp_path, "--steps", steps, "--checkpoint-every", "2", "--workers", "2", "--keep-checkpoints", "3", *resume
        )
    paceline = [sys.executable, "-m", "paceline", "checkpoint"]
    folder = tmp_path / "run"

    def call(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*paceline, *words], capture_output=True, text=True, check=False)

    rows = json.loads(call("list", str(folder), "--json").stdout)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert call("verify", str(folder)).returncode == 0
    for output in ("model.safetensors", "model.pt"):
        assert call("export", str(folder), "--output", str(tmp_path / output)).returncode == 0
    whole, exported = load_file(folder / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    pickled = torch.load(tmp_path / "model.pt", weights_only=True)
    assert all(torch.equal(whole[name], exported[name]) and torch.equal(whole[name], pickled[name]) for name in whole)
    part = next((folder / "checkpoints" / "step_6").glob("*.safetensors"))
    data = bytearray(part.read_bytes())
    data[-3] ^= 4
    part.write_bytes(data)
    done = call("verify", str(folder))
    assert done.returncode == 1
    assert f"{part} is damaged" in done.stdout
    done = train(tmp_path, "--steps", "8", "--workers", "2", "--resume", str(folder))
    assert f"Not used: {part} is damaged" in done.stdout
    assert "after 4 updates" in done.stdout


def test_what_cannot_be_continued_is_refused_by_name(tmp_path: Path) -> None:
    train(tmp_path, "--steps", "4", "--checkpoint-every", "4", "--workers", "1")
    run = str(tmp_path / "run")
    words = ["train", "--model", "mlp", "--data", "synthetic:1x8x8,classes=10,train=310,test=20", "--optimizer", "sgd",
             "--dtype", "float64", "--decay", "none", "--resume", run]  # fmt: skip
    assert "--hidden [256], and this command has None" in refusal(tmp_path, *words)
    assert "--lr 0.01, and this command has 0.5" in refusal(tmp_path, *words, "--hidden", "256", "--lr", "0.5")
    assert "neither a run folder nor a checkpoint" in refusal(tmp_path, *words[:-1], str(tmp_path))
    assert "is complete: choose another --name" in train(tmp_path, "--steps", "4", "--workers", "1", code=2).stderr
    (tmp_path / "live").mkdir()
    with LiveRun([*PACELINE, "--model", "mlp", "--steps", "1000000"], tmp_path / "live") as live:
        live.wait_until_training()
        other = ["--model", "mlp", "--steps", "1000000", "--output-dir", str(tmp_path / "live"), "--name", "run"]
        done = subprocess.run([*PACELINE, *other], capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert f"is in use by process {live.process.pid} on" in done.stderr


def test_a_run_of_a_machine_that_failed_is_continued_when_it_has_been_silent_for_long(tmp_path: Path) -> None:
    train(tmp_path, "--steps", "4", "--checkpoint-every", "4")
    folder = tmp_path / "run"
    for name, other in (("summary.json", {"status": RUNNING}), ("owner.json", {"boot": "another", "host": "n7"})):
        (folder / name).write_text(json.dumps(json.loads((folder / name).read_text()) | other))
    assert "is in use by process" in train(tmp_path, "--steps", "6", code=2).stderr
    for path in (*folder.iterdir(), folder):
        os.utime(path, (0, 0))
    assert "after 4 updates" in train(tmp_path, "--steps", "6").stdout
    assert [step.step for step in read_steps(folder / "rank_0.jsonl")] == list(range(6))

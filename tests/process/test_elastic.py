"""Elastic training: workers are killed, stopped and started again, and the weights are those of one process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import elastic_kills as campaign
import pytest
from elastic_kills import check, check_records, ended, regrouped
from live_run import PACELINE, LiveRun, until
from parity_cases import distance
from raw_lines import raw_lines
from safetensors.torch import load_file
from server_kills import train_alone

from paceline.analysis.runs import Run, read_run
from paceline.checkpoint.manifest import checkpoints
from paceline.run.records import COMPLETED, INTERRUPTED

STEPS = campaign.STEPS
# Where a worker dies: worker, life, and how often it has been there by then.
UPDATE, ENTER = "paceline.strategies.engine:Lockstep.update", "paceline.training.elastic:Elastic._enter"
POINTS = {
    "in a bucket": "paceline.strategies.buckets:GradientBuckets._send_next 1 0 60",
    "before the sums are complete": "paceline.strategies.buckets:GradientBuckets._fill_tail 2 0 41",
    "between sum and update": f"{UPDATE} 0 0 50",
    "in the update": "torch.optim.sgd:_fused_sgd 1 0 50",
    "between update and record": "paceline.training.progress:Progress.step 0 0 50",
    "while saving": "paceline.checkpoint.save:Saver._write_part 0 0 2",
    "while it starts": "paceline.training.setup:make_input 2 0 1",
    "when all begin": f"{ENTER} 1 0 1",
    "two at once": f"{UPDATE} 0 0 50;{UPDATE} 2 0 50",
    "the source, while it gives its state": f"{UPDATE} 1 0 30;paceline.checkpoint.carried:Carried.pack 0 0 1",
    "the newcomer, while it takes the state": f"{UPDATE} 1 0 30;paceline.training.driver:Driver.adopt 1 1 1",
    "during recovery": f"{UPDATE} 1 0 30;{ENTER} 2 0 2",
}


@pytest.mark.parametrize("point", POINTS)
def test_a_worker_may_die_at_any_point(point: str, tmp_path: Path) -> None:
    command = campaign.elastic("allreduce", 3, 1, *campaign.OPTIMIZERS["sgd"], "--checkpoint-every", "20")
    with LiveRun(command, tmp_path, deaths=POINTS[point]) as run:
        check(run, tmp_path)
        deaths = sum(line["kind"] == "start" for worker in range(3) for line in raw_lines(_lines(run, worker))) - 3
        assert deaths == POINTS[point].count(";") + 1


def _lines(run: LiveRun, worker: int) -> Path:
    return run.folder / f"rank_{worker}.jsonl"


@pytest.mark.parametrize("strategy", [s for s in campaign.STRATEGIES if s != "allreduce"])
def test_every_averaging_goes_on_without_the_worker_that_leads(strategy: str, tmp_path: Path) -> None:
    death = f"{UPDATE} 0 0 50"
    command = campaign.elastic(strategy, 3, 2, *campaign.OPTIMIZERS["adam"], "--validation", "0.1")
    with LiveRun(command, tmp_path, deaths=death) as run:
        assert run.end() == 0, run.stderr()
        summary, lines = run.summary(), regrouped(run, 3)
        assert (summary.status, summary.steps) == (COMPLETED, STEPS)
        assert summary.validation_steps == [*range(18, STEPS, 18), STEPS]
        assert any(line["members"] == [1, 2] for line in lines)  # worker 1 led
        alone = train_alone(tmp_path / "alone", STEPS, *campaign.MODEL, *campaign.OPTIMIZERS["adam"],
                                     "--validation", "0.1")  # fmt: skip
        weights = load_file(run.folder / "model.safetensors")
        assert distance(weights, alone) <= 1e-11
        read = read_run(run.folder)
        assert isinstance(read, Run), read
        assert [step.step for step in read.steps[0]] == list(range(STEPS))
        assert read.disturbed == f"its workers changed {max(line['generation'] for line in lines) - 1} times"


def test_a_stopped_worker_is_ended_and_its_successor_joins(tmp_path: Path) -> None:
    with LiveRun(campaign.elastic("allreduce", 3, 2, *campaign.OPTIMIZERS["sgd"], steps=10 * STEPS), tmp_path) as run:
        run.wait_until_training(100)
        os.kill(pid := run.pid(1), signal.SIGSTOP)
        until("it is ended", lambda: pid not in run.living(), 20)
        check(run, tmp_path, 10 * STEPS, campaign.OPTIMIZERS["sgd"])
        assert any("made no progress" in line["why"] for line in raw_lines(_lines(run, 0)) if "why" in line)


def test_a_worker_that_is_stopped_for_a_moment_stays(tmp_path: Path) -> None:
    with LiveRun(campaign.elastic("allreduce", 3, 2, *campaign.OPTIMIZERS["sgd"], steps=5 * STEPS), tmp_path) as run:
        run.wait_until_training(100)
        for _ in range(5):
            os.kill(run.pid(1), signal.SIGSTOP)
            time.sleep(0.3)
            os.kill(run.pid(1), signal.SIGCONT)
            time.sleep(0.1)
        check(run, tmp_path, 5 * STEPS, campaign.OPTIMIZERS["sgd"])
        assert {line["generation"] for line in regrouped(run, 3)} == {1}


def kill_all(run: LiveRun) -> None:
    pids = [run.pid(worker) for worker in range(3)]
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_if_all_that_have_the_state_are_killed_training_begins_anew_from_the_checkpoint(tmp_path: Path) -> None:
    command = campaign.elastic("ring", 3, 1, *campaign.OPTIMIZERS["sgd"], "--checkpoint-every", "50", steps=5 * STEPS)
    with LiveRun(command, tmp_path) as run:
        until("there is a checkpoint", lambda: checkpoints(run.folder / "checkpoints"))
        kill_all(run)
        check(run, tmp_path, 5 * STEPS, campaign.OPTIMIZERS["sgd"])
        assert run.summary().resumed
        assert all(step % 50 == 0 for step in run.summary().resumed)


def test_if_all_are_killed_and_there_is_no_checkpoint_the_run_fails_and_says_so(tmp_path: Path) -> None:
    with LiveRun(campaign.elastic("ring", 3, 1, steps=10**6), tmp_path) as run:
        run.wait_until_training()
        kill_all(run)
        assert run.end() == 1
        assert "all workers have ended at once, and there is no checkpoint to go back to" in run.stderr()
        run.check_nothing_is_left()


def test_below_the_least_number_of_workers_the_run_waits_for_the_lost_one(tmp_path: Path) -> None:
    with LiveRun(campaign.elastic("allreduce", 2, 2, *campaign.OPTIMIZERS["sgd"], steps=5 * STEPS), tmp_path) as run:
        run.wait_until_training(50)
        os.kill(run.pid(0), signal.SIGKILL)
        check(run, tmp_path, 5 * STEPS, campaign.OPTIMIZERS["sgd"])
        assert all(len(line["members"]) == 2 for line in regrouped(run, 2))
        assert "fewer than 2 workers are left (--elastic 2:2): waiting up to 20 s" in run.stderr()


def test_ctrl_c_stops_after_a_step_also_when_a_worker_was_lost(tmp_path: Path) -> None:
    with LiveRun(campaign.elastic("allreduce", 3, 1, steps=10**6), tmp_path) as run:
        run.wait_until_training()
        os.kill(run.pid(0), signal.SIGKILL)
        until("it goes on", lambda: len(regrouped(run, 3)) > 5)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end() == 130, run.stderr()
        assert run.summary().status == INTERRUPTED
        assert checkpoints(run.folder / "checkpoints")
        run.check_nothing_is_left()


def test_workers_with_errors_of_their_own_join_again(tmp_path: Path) -> None:
    """The second rank fails in step 50; then what was the third one is the second, and fails in the same step."""
    with LiveRun(campaign.elastic("allreduce", 3, 1, *campaign.OPTIMIZERS["sgd"], steps=5 * STEPS), tmp_path,
                 fault="1 50") as run:  # fmt: skip
        check(run, tmp_path, 5 * STEPS, campaign.OPTIMIZERS["sgd"])
        assert run.stderr().count("its process exited with code 1") == 2


NAN = """
import torch

def build(classes):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(144, 10))
    torch.nn.init.constant_(model[1].bias, float("nan"))
    return model
"""


def test_an_error_of_all_workers_ends_the_run(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(NAN)
    words = [*PACELINE, "--model", f"{tmp_path}/own.py:build", "--data", "synthetic:1x12x12,train=1920,test=64"]
    with LiveRun([*words, "--strategy", "allreduce", "--workers", "3", "--elastic", "1"], tmp_path) as run:
        assert run.end() == 1
        assert "the training has diverged" in run.stderr()
        run.check_nothing_is_left()


NORMALISED = """
import torch

def build(classes):
    first, last = torch.nn.Linear(144, 32), torch.nn.Linear(32, classes)
    return torch.nn.Sequential(torch.nn.Flatten(), first, torch.nn.BatchNorm1d(32), torch.nn.ReLU(), last)
"""


@pytest.mark.parametrize("call", [100, 101])
def test_statistics_of_batches_are_exact_when_a_worker_dies_while_they_are_averaged(call: int, tmp_path: Path) -> None:
    """97 samples cannot be divided evenly: buffers are averaged before and after every step."""
    (tmp_path / "own.py").write_text(NORMALISED)
    model = ["--model", f"{tmp_path}/own.py:build", *campaign.OPTIMIZERS["sgd"]]
    words = [word for word in campaign.elastic("allreduce", 3, 1) if word not in ("--hidden", "32")]
    words += [*model, "--sync-batchnorm", "--global-batch", "97"]
    with LiveRun(words, tmp_path, deaths=f"paceline.strategies.replicas:average_buffers 1 0 {call}") as run:
        assert run.end() == 0, run.stderr()
        assert max(line["generation"] for line in regrouped(run, 3)) > 1
        check_records(run, 3, 97)
        weights = load_file(run.folder / "model.safetensors")
    usual = [word for word in campaign.MODEL if word not in ("--hidden", "32")]
    (tmp_path / "alone").mkdir()
    with LiveRun([*PACELINE, *usual, *model, "--batch-size", "97", "--steps", str(STEPS)], tmp_path / "alone") as run:
        assert run.end() == 0, run.stderr()
        assert distance(weights, load_file(run.folder / "model.safetensors")) <= 1e-11


def test_a_continued_run_needs_no_checkpoint_for_a_worker_that_joins(tmp_path: Path) -> None:
    """The checkpoint that it was continued from is removed when there are newer ones."""
    saving = ["--checkpoint-every", "20", "--keep-checkpoints", "1"]
    command = campaign.elastic("allreduce", 3, 1, *campaign.OPTIMIZERS["sgd"], *saving, steps=10 * STEPS)
    with LiveRun(command, tmp_path) as run:
        until("there is a checkpoint", lambda: checkpoints(run.folder / "checkpoints"))
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end() == 130, run.stderr()
        (first,) = checkpoints(run.folder / "checkpoints")
    with LiveRun(command, tmp_path) as run:
        until("it is removed", lambda: checkpoints(run.folder / "checkpoints") and not first.exists())
        os.kill(run.pid(1), signal.SIGKILL)
        check(run, tmp_path, 10 * STEPS, campaign.OPTIMIZERS["sgd"])
        numbers = [line["generation"] for line in raw_lines(_lines(run, 0)) if "generation" in line]
        assert numbers == sorted(set(numbers))  # they never go back


def test_a_run_that_is_stopped_while_a_worker_dies_continues_where_it_was(tmp_path: Path) -> None:
    command = campaign.elastic("allreduce", 3, 1, *campaign.OPTIMIZERS["sgd"], steps=10 * STEPS)
    with LiveRun(command, tmp_path, deaths="paceline.training.checkpoints:Checkpoints.wait 0 0 2") as run:
        run.wait_until_training(30)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end() == 130, run.stderr()
        assert run.summary().steps < 10 * STEPS
    with LiveRun(command, tmp_path) as run:
        check(run, tmp_path, 10 * STEPS, campaign.OPTIMIZERS["sgd"])


def test_a_killed_launcher_leaves_nothing_behind(tmp_path: Path) -> None:
    with LiveRun(campaign.elastic("allreduce", 3, 2, steps=10**6), tmp_path) as run:
        run.wait_until_training()
        run.process.kill()
        until("all have ended", lambda: ended(run))
        run.check_nothing_is_left()


def test_chaos_kills_and_stops_workers_and_says_what_it_cost(tmp_path: Path) -> None:
    usual = [*campaign.OPTIMIZERS["sgd"], "--checkpoint-every", "50"]  # all may be killed at once
    train = campaign.elastic("allreduce", 3, 1, *usual, steps=15 * STEPS)[1:]
    command = [PACELINE[0], "chaos", "--json", "--kill", "every=400ms", "--stop", "every=1s,for=100ms", "--", *train]
    with LiveRun(command, tmp_path) as run:
        assert run.end() == 0, run.stderr()
        found = json.loads(run.stdout())
        assert (found["status"], found["steps"]) == (COMPLETED, 15 * STEPS)
        killed = [fault for fault in found["faults"] if fault["kind"] == "kill"]
        assert killed
        assert 0 < len(found["recovered"]) <= len(killed)
        assert max(found["recovered"]) < 10
        assert 0 < found["participation"] <= 1
        assert json.loads((run.folder / "chaos.json").read_text())["faults"] == found["faults"]
        check(run, tmp_path, 15 * STEPS, campaign.OPTIMIZERS["sgd"])
        before = (run.folder / "chaos.json").read_text()
    with LiveRun(command, tmp_path) as run:  # a second time in the same folder
        assert run.end() == 2
        assert "is complete: choose another --name" in run.stderr()
        assert (run.folder / "chaos.json").read_text() == before


def test_nothing_is_left_of_a_storm_that_was_killed(tmp_path: Path) -> None:
    train = campaign.elastic("allreduce", 3, 1, steps=10**6)[1:]
    with LiveRun([PACELINE[0], "chaos", "--stop", "every=1s,for=1h", "--", *train], tmp_path) as run:
        run.wait_until_training()
        until("a worker was stopped", lambda: "stop: worker" in run.stderr())
        run.process.kill()
        run.check_nothing_is_left()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["chaos", "--", "train", "--workers", "2", "--elastic", "1"], "give the faults"),
        (["chaos", "--kill", "every=1s", "--", "train", "--workers", "2"], "give --elastic"),
        (["chaos", "--kill", "every=1s"], "give the training after --"),
    ],
)
def test_a_storm_needs_faults_and_an_elastic_training(words: list[str], said: str) -> None:
    done = subprocess.run([PACELINE[0], *words], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--elastic", "x"], "--elastic x: give the least number of workers"),
        (["--elastic", "0:4"], "give the least number of workers"),
        (["--elastic", "5"], "the least number is from 1 to 4"),
        (["--elastic", "2:8"], "--elastic 2:8 with 4 workers"),
        (["--elastic", "2", "--transport", "gloo"], "use shm, on one machine"),
        (["--elastic", "2", "--read", "scatter"], "--read own"),
        (["--elastic", "2", "--strategy", "ps-sync"], "strategy ps-sync has no --elastic"),
        (["--elastic", "2", "--strategy", "sharded"], "strategy sharded has no --elastic"),
    ],
)
def test_what_cannot_be_elastic_is_refused_before_anything_starts(words: list[str], said: str, tmp_path: Path) -> None:
    usual = [] if "--strategy" in words else ["--strategy", "ring"]
    done = subprocess.run([*PACELINE, "--workers", "4", *usual, *words, "--output-dir", str(tmp_path)],
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert not list(tmp_path.iterdir())

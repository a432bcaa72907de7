"""What `paceline slurm` writes, on a real two-node Slurm: `make test-slurm`; plain pytest does not collect this."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from parity_cases import distance
from raw_lines import raw_lines
from safetensors.torch import load_file
from slurm_cluster import SlurmCluster, processes, until

from paceline.run.folder import read_summary
from paceline.run.records import COMPLETED, FAILED, INTERRUPTED, Summary

PACELINE = [sys.executable, "-m", "paceline"]
FOUR = ["--nodes", "2", "--ntasks-per-node", "2", "--cpus-per-task", "1"]
# 48 samples an update, however they are divided.
SAME = [
    *("train", "--model", "mnist-cnn", "--data", "mnist-mini", "--dropout", "0", "--dtype", "float64", "--no-scale-lr"),
    *("--steps", "20", "--name", "run"),
]
ENDLESS = ["train", "--model", "mlp", "--strategy", "ring", "--steps", "1000000", "--log-every", "0", "--name", "run"]
REQUEUE = ["--time", "60", "--requeue"]
# The model of the runs above, with steps that take a known time.
SLOW = """\
import time

from paceline.models.mnist_cnn import build as fast


def build(shape, classes, dropout):
    model = fast(shape, classes, dropout)
    model.register_forward_pre_hook(lambda model, _: time.sleep({seconds}) if model.training else None)
    return model
"""
PATIENCE = 90.0


@pytest.fixture(scope="session")
def cluster() -> Iterator[SlurmCluster]:
    with tempfile.TemporaryDirectory() as folder, SlurmCluster(Path(folder)) as started:
        yield started


@pytest.fixture
def slurm(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    """With no job in it, whatever the test before has left."""
    yield cluster
    cluster.empty()


@pytest.fixture(scope="session")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of one process."""
    folder = tmp_path_factory.mktemp("sequential")
    subprocess.run([*PACELINE, *SAME, "--batch-size", "48"], cwd=folder, env=os.environ | {"OMP_NUM_THREADS": "1"},
                   stdout=subprocess.DEVNULL, timeout=PATIENCE, check=True)  # fmt: skip
    return folder / "runs" / "run"


class Job:
    """A script that `paceline slurm` has written in `folder`, submitted from somewhere else."""

    def __init__(self, slurm: SlurmCluster, folder: Path, options: list[str], words: list[str]) -> None:
        self.slurm, self.folder = slurm, folder / "runs" / "run"
        self.before = processes().keys()
        command = [*PACELINE, "slurm", *options, "--output", str(folder / "job.out"), "--", *words]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=True)
        self.script, self.said = done.stdout, folder / "job.out"

    def submit(self, *options: str, **variables: str) -> None:
        self.number = self.slurm.call("sbatch", "--parsable", *options, given=self.script, **variables)

    def wait_until_training(self) -> None:
        steps = self.folder / "rank_0.jsonl"
        until("rank 0 trains", lambda: sum(line["kind"] == "step" for line in raw_lines(steps)) > 3, PATIENCE)

    def end(self, patience: float = PATIENCE) -> str:
        """How Slurm says that it ended."""
        try:
            return self.slurm.wait(self.number, patience)
        except AssertionError as error:
            error.add_note(self.said.read_text() if self.said.exists() else "the job has said nothing")
            raise

    def summary(self) -> Summary:
        summary = read_summary(self.folder)
        assert summary is not None, self.said.read_text()
        return summary

    def ranks(self) -> list[dict[str, str]]:
        ranks: list[dict[str, str]] = json.loads((self.folder / "env.json").read_text())["ranks"]
        return ranks

    def check_nothing_is_left(self) -> None:
        until(f"only {self.before} are left", lambda: processes().keys() <= self.before, 20)


def test_a_ring_over_two_nodes_trains_what_one_process_trains(
    slurm: SlurmCluster, sequential: Path, tmp_path: Path
) -> None:
    name = "it's a ring #1"
    job = Job(slurm, tmp_path, [*FOUR, "--job-name", name], [*SAME, "--strategy", "ring", "--batch-size", "12"])
    job.submit()
    assert job.end() == "COMPLETED 0:0", job.said.read_text()
    assert slurm.call("squeue", "-h", "-t", "all", "-j", job.number, "-o", "%j") == name
    summary = job.summary()
    assert (summary.status, summary.workers, summary.steps) == (COMPLETED, 4, 20)
    assert [rank["host"] for rank in job.ranks()] == ["n1", "n1", "n2", "n2"]
    weights = [load_file(folder / "model.safetensors") for folder in (job.folder, sequential)]
    assert distance(*weights) < 1e-11
    job.check_nothing_is_left()


def test_a_server_and_three_workers_over_two_nodes_train_the_same(
    slurm: SlurmCluster, sequential: Path, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, FOUR, [*SAME, "--strategy", "ps-sync", "--batch-size", "16"])
    # A server refuses to listen where a node's name is loopback, unless that is what it is told.
    job.submit(MASTER_ADDR="127.0.0.1")
    assert job.end() == "COMPLETED 0:0", job.said.read_text()
    summary = job.summary()
    assert (summary.status, summary.servers, summary.workers, summary.steps) == (COMPLETED, 1, 3, 20)
    assert [rank["role"] for rank in job.ranks()] == ["server", "worker", "worker", "worker"]
    assert {rank["host"] for rank in job.ranks()} == {"n1", "n2"}
    weights = [load_file(folder / "model.safetensors") for folder in (job.folder, sequential)]
    assert distance(*weights) < 1e-11
    job.check_nothing_is_left()


@pytest.mark.parametrize("requeue", [[], REQUEUE], ids=["once", "requeue"])
@pytest.mark.parametrize(
    ("cancel", "ended"), [([], "CANCELLED 0:15"), (["--signal=INT"], "FAILED 130:0")], ids=["plain", "INT"]
)
def test_scancel_ends_a_run_as_interrupted_with_its_weights(
    slurm: SlurmCluster, tmp_path: Path, cancel: list[str], ended: str, requeue: list[str]
) -> None:
    job = Job(slurm, tmp_path, [*FOUR, *requeue], ENDLESS)
    job.submit()
    job.wait_until_training()
    slurm.call("scancel", *cancel, job.number)
    assert job.end() == ended
    check_interrupted(job)


def test_the_time_limit_ends_a_run_as_interrupted_with_its_weights(slurm: SlurmCluster, tmp_path: Path) -> None:
    job = Job(slurm, tmp_path, FOUR, ENDLESS)
    job.submit("--time=2")  # so Slurm signals when a minute has passed, or up to a minute sooner
    assert job.end() == "FAILED 130:0", job.said.read_text()
    check_interrupted(job)


def check_interrupted(job: Job) -> None:
    summary = job.summary()
    assert summary.status == INTERRUPTED, job.said.read_text()
    assert summary.steps > 3
    assert load_file(job.folder / "model.safetensors")
    job.check_nothing_is_left()


def slow_training(folder: Path, seconds: float) -> list[str]:
    """Its steps take at least so long."""
    (folder / "slow.py").write_text(SLOW.format(seconds=seconds))
    return [*SAME, "--model", "slow.py:build", "--strategy", "ring", "--global-batch", "48"]


def check_continued(job: Job, sequential: Path) -> None:
    """The job was requeued, and all its starts together have trained what one process trains."""
    assert job.end(300) == "COMPLETED 0:0", job.said.read_text()
    assert job.slurm.restarts(job.number) > 0
    summary = job.summary()
    assert (summary.status, summary.steps) == (COMPLETED, 20), job.said.read_text()
    assert [folder.name for folder in job.folder.parent.iterdir()] == ["run"]
    for file in sorted(job.folder.glob("rank_*.jsonl")):
        assert [line["step"] for line in raw_lines(file) if line["kind"] == "step"] == list(range(20))
    weights = [load_file(folder / "model.safetensors") for folder in (job.folder, sequential)]
    assert distance(*weights) < 1e-11
    job.check_nothing_is_left()


@pytest.mark.timeout(400)
def test_a_job_saves_before_its_time_limit_and_is_requeued_until_it_has_completed(
    slurm: SlurmCluster, sequential: Path, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, [*FOUR, *REQUEUE], slow_training(tmp_path, 3.5))
    # Slurm signals when a minute has passed, or up to half a minute sooner; the steps take 70 seconds.
    job.submit("--time=2", "--signal=B:USR1@60")
    check_continued(job, sequential)


@pytest.mark.timeout(400)
def test_a_job_of_one_task_saves_when_it_is_told_to_and_continues(
    slurm: SlurmCluster, sequential: Path, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, REQUEUE, [*slow_training(tmp_path, 0.5), "--workers", "2"])
    job.submit()
    job.wait_until_training()
    slurm.call("scancel", "--batch", "--signal=USR1", job.number)
    check_continued(job, sequential)


@pytest.mark.timeout(400)
def test_a_preempted_job_saves_and_continues_when_slurm_has_requeued_it(
    slurm: SlurmCluster, sequential: Path, tmp_path: Path
) -> None:
    job = Job(slurm, tmp_path, [*FOUR, *REQUEUE], slow_training(tmp_path, 1))
    job.submit()
    job.wait_until_training()
    slurm.call("sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true")
    check_continued(job, sequential)


@pytest.mark.parametrize("rank", [1, 3], ids=["first-node", "second-node"])
def test_a_killed_rank_is_named_and_ends_the_job(slurm: SlurmCluster, tmp_path: Path, rank: int) -> None:
    job = Job(slurm, tmp_path, FOUR, ENDLESS)
    job.submit()
    job.wait_until_training()
    os.kill(int(job.ranks()[rank]["pid"]), signal.SIGKILL)
    assert job.end() == "FAILED 137:0"
    summary = job.summary()
    assert (summary.status, summary.failed_rank) == (FAILED, rank), job.said.read_text()
    assert f"rank {rank} failed: " in job.said.read_text()
    job.check_nothing_is_left()


def test_the_daemons_listen_on_loopback_only(slurm: SlurmCluster) -> None:
    assert slurm.listening() == {"127.0.0.1"}

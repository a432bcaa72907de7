"""Ranks that are started one by one from a cluster file: they meet by their addresses, or say what is wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from live_run import PACELINE, listening_elsewhere, until
from parity_cases import distance
from raw_lines import raw_lines
from refusal import refusal
from safetensors.torch import load_file
from served import free_ports
from server_kills import GLOBAL_BATCH, MODEL, train_alone

from paceline.run.folder import read_nodes, read_summary
from paceline.run.records import INTERRUPTED

STEPS = 60
PATIENCE = 60


def write_cluster(folder: Path, servers: int, workers: int) -> Path:
    ports = free_ports(servers + workers)
    addresses = [f'"127.0.0.1:{port}"' for port in ports]
    path = folder / "cluster.toml"
    path.write_text(f"worker = [{', '.join(addresses[servers:])}]\nps = [{', '.join(addresses[:servers])}]\n")
    return path


def command(cluster: Path, role: str, index: int, workers: int, *more: str) -> list[str]:
    return [*PACELINE, *MODEL, "--cluster", str(cluster), "--role", role, "--index", str(index), "--batch-size",
            str(GLOBAL_BATCH // workers), "--steps", str(STEPS), "--timeout", "30", "--log-every", "0",
            "--output-dir", str(cluster.parent), "--name", "run", *more]  # fmt: skip


@contextlib.contextmanager
def started(commands: list[list[str]]) -> Iterator[list[subprocess.Popen[str]]]:
    """The processes of these commands, which do not outlive the test."""
    variables = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    processes = [subprocess.Popen(c, env=variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  stdin=subprocess.DEVNULL) for c in commands]  # fmt: skip
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def ends(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    """Exit codes and what was said on standard error."""
    return [(process.returncode, err) for process in processes for _, err in [process.communicate(timeout=PATIENCE)]]


@pytest.mark.parametrize(("servers", "more", "security"), [(1, [], "curve"), (2, ["--no-encrypt"], "plain")])
def test_ranks_of_a_cluster_file_train_the_sequential_model(
    tmp_path: Path, servers: int, more: list[str], security: str
) -> None:
    cluster = write_cluster(tmp_path, servers, 2)
    roles = [("worker", 1), *(("ps", i) for i in range(servers)), ("worker", 0)]
    with started([command(cluster, role, index, 2, *more) for role, index in roles]) as processes:
        until("the leader listens", (tmp_path / "run").exists)
        assert listening_elsewhere({process.pid for process in processes}) == set()
        assert ends(processes) == [(0, "")] * (servers + 2)
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert (summary.own_figures["security"], summary.steps) == (security, STEPS)
    assert len(read_nodes(tmp_path / "run")[socket.gethostname()].samples) >= 2
    assert not (tmp_path / "cluster.key").exists()
    wanted = train_alone(tmp_path / "alone", STEPS)
    assert distance(load_file(tmp_path / "run" / "model.safetensors"), wanted) <= 1e-12


def test_a_rank_with_another_key_gets_no_answer_and_the_others_go_on(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path, 1, 1)
    other = tmp_path / "other"
    other.mkdir()
    (other / "cluster.toml").write_text(cluster.read_text())
    (other / "cluster.key").write_text("ab" * 32 + "\n")
    (other / "cluster.key").chmod(0o600)
    foreign = command(other / "cluster.toml", "worker", 0, 1, "--timeout", "2")
    with started([command(cluster, "ps", 0, 1)]) as servers:
        until("the server listens", (tmp_path / "run").exists)
        with started([foreign]) as strangers:
            ((code, said),) = ends(strangers)
        assert code == 2
        assert "cluster.toml line 2" in said
        assert "does not answer" in said
        assert "cluster.key" in said
        with started([command(cluster, "worker", 0, 1)]) as workers:
            assert ends(workers) == [(0, "")]
        assert ends(servers) == [(0, "")]


def test_a_rank_with_other_options_is_told_which(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path, 1, 1)
    with started([command(cluster, "ps", 0, 1)]) as servers:
        until("the server listens", (tmp_path / "run").exists)
        with started([command(cluster, "worker", 0, 1, "--lr", "0.5")]) as workers:
            ((code, said),) = ends(workers)
        assert code == 2
        assert (
            "rank 1 has a different --lr than the server (0.5, not 0.01): start all ranks with the same command" in said
        )
        servers[0].send_signal(signal.SIGINT)
        assert ends(servers)[0][0] == 130


def test_a_server_with_other_options_ends_the_run_and_says_which(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path, 2, 1)
    ranks = [command(cluster, "ps", 0, 1), command(cluster, "ps", 1, 1, "--lr", "0.5")]
    with started(ranks) as servers:
        for code, said in ends(servers):
            assert code == 2
            assert "rank 1 has a different --lr than the server (0.5, not 0.01)" in said


def test_where_nobody_listens_is_said_with_the_line(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path, 1, 1)
    with started([command(cluster, "worker", 0, 1, "--timeout", "2")]) as workers:
        ((code, said),) = ends(workers)
    assert code == 2
    assert "cluster.toml line 2: no server listens at 127.0.0.1:" in said
    assert "start it, or correct the address" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("servers", "workers", "line", "what"), [(2, 1, 2, "no server listens"), (1, 2, 1, "no worker connected")]
)
def test_a_rank_that_never_comes_is_named_with_its_line(
    tmp_path: Path, servers: int, workers: int, line: int, what: str
) -> None:
    cluster = write_cluster(tmp_path, servers, workers)
    there = [command(cluster, role, 0, workers, "--timeout", "3") for role in ("ps", "worker")]
    with started(there) as processes:
        code, said = ends(processes[:1])[0]
    assert code == 2
    assert f"cluster.toml line {line}: {what}" in said


def test_a_port_that_is_taken_is_said_with_the_line(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path, 1, 1)
    with started([command(cluster, "ps", 0, 1)]) as first:
        until("the server listens", (tmp_path / "run").exists)
        with started([command(cluster, "ps", 0, 1)]) as second:
            ((code, said),) = ends(second)
        assert code == 2
        assert "cluster.toml line 2: cannot listen at tcp://127.0.0.1:" in said
        assert (tmp_path / "cluster.key").exists(), "the first one's key is still needed"
        assert first[0].poll() is None


def test_ctrl_c_at_a_worker_ends_only_that_worker_and_a_signal_to_all_saves(tmp_path: Path) -> None:
    cluster = write_cluster(tmp_path, 1, 2)
    ranks = [("ps", 0), ("worker", 0), ("worker", 1)]
    endless = ["--steps", "1000000", "--timeout", "120", "--threads", str(os.cpu_count())]
    with started([command(cluster, *rank, 2, *endless) for rank in ranks]) as processes:
        *rest, leaving = processes
        until("workers train", lambda: kinds(tmp_path, 2).count("step") > 3)
        leaving.send_signal(signal.SIGINT)
        assert ends([leaving])[0][0] == 130
        done = kinds(tmp_path, 1).count("step")
        until("the others go on", lambda: kinds(tmp_path, 1).count("step") > done + 3)
        for process in rest:  # as a scheduler does
            process.send_signal(signal.SIGTERM)
        codes, said = zip(*ends(rest), strict=True)
        assert codes == (130, 130)
        assert ["take turns" in each for each in said] == [True, False], "the leader warns of too many threads"
    summary = read_summary(tmp_path / "run")
    assert summary is not None
    assert summary.status == INTERRUPTED
    assert [(lost["rank"], lost["why"]) for lost in summary.own_figures["lost_workers"]] == [(2, "it was interrupted")]
    assert load_file(tmp_path / "run" / "model.safetensors")


def kinds(folder: Path, rank: int) -> list[str]:
    return [record["kind"] for record in raw_lines(folder / "run" / f"rank_{rank}.jsonl")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--role", "ps", "--index", "1"], "line 2: there is no ps 1; give one from 0 to 0"),
        (["--role", "worker", "--index", "-1"], "line 1: there is no worker -1"),
        (["--role", "worker"], "line 1: the index of the worker is missing"),
        (["--role", "chief", "--index", "0"], "unknown role 'chief'"),
        (["--index", "0"], "--role ps|worker"),
        (["--role", "ps", "--index", "zero"], "--index is 'zero'"),
        (["--role", "ps", "--index", "0", "--strategy", "ring"], "strategy ring"),
        (["--role", "ps", "--index", "0", "--workers", "7"], "has started 3 ranks"),
    ],
)
def test_what_is_wrong_about_a_place_is_said_at_once(tmp_path: Path, flags: list[str], words: str) -> None:
    cluster = write_cluster(tmp_path, 1, 2)
    assert words in refusal(tmp_path, "train", "--cluster", str(cluster), *flags, "--output-dir", str(tmp_path))

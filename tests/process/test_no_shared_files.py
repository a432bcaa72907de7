"""Nodes of a lab that share no folder: rank 0's run folder has the records of all of them nevertheless."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from live_lab import PACELINE
from live_run import BIN
from raw_lines import raw_lines

from paceline.analysis.runs import Run, read_run
from paceline.run.folder import read_summary

STEPS = 30
WAYS = {"ring": 2, "ps-sync": 3}  # nodes, a rank on each; the server is the first


# Fails on one rank of two, in its third step.
RAISING = """
import os
import torch
from torch import nn

class Net(nn.Sequential):
    steps = 0

    def forward(self, x):
        self.steps += torch.is_grad_enabled()
        if self.steps == 3 and os.environ["RANK"] == "1":
            raise ValueError("a sample that this model does not like")
        return super().forward(x)

def build(channels, classes):
    return Net(nn.Flatten(), nn.Linear(784, classes))
"""


def train_without_shared_files(cwd: Path, nodes: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Train under torchrun, a rank on each node of a lab; `out-N` is what node N has as its output folder then."""
    train = [str(BIN / "torchrun"), "--nnodes", "{nodes}", "--node-rank", "{index}", "--nproc-per-node", "1",
             "--master-addr", "{head}", "--master-port", "29400", "-m", "paceline", "train",
             "--data", "mnist-mini", "--steps", str(STEPS), "--batch-size", "16", "--threads", "1",
             "--output-dir", "/run/out", "--name", "run", *options]  # fmt: skip
    # What is in /run is a node's own; the working folder is the machine's, to look at afterwards.
    script = (f"export TMPDIR=/run; {shlex.join(train)}; code=$?; ls -A /run > left-{{index}}; "
              "test ! -e /run/out || cp -r /run/out out-{index}; exit $code")  # fmt: skip
    return subprocess.run([PACELINE, "lab", "run", f"1gbit:{nodes}", "--each", "--", "sh", "-c", script], cwd=cwd,
                          capture_output=True, text=True, timeout=110, check=False)  # fmt: skip


@pytest.mark.parametrize("strategy", WAYS)
def test_the_folder_of_rank_0_has_the_records_and_samples_of_all_nodes(strategy: str, tmp_path: Path) -> None:
    nodes = WAYS[strategy]
    done = train_without_shared_files(tmp_path, nodes, "--model", "mlp", "--strategy", strategy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(path.name for path in tmp_path.glob("out-*")) == ["out-0"], "only rank 0 has a run folder"
    folder = tmp_path / "out-0" / "run"
    kinds = [[line["kind"] for line in raw_lines(folder / f"rank_{rank}.jsonl")] for rank in range(nodes)]
    assert [(each[0], each[-1]) for each in kinds] == [("start", "end")] * nodes
    made = [each.count("step") for each in kinds]
    assert made == [STEPS] * nodes if strategy == "ring" else (made[0], sum(made[1:])) == (STEPS, 2 * STEPS)
    hosts = {row["rank"]: row["host"] for row in json.loads((folder / "env.json").read_text())["ranks"]}
    assert set(hosts.values()) == {f"n{i + 1}" for i in range(nodes)}
    for host in hosts.values():
        samples = [line["kind"] for line in raw_lines(folder / f"node_{host}.jsonl")]
        assert (samples[0], samples[-1]) == ("node", "end")
        assert samples.count("sample") >= 2
    run = read_run(folder)
    assert isinstance(run, Run), run
    assert set(run.nodes) == set(hosts.values())
    for index in range(1, nodes):
        left = (tmp_path / f"left-{index}").read_text().split()
        assert not [name for name in left if "paceline-records" in name or name == "out"], left


def test_rank_0_says_which_rank_failed_on_another_node_and_why(tmp_path: Path) -> None:
    (tmp_path / "raising.py").write_text(RAISING)
    done = train_without_shared_files(tmp_path, 2, "--model", "raising.py:build", "--strategy", "ring")
    assert done.returncode != 0
    folder = tmp_path / "out-0" / "run"
    summary = read_summary(folder)
    assert summary, done.stdout + done.stderr
    assert (summary.status, summary.failed_rank) == ("failed", 1), done.stderr
    assert str(summary.error).startswith("ValueError: a sample that this model does not like"), summary.error
    assert "raising.py, line" in str(summary.error)
    assert "rank 0: rank 1 failed: ValueError: a sample that this model does not like" in done.stderr
    assert "Traceback" in (folder / "logs" / "rank_1.log").read_text()
    kinds = [line["kind"] for line in raw_lines(folder / "rank_1.jsonl")]
    assert (kinds.count("step"), kinds[-1]) == (2, "error")
    assert not (tmp_path / "out-1").exists()


def test_what_was_written_before_a_flush_has_arrived_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the forwarder was sending at that moment, and had already passed the file."""
    from paceline.launch.collect import Collector, Forwarder

    sending, go_on = threading.Semaphore(0), threading.Semaphore(0)
    real = Forwarder._send_new

    def slow(self: Forwarder, diallers: Any) -> bool:
        sent = real(self, diallers)
        sending.release()
        go_on.acquire()
        return sent

    monkeypatch.setattr(Forwarder, "_send_new", slow)
    secret = os.urandom(32)
    collector = Collector(tmp_path, "127.0.0.1", secret)
    forwarder = Forwarder(collector.endpoint, 1, secret)
    forwarder.flush(0)
    assert sending.acquire(timeout=10)
    (forwarder.folder / "rank_1.jsonl").write_text("late\n")
    flush = threading.Thread(target=forwarder.flush, args=(60,))
    flush.start()
    go_on.release()
    assert sending.acquire(timeout=10), "it sends again"
    flush.join(0.5)
    assert flush.is_alive(), "it does not take the sending before for its own"
    go_on.release(9)
    flush.join(10)
    assert not flush.is_alive()
    assert (tmp_path / "rank_1.jsonl").read_text() == "late\n"
    assert forwarder.close()
    assert collector.close() == []


def test_records_arrive_once_whatever_is_sent_again_and_only_under_the_ranks_own_names(tmp_path: Path) -> None:
    from paceline.launch.collect import Collector, Forwarder

    secret = os.urandom(32)
    (tmp_path / "logs").mkdir()
    (tmp_path / "node_here.jsonl").write_text("rank 0's own\n")
    collector = Collector(tmp_path, "127.0.0.1", secret)
    for life in ("first", "second"):
        forwarder = Forwarder(collector.endpoint, 3, secret)
        for name in ("rank_3.jsonl", "logs/rank_3.log", "node_here.jsonl", "rank_4.jsonl"):
            (forwarder.folder / name).write_bytes(f"{life} ".encode() + b"\xff" * 300_000 + b"\n")
        forwarder.flush(10)
        with (forwarder.folder / "rank_3.jsonl").open("a") as file:
            file.write(f"end of the {life}\n")
        (forwarder.folder / "rank_4.jsonl").unlink()  # nobody takes it
        assert forwarder.close()
        assert not forwarder.folder.exists()
    assert collector.close() == []
    chunk = b"\xff" * 300_000 + b"\n"
    both = b"first " + chunk + b"end of the first\nsecond " + chunk + b"end of the second\n"
    assert (tmp_path / "rank_3.jsonl").read_bytes() == both
    assert (tmp_path / "logs" / "rank_3.log").read_bytes() == b"first " + chunk + b"second " + chunk
    assert (tmp_path / "node_here.jsonl").read_text() == "rank 0's own\n"
    assert (tmp_path / "node_here-3.jsonl").read_bytes() == b"first " + chunk + b"second " + chunk
    assert not (tmp_path / "rank_4.jsonl").exists()


def test_records_of_somebody_without_the_secret_do_not_arrive(tmp_path: Path) -> None:
    from paceline.launch.collect import Collector, Forwarder

    collector = Collector(tmp_path, "127.0.0.1", os.urandom(32))
    stranger = Forwarder(collector.endpoint, 1, os.urandom(32))
    (stranger.folder / "rank_1.jsonl").write_text("{}\n")
    assert not stranger.close(3)
    assert (stranger.folder / "rank_1.jsonl").exists(), "they are kept where they could not be sent"
    assert collector.close(0) == []
    assert list(tmp_path.iterdir()) == []

"""A node's samples outlive the process that takes them, and the one that takes its place goes on with them."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

from live_run import LiveRun, until
from raw_lines import raw_lines
from server_kills import served

from paceline.run.folder import read_nodes
from paceline.run.records import NodeSample

HERE = socket.gethostname()


def samples(run: LiveRun) -> list[NodeSample]:
    nodes = read_nodes(run.folder)
    return nodes[HERE].samples if HERE in nodes else []


def test_a_killed_leaders_samples_are_there_and_its_next_life_appends(tmp_path: Path) -> None:
    with LiveRun(served("ps-sync", 1, "--checkpoint-every", "20", steps=1_000_000), tmp_path) as run:
        run.wait_until_training()
        until("there are samples", lambda: len(samples(run)) >= 2)
        os.kill(run.pid(0), signal.SIGKILL)
        before = samples(run)
        assert len(before) >= 2
        until("the next leader takes samples", lambda: len(samples(run)) >= len(before) + 3)
        after = samples(run)
        assert after[: len(before)] == before
        assert [sample.time for sample in after] == sorted(sample.time for sample in after)
        heads = [r for r in raw_lines(run.folder / f"node_{HERE}.jsonl") if r["kind"] == "node"]
        assert len(heads) == 2
        until("the run's own processes are known", lambda: samples(run)[-1].run_cpu)
        os.kill(run.process.pid, signal.SIGINT)
        assert run.end() == 130, run.stderr()
        run.check_nothing_is_left()

"""Other programs that use the processors while a run trains are told of. That a machine is quiet, no test can know."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from raw_lines import raw_lines

from paceline.bench.run import busy_now
from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.errors import EXIT_INTERRUPTED
from paceline.launch.folder import make_folder, open_run
from paceline.launch.rank import Rank
from paceline.launch.signals import StopSignals
from paceline.run.folder import read_nodes, read_summary
from paceline.spec import resolve

TRAINING = {"model": "mlp", "hidden": [256], "data": "synthetic:1x28x28,train=4096,test=64", "batch_size": 256,
            "steps": 1_000_000, "log_every": 0, "name": "run"}  # fmt: skip
SECONDS = 3.0  # that it trains


class BusyLoops(StopSignals):
    """Starts two loops for each core with the first step, and asks to stop after some seconds of them."""

    def __init__(self, stack: ExitStack) -> None:
        self.stack, self.due = stack, 0.0

    def requested(self) -> bool:
        if not self.due:
            for _ in range(2 * (os.cpu_count() or 1)):
                loop = self.stack.enter_context(subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"]))
                self.stack.callback(loop.kill)
            self.due = time.monotonic() + SECONDS
        return time.monotonic() > self.due


@pytest.fixture
def busy_loops() -> Iterator[BusyLoops]:
    with ExitStack() as stack:
        yield BusyLoops(stack)


def test_a_training_beside_busy_loops_is_marked_as_disturbed(tmp_path: Path, busy_loops: BusyLoops) -> None:
    resolved = resolve(("test", TRAINING | {"output_dir": str(tmp_path)}))
    folder, said = make_folder(resolved.spec).absolute(), io.StringIO()
    open_run(folder, resolved)
    rank = Rank(resolved, Seat(0, 1, 0, 1, "paceline"), folder, said)
    rank.stop = busy_loops
    assert rank.run(SingleComm()) == EXIT_INTERRUPTED
    summary = read_summary(folder)
    assert summary is not None
    assert summary.disturbed is not None
    assert f"The machine was busy: {summary.disturbed} during training; do not compare" in said.getvalue()
    assert len(summary.cpu_seconds) == 1
    assert summary.cpu_seconds[0] > 0
    (node,) = read_nodes(folder).values()
    assert any(sample.preemptions for sample in node.samples)
    assert all(sample.steal is not None for sample in node.samples[1:-1])
    steps = [record for record in raw_lines(folder / "rank_0.jsonl") if record["kind"] == "step"]
    queued = sum(sum(step.get("queued", {}).values()) for step in steps)
    assert 0 < queued < sum(step["seconds"] for step in steps), "it waited for a core, and trained"
    assert busy_now() is not None, "and a bench that starts now says so"

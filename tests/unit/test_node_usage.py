"""A node's samples: at their times, whatever happens, and never at the cost of the run."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from raw_lines import raw_lines

from paceline.comm.seat import Seat
from paceline.comm.single import SingleComm
from paceline.errors import EXIT_FAILED, EXIT_OK
from paceline.launch import rank as ranks
from paceline.launch.counters import Reading
from paceline.launch.folder import make_folder, open_run
from paceline.launch.gpus import Gpus
from paceline.launch.usage import NodeUsage, RanksHere, Samples, beats
from paceline.run.folder import node_file, read_nodes
from paceline.run.lines import read_lines
from paceline.run.records import NodeSample, Traffic
from paceline.spec import resolve

HERE = socket.gethostname()
SMALL = {"model": "mlp", "hidden": [8], "data": "synthetic:1x8x8,train=64,test=8", "batch_size": 16, "epochs": 1,
         "log_every": 0}  # fmt: skip


class FakeTime:
    """A clock that only moves when somebody waits; `stalls` are added to the waits with these numbers."""

    def __init__(self, beats: int, stalls: dict[int, float]) -> None:
        self.now, self.left, self.stalls, self.waits = 100.0, beats, stalls, 0

    def wait(self, seconds: float) -> bool:
        assert seconds >= 0
        self.now += seconds + self.stalls.get(self.waits, 0.0)
        self.waits += 1
        self.left -= 1
        return self.left == 0


def times(period: float, fake: FakeTime, work: float = 0.0) -> Iterator[float]:
    for _ in beats(period, fake.wait, lambda: fake.now):
        yield round(fake.now - 100.0, 6)
        fake.now += work


def test_samples_do_not_drift_however_long_they_take() -> None:
    assert list(times(0.5, FakeTime(5, {}), work=0.2)) == [0.0, 0.5, 1.0, 1.5, 2.0]


def test_a_late_wake_up_gives_one_sample_and_no_burst() -> None:
    assert list(times(0.5, FakeTime(5, {1: 3.2}))) == [0.0, 0.5, 4.2, 4.5, 5.0]


class Counted:
    """Counters that say what the test wants."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = iter(seconds)

    def read(self) -> Reading:
        return Reading(next(self.seconds), 7, None, None, {})


@pytest.mark.parametrize(
    ("now", "seconds", "cpu"),
    [
        ([0.0, 0.5, 2.5], [10.0, 10.685, 14.685], [None, 1.37, 2.0]),
        ([0.0, 0.5, 0.501], [10.0, 10.5, 10.51], [None, 1.0, None]),
        ([0.0, 0.5, 1.0], [10.0, 9.0, 9.5], [None, 0.0, 1.0]),
    ],
    ids=["cores that were busy", "too soon to say", "never less than none"],
)
def test_cpu_is_how_many_cores_were_busy_since_the_sample_before(
    now: list[float], seconds: list[float], cpu: list[float | None]
) -> None:
    clock: Any = partial(next, iter(now))
    counted: Any = Counted(seconds)
    samples = Samples(counted, Gpus(), clock)
    assert [samples.take().cpu for _ in now] == cpu


def test_samples_read_back_and_a_second_life_appends_even_to_half_a_line(tmp_path: Path) -> None:
    for life in (1, 2):
        with NodeUsage(tmp_path, pytest.fail, name="n/1", period=60):
            pass
        path = tmp_path / "node_n_1.jsonl"
        assert path == node_file(tmp_path, "n/1")
        assert len(list(read_lines(path, NodeSample))) == 2 * life, "the first and the last"
        with path.open("a") as file:
            file.write('{"kind": "sample", "time": 17')
    (node,) = read_nodes(tmp_path).values()
    assert (node.name, node.cores, node.period, node.own_processes) == ("n/1", os.cpu_count(), 60, False)
    assert [sample.time for sample in node.samples] == sorted(sample.time for sample in node.samples)
    assert all(sample.memory_bytes for sample in node.samples)
    assert [r["kind"] for r in raw_lines(path)] == ["node", "sample", "sample", "end"] * 2
    record = next(record for record in raw_lines(path) if record["kind"] == "sample")
    lo = record["interfaces"].get("lo")
    expected = {"lo": Traffic(**lo)} if lo else {}
    found = node.samples[0]
    assert {name: traffic for name, traffic in found.interfaces.items() if name == "lo"} == expected
    assert isinstance(found, NodeSample)
    (*_, end) = (r for r in raw_lines(path) if r["kind"] == "end")
    assert end["samples"] == 2
    assert end["cpu_seconds"] > 0


def test_the_ranks_of_this_host_are_followed_as_they_are_started_again(tmp_path: Path) -> None:
    path = tmp_path / "env.json"
    here = RanksHere(tmp_path)
    assert set(here()) == set()
    for number, pids in enumerate(([1, 2], [1, 3])):
        rows = [{"rank": rank, "host": HERE, "pid": pid} for rank, pid in enumerate(pids)]
        path.write_text(json.dumps({"ranks": [*rows, {"rank": 2, "host": f"not-{HERE}", "pid": 9}]}))
        os.utime(path, ns=(number + 1, number + 1))
        assert set(here()) == set(pids)


def train_alone(output: Path) -> tuple[int, Path]:
    """A training in this process: its exit code and its run folder."""
    resolved = resolve(("test", SMALL | {"output_dir": str(output), "name": "run"}))
    folder = make_folder(resolved.spec).absolute()
    open_run(folder, resolved)
    return ranks.Rank(resolved, Seat(0, 1, 0, 1, "paceline"), folder, None).run(SingleComm()), folder


def test_a_training_leaves_samples_that_span_its_steps_on_one_clock(tmp_path: Path) -> None:
    code, folder = train_alone(tmp_path)
    assert code == EXIT_OK
    samples = read_nodes(folder)[HERE].samples
    assert len(samples) >= 2
    assert all(a.time < b.time for a, b in pairwise(samples))
    steps = [record for record in raw_lines(folder / "rank_0.jsonl") if record["kind"] == "step"]
    assert len(steps) == 4
    assert samples[0].time <= steps[0]["time"] - steps[0]["seconds"]
    assert steps[-1]["time"] <= samples[-1].time
    assert all(sample.run_memory_bytes for sample in samples), "this process is the run's only rank"


@pytest.mark.parametrize("trouble", ["no /proc", "a strange /proc", "no file can be made"])
def test_a_run_whose_node_cannot_be_sampled_trains_and_says_so_in_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    proc = tmp_path / "proc"

    def troubled(folder: Path, complain: Callable[[str], object], *, own_processes: bool) -> NodeUsage:
        assert not own_processes
        if trouble == "a strange /proc":
            proc.mkdir()
            (proc / "stat").write_text("nothing that anybody knows\n")
        if trouble == "no file can be made":
            (node_file(folder, HERE)).mkdir()
            return NodeUsage(folder, complain)
        return NodeUsage(folder, complain, proc=proc)

    monkeypatch.setattr("paceline.launch.recorded_rank.NodeUsage", troubled)
    code, folder = train_alone(tmp_path)
    assert code == EXIT_OK
    assert "Sampling of this node has stopped" in (folder / "logs" / "rank_0.log").read_text()
    assert all(not node.samples for node in read_nodes(folder).values())


def test_a_run_that_fails_has_its_last_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(ranks, "train", fail)
    code, folder = train_alone(tmp_path)
    assert code == EXIT_FAILED
    assert [record["kind"] for record in raw_lines(node_file(folder, HERE))] == ["node", "sample", "sample", "end"]

"""Times of other machines on the clock of rank 0."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
from made_up import START, write_run
from raw_lines import RawWriter, raw_lines

from paceline.analysis.runs import Run, read_run
from paceline.analysis.slow import judge_folder
from paceline.run.clocks import aligned, read_clock
from paceline.run.folder import check_summary, read_nodes, write_summary
from paceline.run.lines import LineWriter, read_lines
from paceline.run.liveness import claim
from paceline.run.records import RUNNING, Clock, End, Epoch, Line, Start
from paceline.watch.state import State

AHEAD = 100.0  # seconds that the second machine's clock is ahead of that of rank 0


def test_a_process_has_the_clock_that_it_measured_and_the_next_one_another() -> None:
    first, second = Start(1, 10.0), Start(1, 20.0)
    lines: list[Line] = [first, Clock(-3.0, 0.1), Epoch(0, 1.0, 8), End(12.0), second, End(22.0)]
    times = [line.time for line in aligned(lines) if isinstance(line, Start | End)]
    assert times == [7.0, 9.0, 20.0, 22.0]
    assert list(aligned([first])) == [first]
    assert [type(line) for line in aligned(lines)] == [type(line) for line in lines], "none is lost, all in order"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two machines whose second rank and node have a clock that is ahead."""
    hosts = ("a", "b")
    folder = write_run(tmp_path / "run", [0.1] * 40, workers=2, hosts=hosts, moves=dict.fromkeys(hosts, (1e6, 1e6)))
    for name in ("rank_1", "node_b"):
        path = folder / f"{name}.jsonl"
        lines = [line | ({"time": line["time"] + AHEAD} if "time" in line else {}) for line in raw_lines(path)]
        path.unlink()
        writer = RawWriter(path)
        if name == "rank_1":
            writer.write("start", rank=1, time=START + AHEAD - 1)
            writer.write("clock", offset=-AHEAD, uncertainty=0.0002)
        for line in lines:
            writer.write(**line)
        writer.close()
    return folder


def test_the_clock_is_that_of_the_last_process(tmp_path: Path) -> None:
    path = tmp_path / "rank_1.jsonl"
    assert read_clock(path) is None
    path.touch()
    assert read_clock(path) is None
    for process in range(2):
        with closing(LineWriter(path)) as lines:
            lines.write(Start(1, 10.0))
            lines.flush()
            assert read_clock(path) is None, "it is not measured yet, and the one before was another process"
            lines.write(Clock(-3.0 - process, 0.1))
            for number in range(100):
                lines.write(Epoch(number, 1.0, 8))
        assert read_clock(path) == Clock(-3.0 - process, 0.1)
    with path.open("a") as file:
        file.write('{"kind": "clock", "offset"')
    assert read_clock(path) is None


def test_a_verdict_is_the_same_with_other_clocks(folder: Path, tmp_path: Path) -> None:
    """Who waited for whom follows from when each rank was ready."""
    plain = write_run(tmp_path / "plain", [0.1] * 40, workers=2, hosts=("a", "b"))
    assert judge_folder(plain) is not None
    assert judge_folder(folder) == judge_folder(plain)


def test_no_rank_seems_late_to_a_watcher_because_of_its_clock(folder: Path) -> None:
    claim(folder)  # by this process, which lives
    write_summary(folder, replace(check_summary(folder), status=RUNNING))
    state = State(folder)
    state.refresh()
    assert [(row["rank"], row["late"]) for row in state.as_dict()["ranks"]] == [(0, ""), (1, "")]


def test_runs_are_read_with_the_times_of_rank_0(folder: Path) -> None:
    run = read_run(folder)
    assert isinstance(run, Run)
    assert [step.time for step in run.steps[1]] == pytest.approx([step.time for step in run.steps[0]], abs=1e-6)
    there, here = (run.nodes[name].samples for name in "ba")
    assert [sample.time for sample in there] == pytest.approx([sample.time for sample in here], abs=1e-6)
    assert read_nodes(folder) == run.nodes
    assert read_clock(folder / "rank_1.jsonl") == Clock(-AHEAD, 0.0002)
    assert read_clock(folder / "rank_0.jsonl") is None
    raw = [line.time for line in read_lines(folder / "rank_1.jsonl", Start)]
    assert raw == [START + AHEAD - 1], "the file has what the rank's own clock said"

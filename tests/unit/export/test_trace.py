"""A trace has every step of every rank where it was, and is as the format says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_up import START, write_run
from made_up_pipeline import Stages, write_pipeline
from raw_lines import RawWriter
from trace_check import Event, check_nesting, check_trace, slices

from paceline.export.trace import MOST_STEPS, NODES, choose_steps, write_trace
from paceline.run.folder import check_summary
from paceline.run.lines import read_lines
from paceline.run.records import Step


def trace(folder: Path, *chosen: int | None) -> list[Event]:
    steps, of = choose_steps(folder, *(chosen or (None, None)))
    path = folder.parent / "trace.json"
    done = write_trace(folder, path, check_summary(folder), (), steps, of)
    events = check_trace(path)
    assert done.events == len(events)
    return events


def instants(events: list[Event], rank: int = 0) -> list[str]:
    return [event["name"] for event in events if event["ph"] == "i" and event["pid"] == rank]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", [0.1] * 30, workers=2, losses=[1.0] * 30, hosts=("a", "b"),
                     moves={"a": (1e6, 2e6), "b": (1e6, 2e6)})  # fmt: skip


def test_each_rank_is_a_process_with_its_steps_and_their_parts_in_order(folder: Path) -> None:
    events = trace(folder)
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "rank 0, worker on a", 1: "rank 1, worker on b", NODES: "node a", NODES + 1: "node b"}
    for rank in (0, 1):
        drawn = slices(events, rank)
        assert [each["name"] for each in drawn[:6]] == ["step 0", "input", "forward", "backward", "wait", "optimizer"]
        whole = [each for each in drawn if each["name"].startswith("step ")]
        assert [each["args"]["step"] for each in whole] == list(range(30))
        begin = 1e6 * 2.0  # nodes are sampled from 2 s before the first step
        assert [each["ts"] for each in whole] == pytest.approx([begin + 1e5 * i for i in range(30)], abs=10)
        assert [each["dur"] for each in whole] == pytest.approx([1e5] * 30, abs=10)
        spans = next(read_lines(folder / f"rank_{rank}.jsonl", Step)).spans
        assert {each["name"]: each["dur"] for each in drawn[1:6]} == pytest.approx(
            {name: 1e6 * seconds for name, seconds in spans.items()}, abs=10
        )


def test_nodes_have_counters(folder: Path) -> None:
    counters = [event for event in trace(folder) if event["ph"] == "C" and event["pid"] == NODES]
    assert {event["name"] for event in counters} == {"CPU cores", "memory (GB)", "network (Mbit/s)"}
    busiest = max(event["args"]["out"] for event in counters if event["name"].startswith("network"))
    assert busiest == pytest.approx(8 * 2e6 / 0.1 / 1e6, rel=0.01)


def test_other_lines_are_instants_and_those_without_a_time_follow_their_step(folder: Path) -> None:
    lines = RawWriter(folder / "rank_0.jsonl")
    lines.write("validation", epoch=0, loss=0.5, step=30)
    lines.write("checkpoint", step=30, time=START + 3.5, bytes=10, seconds=0.1)
    lines.write("signal", signal=15, time=START + 4.0)
    lines.write("error", error="<b>no & more", time=START + 4.5)
    lines.close()
    events = trace(folder)
    assert instants(events) == ["validation", "checkpoint", "signal", "error"]
    found = {event["name"]: event for event in events if event["ph"] == "i"}
    assert found["validation"]["ts"] == pytest.approx(1e6 * (2.0 + 3.0), abs=10)
    assert found["error"]["ts"] == pytest.approx(1e6 * (2.0 + 4.5), abs=10)
    assert found["error"]["args"]["error"] == "<b>no & more"


def test_a_part_of_the_run_has_only_what_happened_meanwhile(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [1.0] * 12, moves={"here": (1, 1)})
    path = folder / "rank_0.jsonl"
    steps = path.read_text().splitlines(keepends=True)
    for at in (9, 6, 3, 0):
        steps.insert(at, json.dumps({"kind": "validation", "epoch": 0, "loss": 0.5, "step": at}) + "\n")
    path.write_text("".join(steps))
    events = trace(folder, 4, 8)
    assert [each["args"]["step"] for each in slices(events, 0) if "step" in each["args"]] == [4, 5, 6, 7]
    validations = [event["args"]["step"] for event in events if event["ph"] == "i"]
    assert validations == [6]
    counted = [event["ts"] for event in events if event["ph"] == "C"]
    shown = slices(events, 0)
    assert counted
    assert min(each["ts"] for each in shown) <= min(counted)
    assert max(counted) <= max(each["ts"] + each["dur"] for each in shown)
    assert instants(trace(folder, 8, None)) == ["validation"], "what follows the last step of the run is there, too"
    assert len(slices(trace(folder, None, 3), 0)) == 18


def test_a_long_run_has_its_last_steps(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.001] * (MOST_STEPS + 7))
    assert choose_steps(folder, None, None) == (range(7, MOST_STEPS + 7), MOST_STEPS + 7)
    assert choose_steps(folder, None, 10**9) == (range(MOST_STEPS + 7), MOST_STEPS + 7)
    (folder / "rank_0.jsonl").write_text("")
    assert choose_steps(folder, None, None) == (range(0), 0)
    assert slices(trace(folder), 0) == []


def test_steps_that_seem_to_overlap_are_drawn_one_after_the_other(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [0.5] * 4)
    path = folder / "rank_0.jsonl"
    found = list(read_lines(path, Step))
    path.unlink()
    lines = RawWriter(path)
    for step, late in zip(found, (0.003, 0.0, -2.0, 0.0), strict=True):  # the clock is set back by 2 seconds once
        values: dict[str, Any] = vars(replace(step, time=step.time + late))
        lines.write("step", **{**values, "spans": {"forward": 0.4, "wait": 0.2}})  # more than the step: rounded
    lines.close()
    assert len(slices(trace(folder), 0)) == 12


def test_micro_batches_of_a_pipeline_have_a_track(tmp_path: Path) -> None:
    folder = write_pipeline(tmp_path / "run", Stages((0.01, 0.02)), [1.0] * 9)
    events = trace(folder)
    micro = slices(events, 1, 2)
    assert {"forward 0", "backward 0"} <= {event["name"] for event in micro}
    assert all(event["args"]["step"] >= 0 for event in micro)


def test_clocks_are_applied_and_their_uncertainty_is_stated(folder: Path) -> None:
    path = folder / "rank_1.jsonl"
    text, lines = path.read_text(), RawWriter(path.with_name("new"))
    lines.write("start", rank=1, time=START - 500)
    lines.write("clock", offset=501.0, uncertainty=0.0004)
    lines.close()
    path.write_text(path.with_name("new").read_text() + text)
    first = {rank: slices(trace(folder), rank)[0]["ts"] for rank in (0, 1)}
    assert first[1] - first[0] == pytest.approx(1e6 * 501)
    about = json.loads((folder.parent / "trace.json").read_text())["otherData"]
    assert about["offsets"] == {"1": {"offset_seconds": 501.0, "uncertainty_seconds": 0.0004}}
    path.write_text(text)
    trace(folder)
    about = json.loads((folder.parent / "trace.json").read_text())["otherData"]
    assert about["offsets"] == {"1": "not measured"}


def test_the_checker_finds_slices_that_overlap_in_part() -> None:
    def event(start: float, dur: float) -> Event:
        return {"ph": "X", "pid": 0, "tid": 1, "ts": start, "dur": dur, "name": f"at {start}"}

    check_nesting([event(0, 10), event(0, 4), event(4, 6), event(10, 1)])
    with pytest.raises(AssertionError, match="at 4 overlaps"):
        check_nesting([event(0, 10), event(4, 6.001)])


def test_a_line_that_cannot_be_is_an_error_and_leaves_no_file(folder: Path) -> None:
    lines = RawWriter(folder / "rank_1.jsonl")
    lines.write("step", step=29, epoch=0, time="late", seconds=1.0, samples=8, spans={})
    lines.close()
    with pytest.raises(ValueError, match=r"rank_1\.jsonl: time is 'late'"):
        trace(folder)
    assert list(folder.parent.iterdir()) == [folder]

"""What the page of a run shows is what its files say, as they grow, and no more than a page can hold."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_up import START, steady, write_run
from raw_lines import RawWriter

from paceline.analysis.breakdown import by_rank
from paceline.analysis.runs import Run, read_run
from paceline.errors import UsageError
from paceline.run.folder import write_summary
from paceline.run.liveness import OWNER, claim
from paceline.run.records import RUNNING, Step, Summary
from paceline.watch.curve import MOST, Curve
from paceline.watch.state import State, find_run


def seen(state: State) -> dict[str, Any]:
    state.refresh()
    return state.as_dict()


def begin(folder: Path, **more: Any) -> Path:
    """A run under way, whose process is this one, that has made no step yet."""
    folder.mkdir(parents=True)
    write_summary(folder, Summary(RUNNING, "ring", 2, "gloo", "mlp", "mnist-mini", 8, 16, 1, 0, **more))
    claim(folder)
    return folder


def silent(folder: Path) -> Path:
    """A run that says it is running on another machine, and has written nothing for years."""
    begin(folder)
    owner = json.loads((folder / OWNER).read_text())
    (folder / OWNER).write_text(json.dumps(owner | {"boot": "another machine's", "host": "far"}))
    for path in (*folder.iterdir(), folder):
        os.utime(path, (START - 1000,) * 2)
    return folder


def write(folder: Path, first: int, end: int, rank: int = 0, **more: Any) -> None:
    """Steps of a tenth of a second each."""
    lines = RawWriter(folder / f"rank_{rank}.jsonl")
    for step in range(first, end):
        values = {"time": START + step / 10, "seconds": 0.1, "samples": 16, "spans": {"forward": 0.06}, "loss": 1.0}
        lines.write("step", step=step, epoch=step // 100, **(values | more))
    lines.close()


def add(folder: Path, kind: str, **values: Any) -> None:
    lines = RawWriter(folder / "rank_0.jsonl")
    lines.write(kind, **values)
    lines.close()


def test_a_completed_run_is_shown_with_the_parts_of_its_report_and_the_command_for_it(tmp_path: Path) -> None:
    moves = {"a": (1000.0, 2000.0), "b": (2000.0, 1000.0)}
    folder = write_run(tmp_path / "run", [0.05] * 120, workers=2, losses=[2 - n / 100 for n in range(120)],
                       compute=(0.4, 0.8), hosts=("a", "b"), moves=moves, test_accuracy=0.875)  # fmt: skip
    state = seen(State(folder))
    assert (state["title"], state["about"]) == ("mlp on mnist-mini", "ring, 2 workers, global batch 64, gloo")
    assert (state["status"], state["ended"], state["notes"]) == ("completed", True, [])
    assert state["next"]["command"] == f"paceline report {folder}"
    assert state["curve"][0] == [1, 2.0, 1280.0]
    assert state["curve"][-1] == [120, 0.81, 1280.0]
    assert ["test accuracy", "87.50 %", ""] in state["figures"]
    assert ["samples/s", "1,280", ""] in state["figures"]
    run = read_run(folder)
    assert isinstance(run, Run)
    reported = {rank: vars(parts) for rank, parts in by_rank(run).items()}
    for row in state["ranks"]:
        own = reported[row["rank"]]
        assert row["parts"].keys() == {name for name, value in own.items() if value > 1e-3 * row["seconds"]}
        assert {name: value for name, (value, _) in row["parts"].items()} == pytest.approx(
            {name: own[name] for name in row["parts"]}
        )
    assert [row["host"] for row in state["ranks"]] == ["a", "b"]
    assert state["verdict"][0] == "Rank 1 on b computes 2.00 times slower than rank 0."
    assert [row["slow"] for row in state["ranks"]] == [False, True]
    one, two = state["nodes"]
    assert (one["name"], one["ranks"], two["ranks"]) == ("a", "rank 0", "rank 1")
    assert [row[:3] for row in one["rows"]] == [
        ["cores busy", "1.5 of 4", 4],
        ["memory", "2.00 GB of 8.00 GB", 8 * 10**9],
        ["network in", "0 Mbit/s", None],  # the last sample is of after the last step
        ["network out", "0 Mbit/s", None],
    ]
    during = [row[3][8] for row in one["rows"]]  # 20 updates a second
    assert during == pytest.approx([1.5, 2e9, 8 * 20 * 1000.0, 8 * 20 * 2000.0], rel=1e-3)


def test_a_run_is_shown_as_it_goes_on(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    state = State(folder)
    shown = seen(state)
    assert (shown["status"], shown["ended"], shown["curve"], shown["ranks"]) == ("starting", False, [], [])
    add(folder, "start", rank=0, time=START - 5, schema=1)
    add(folder, "planned", steps=400, epochs=4)
    write(folder, 0, 40, tokens=160)
    write(folder, 0, 40, rank=1)
    shown = seen(state)
    assert shown["status"] == "running"
    assert (shown["progress"]["steps"], shown["progress"]["epoch"]) == ("step 40 of 400", "epoch 1 of 4")
    assert (shown["progress"]["share"], shown["progress"]["left"]) == (0.1, "0:00:36")
    assert [row["rank"] for row in shown["ranks"]] == [0, 1]
    add(folder, "validation", epoch=0, loss=0.5, accuracy=0.9, step=40)
    write(folder, 40, 200, tokens=160)
    add(folder, "validation", epoch=1, loss=0.75, accuracy=0.8, step=200)
    shown = seen(state)
    assert (shown["progress"]["steps"], shown["progress"]["epoch"]) == ("step 200 of 400", "epoch 2 of 4")
    assert shown["validations"] == [[40, 0.5], [200, 0.75]]
    assert ["validation loss", "0.7500", "best 0.5000"] in shown["figures"]
    assert ["tokens/s", "1,600", ""] in shown["figures"]
    assert shown["ranks"][1]["late"] == "no step for 16.0 s"
    assert shown["progress"]["stalled"]  # its steps are long ago, and its process lives


def test_the_parts_of_a_step_are_those_of_the_steps_that_all_ranks_have_recorded(tmp_path: Path) -> None:
    """One rank may have written its last steps, and another not yet: nobody waited for the missing ones."""
    folder = begin(tmp_path / "run")
    write(folder, 0, 50, rank=0)
    write(folder, 50, 60, rank=0, spans={"forward": 0.09})
    write(folder, 0, 50, rank=1, spans={"forward": 0.03, "wait": 0.05})
    one, two = seen(State(folder))["ranks"]
    assert one["parts"]["compute"][0] == pytest.approx(0.06)
    assert two["parts"]["compute"][0] == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("options", "before", "after"),
    [
        ("", ("step 9", "epoch 1", None), ("step 120", "epoch 2", None)),
        ("epochs = 4", ("step 9", "epoch 1 of 4", None), ("step 120 of 400", "epoch 2 of 4", 0.3)),
        ("steps = 240", ("step 9 of 240", "epoch 1", 9 / 240), ("step 120 of 240", "epoch 2", 0.5)),
        ('steps = "many"', ("step 9", "epoch 1", None), ("step 120", "epoch 2", None)),
    ],
)
def test_how_long_an_own_loop_is_may_be_known_from_its_options(
    tmp_path: Path, options: str, before: tuple[str, str, float | None], after: tuple[str, str, float | None]
) -> None:
    folder = begin(tmp_path / "run")
    (folder / "spec.toml").write_text(options)
    state = State(folder)
    for first, end, expected in ((0, 9, before), (9, 120, after)):
        write(folder, first, end)
        progress = seen(state)["progress"]
        assert (progress["steps"], progress["epoch"], progress["share"]) == expected
        assert bool(progress["left"]) == (progress["share"] is not None)


def test_what_a_resumed_run_makes_again_replaces_what_it_made(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    add(folder, "start", rank=0, time=START, schema=1)
    write(folder, 0, 50, loss=3.0)
    add(folder, "validation", epoch=0, loss=2.0, step=20)
    add(folder, "validation", epoch=0, loss=1.0, step=50)
    state = State(folder)
    state.refresh()
    add(folder, "resumed", step=30, epoch=0, used=0, time=START + 1000)
    add(folder, "start", rank=0, time=START + 1000, schema=1)
    write(folder, 30, 35, loss=1.0, time=START + 1001)
    shown = seen(state)
    assert [step for step, _, _ in shown["curve"]] == list(range(1, 36))
    assert [loss for _, loss, _ in shown["curve"]] == [3.0] * 30 + [1.0] * 5
    assert shown["validations"] == [[20, 2.0]]


def test_a_curve_keeps_few_points_that_cover_all_steps_evenly() -> None:
    curve = Curve()
    for step in range(0, 100_000, 3):  # of a long file only some steps are read
        curve.add(Step(step, 0, START + step / 10, 0.1, 16, {}, loss=float(step)))
    points = curve.points
    assert MOST / 2 <= len(points) <= MOST
    assert points[-1].step == 99_999
    gaps = {after.step - before.step for before, after in pairwise(points[:-1])}
    assert max(gaps) - min(gaps) <= 3
    assert points[0].mean_loss == pytest.approx(curve.every / 2, abs=3)
    assert points[7].rate == pytest.approx(160)
    assert curve.seconds_per_step() == pytest.approx(0.1)


def test_the_state_of_a_long_run_is_as_small_as_that_of_a_short_one(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    for first in range(0, 30_000, 1000):
        write(folder, first, first + 1000)
        add(folder, "validation", epoch=0, loss=1 / 3, step=first + 1000)
    state = State(folder)
    assert len(json.dumps(seen(state))) < 30_000
    assert state.as_dict()["progress"]["steps"] == "step 30,000"
    assert len(state.as_dict()["validations"]) == 30


def test_how_a_run_ended_is_said(tmp_path: Path) -> None:
    failed = begin(tmp_path / "failed", error="rank 1: out of memory", failed_rank=1)
    values = json.loads((failed / "summary.json").read_text())
    (failed / "summary.json").write_text(json.dumps(values | {"status": "failed"}))
    shown = seen(State(failed))
    assert (shown["status"], shown["said"], shown["ended"]) == ("failed", "rank 1: out of memory", True)
    assert shown["next"]["command"] == str(failed / "logs")
    killed = begin(tmp_path / "killed")
    owner = json.loads((killed / OWNER).read_text())
    (killed / OWNER).write_text(json.dumps(owner | {"started": 1}))
    shown = seen(State(killed))
    assert (shown["status"], shown["ended"]) == ("killed", True)
    assert "is gone: was it killed?" in shown["said"]
    shown = seen(State(silent(tmp_path / "silent")))
    assert (shown["status"], shown["ended"]) == ("silent", False)
    assert shown["said"].startswith("no sign of life on far for ")


def test_files_that_become_damaged_are_mentioned_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    write(folder, 0, 20)
    state = State(folder)
    assert seen(state)["notes"] == []
    with (folder / "rank_0.jsonl").open("a") as file:
        file.write("{]\n")
    write(folder, 20, 25, loss="none")
    write(folder, 25, 30)
    (folder / "rank_1.jsonl").mkdir()
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(summary[:50])
    shown = seen(state)
    assert (shown["status"], shown["progress"]["steps"]) == ("running", "step 30")
    assert len(shown["notes"]) == 3
    said = "\n".join(shown["notes"])
    assert "summary.json cannot be read: " in said
    assert "6 lines of rank_0.jsonl cannot be read: loss is 'none'" in said
    assert "rank_1.jsonl: " in said
    (folder / "summary.json").write_text(summary)
    assert len(seen(state)["notes"]) == 2
    shutil.rmtree(folder)
    shown = seen(state)
    assert "summary.json cannot be read: No such file" in shown["notes"][0]
    assert shown["progress"]["steps"] == "step 30"


def test_another_run_of_the_same_name_replaces_the_first(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    write(folder, 0, 50)
    state = State(folder)
    state.refresh()
    shutil.rmtree(folder)
    begin(folder)
    write(folder, 0, 5)
    assert [step for step, _, _ in seen(state)["curve"]] == [1, 2, 3, 4, 5]


def test_of_several_runs_the_newest_under_way_is_watched_or_the_newest(tmp_path: Path) -> None:
    for age, name in enumerate(("new", "middle", "old")):
        folder = write_run(tmp_path / name, steady(0.1, 9))
        os.utime(folder / "summary.json", (START - age,) * 2)
    assert find_run(tmp_path) == tmp_path / "new"
    assert find_run(tmp_path / "old") == tmp_path / "old"
    silent(tmp_path / "silent")
    assert find_run(tmp_path) == tmp_path / "new"
    os.utime(begin(tmp_path / "running") / "summary.json", (START - 50,) * 2)
    assert find_run(tmp_path) == tmp_path / "running"


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("file", "missing"):
        with pytest.raises(UsageError, match=f"{name} is not a folder: give a run folder"):
            find_run(tmp_path / name)
    with pytest.raises(UsageError, match=r"there is no run to watch in .*empty: it is not a run folder"):
        find_run(tmp_path / "empty")
    damaged = begin(tmp_path / "runs" / "damaged")
    (damaged / "summary.json").write_text('{"schema": 1')
    with pytest.raises(UsageError, match=r"runs: .*damaged: no summary that can be read"):
        find_run(tmp_path / "runs")


def test_a_run_whose_steps_cannot_be_read_at_all_is_refused(tmp_path: Path) -> None:
    folder = begin(tmp_path / "run")
    (folder / "rank_0.jsonl").write_bytes(b"\0\n" * 9)
    state = State(folder)
    state.refresh()
    with pytest.raises(UsageError, match=r"run is damaged: 9 lines of rank_0.jsonl cannot be read"):
        state.check()

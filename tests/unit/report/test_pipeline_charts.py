"""The charts of pipelines: a step as it was, and stages beside their plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run
from made_up_pipeline import Stages, write_pipeline

from paceline.analysis.study import Study, read_study
from paceline.report import tables
from paceline.report.draw import DRAWN_BY
from paceline.report.figure import Chart

SLOW = Stages((0.01, 0.02, 0.01), schedule="gpipe", send=0.001, planned=0.5)
WIDE = Stages((0.01, 0.01), replicas=2, average=0.01, recompute=True, micros=4)


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("pipelines")
    write_run(folder / "one", steady(0.5, 12))
    for name, shape in (("slow", SLOW), ("wide", WIDE)):
        write_pipeline(folder / name, shape, [3.0, 2.0, 2.0, *[1.0] * 6])
    return read_study([folder])


def drawn(study: Study, name: str) -> Chart:
    found = DRAWN_BY[name](study)
    assert found
    return found


def page(chart: Chart, name: str) -> list[dict[str, Any]]:
    """What is seen with this choice of its menu."""
    [menu] = chart.figure["layout"]["updatemenus"]
    [seen] = [button["args"][0]["visible"] for button in menu["buttons"] if button["label"] == name]
    return [trace for trace, shown in zip(chart.figure["data"], seen, strict=True) if shown]


def title(chart: Chart, name: str) -> str:
    [menu] = chart.figure["layout"]["updatemenus"]
    [layout] = [button["args"][1] for button in menu["buttons"] if button["label"] == name]
    return str(layout["annotations"][0]["text"]).replace("<br>", " ")


def test_every_event_of_the_typical_step_is_a_bar(study: Study) -> None:
    """It is none of the first three, which are slower."""
    chart = drawn(study, "pipeline-step")
    traces = {trace["name"]: trace for trace in page(chart, "pipeline, 3 stages, 8 micro-batches, gpipe")}
    assert set(traces) == {"forward", "backward", "sending", "waiting", "optimizer"}
    names = {"send": "sending", "wait": "waiting"}
    for stage, events in enumerate(SLOW.events()):
        wanted = [(names.get(what, what), 1000 * start, 1000 * seconds) for what, _, start, seconds in events]
        found = [(name, base, x) for name, trace in traces.items()
                 for y, base, x in zip(trace["y"], trace["base"], trace["x"], strict=True)
                 if y == f"stage {stage}"]  # fmt: skip
        found.sort(key=lambda bar: bar[1])
        assert [bar[0] for bar in found] == [bar[0] for bar in wanted]
        for at in (1, 2):
            assert [bar[at] for bar in found] == pytest.approx([bar[at] for bar in wanted], abs=0.001)
    assert traces["forward"]["text"] == [str(micro) for micro in range(8)] * 3
    assert "text" not in traces["waiting"]
    assert "forward of micro-batch 0, 10.0 ms" in traces["forward"]["hovertext"][0].replace("<br>", " ")


def test_the_first_stage_is_at_the_top_and_replicas_have_rows_of_their_own(study: Study) -> None:
    chart = drawn(study, "pipeline-step")
    [menu] = chart.figure["layout"]["updatemenus"]
    rows = {button["label"]: button["args"][1]["yaxis.categoryarray"] for button in menu["buttons"]}
    assert rows["pipeline, 3 stages, 8 micro-batches, gpipe"] == ["stage 2", "stage 1", "stage 0"]
    [wide] = [found for label, found in rows.items() if "replicas" in label]
    assert wide == ["replica 1, stage 1", "replica 1, stage 0", "replica 0, stage 1", "replica 0, stage 0"]
    assert "recomputation" in {trace["name"] for trace in chart.figure["data"]}
    assert "averaging" in {trace["name"] for trace in chart.figure["data"]}


def test_what_was_idle_stands_beside_theory(study: Study) -> None:
    chart = drawn(study, "pipeline-step")
    said = title(chart, "pipeline, 3 stages, 8 micro-batches, gpipe")
    assert said.startswith("<b>3 stages, 8 micro-batches, gpipe: ")
    assert "20 % in theory" in said
    [idle] = {row["idle"] for row in chart.rows if row["stages"] == 3}
    assert f"{100 * idle:.0f} % idle" in said
    assert {row["step"] for row in chart.rows} <= set(range(3, 9))


def test_stages_stand_beside_their_plan(study: Study) -> None:
    chart = drawn(study, "pipeline-cut")
    traces = page(chart, "pipeline, 3 stages, 8 micro-batches, gpipe")
    time = {trace["name"]: trace for trace in traces if trace["xaxis"] == "x"}
    assert time["measured"]["y"] == pytest.approx([30.125, 60.125, 30.125], rel=1e-3)
    assert time["planned"]["y"] == pytest.approx([value / 2 for value in time["measured"]["y"]], rel=1e-3)
    assert time["measured: sending"]["base"] == pytest.approx(time["measured"]["y"])
    assert time["measured: sending"]["y"] == pytest.approx([1.0, 2.0, 1.0], rel=1e-3)
    assert time["planned: transfers"]["offsetgroup"] == time["planned"]["offsetgroup"] == "planned"
    memory = {trace["name"]: trace["y"] for trace in traces if trace["xaxis"] == "x2"}
    assert memory == {"planned": [60, 120, 180], "measured": [300, 310, 320]}
    [cuts] = [trace for trace in traces if trace["xaxis"] == "x3"]
    assert (cuts["x"], cuts["y"]) == (["0–1", "1–2"], [0.4, 0.2])
    row = next(row for row in chart.rows if row["stages"] == 3 and row["stage"] == 1)
    assert row["planned_compute_seconds"] == pytest.approx(0.060125 / 2)
    assert row["peak_rss_bytes"] == 310 * 10**6


def test_a_plan_for_which_nothing_was_run_is_not_drawn(tmp_path: Path) -> None:
    write_pipeline(tmp_path / "a", Stages((0.01, 0.02), send=0.001, planned=0.0), [1.0] * 9)
    chart = drawn(read_study([tmp_path]), "pipeline-cut")
    names = {axis: [trace["name"] for trace in chart.figure["data"] if trace["xaxis"] == axis]
             for axis in ("x", "x2", "x3")}  # fmt: skip
    assert names == {"x": ["measured", "measured: sending"], "x2": ["measured"], "x3": ["counted"]}
    assert {row["planned_memory_bytes"] for row in chart.rows} == {None}


def test_without_pipelines_there_are_none_of_these_charts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steady(0.1, 12), workers=2)
    found = read_study([tmp_path])
    assert DRAWN_BY["pipeline-step"](found) is DRAWN_BY["pipeline-cut"](found) is None


def test_the_table_of_results_says_how_models_are_divided(study: Study) -> None:
    text = repr(tables.results_table(study))
    for words in ("stages", "micro-batches", "gpipe"):
        assert words in text
    assert {row["stages"] for row in tables.results(study)} >= {3}
    assert "tensor" not in text
    assert tables.matches(study.groups[1], {"stages": 3, "schedule": "gpipe"})

"""The page of a prediction: the answer first, what was measured, what is extrapolated; nothing but its own runs."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
from made_up_experiments import EVIL
from made_up_outlook import MANY, made_up_outlook
from page_parser import Scripts

from paceline.predict.beside import Beside
from paceline.predict.forecast import Scored
from paceline.predict.ranges import Range
from paceline.report.charts_prediction import LETTERS, prediction_charts
from paceline.report.figure import COLOURS
from paceline.report.plotly_js import TRACES
from paceline.report.prediction import answer, prediction_page
from paceline.report.predictions import beside

PLOTLY = "var Plotly = {};"


def test_the_answer_is_the_fastest_setting_beside_one_process() -> None:
    known = made_up_outlook()
    best = max(known.forecasts, key=lambda each: each.samples_per_second.value)
    assert answer(known).startswith(
        f"{best.strategy} with 1,024 workers on links of 1gbit is predicted to be 509 times"
    )
    assert "(90 % interval 458 to 560) (EXTRAPOLATED)" in answer(known)
    slow = replace(known, forecasts=tuple(each for each in known.forecasts if each.workers == 1))
    assert "No setting is certainly faster than one process" in answer(slow)


def test_every_chart_says_what_is_predicted_extrapolated_and_emulated() -> None:
    charts = prediction_charts(made_up_outlook())
    assert [chart.name for chart in charts] == ["predicted-throughput", "predicted-step", "predicted-efficiency",
                                                "limits"]  # fmt: skip
    for chart in charts:
        assert "not measured" in chart.caption
        assert "EXTRAPOLATED where" in chart.caption
        assert "Emulated compute (0.08 s a batch; gradients 16 times smaller)." in chart.caption
        assert {trace["type"] for trace in chart.figure["data"]} <= set(TRACES)
    assert MANY in charts[0].caption
    assert "this collective was not measured (reduce-bcast)" in charts[0].caption


def test_lines_are_dashed_and_pale_where_they_go_beyond_what_was_measured() -> None:
    step = prediction_charts(made_up_outlook())[1]
    ring = [trace for trace in step.figure["data"] if trace["name"] == "ring" and trace["mode"] == "lines"]
    lines = {trace["line"]["dash"]: trace for trace in ring if "fill" not in trace}
    assert lines["solid"]["x"] == [1, 2, 4, 8, 16]
    assert lines["dash"]["x"] == [16, 32, 64, 128, 256, 512, 1024]
    assert lines["dash"]["opacity"] < lines["solid"]["opacity"]
    bands = [trace for trace in ring if "fill" in trace]
    assert len(bands) == 2
    assert max(bands[0]["x"]) == 16
    (crosses,) = (trace for trace in step.figure["data"] if trace["name"] == "measured on other machines")
    assert sorted(crosses["x"]) == [1, 2, 2, 4, 4]
    assert crosses["marker"]["color"] == ["#000000"] + [COLOURS[1]] * 2 + [COLOURS[4]] * 2, "one process, ring, ps-sync"


def test_every_cell_of_a_map_has_a_letter_and_what_was_measured_a_frame() -> None:
    known = made_up_outlook()
    chart = prediction_charts(known)[-1]
    cells = known.maps[0].cells
    shown = [trace for trace in chart.figure["data"] if trace["visible"]]
    assert sum(len(trace["text"]) for trace in shown) == len(cells)
    for trace in shown:
        letter, cause = trace["name"].split(": ")
        assert set(trace["text"]) == {letter} == {LETTERS[cause][0]}
    assert sum(width > 0 for trace in shown for width in trace["marker"]["line"]["width"]) == 3
    assert len({letter for letter, _ in LETTERS.values()}) == len(LETTERS)
    menu = chart.figure["layout"]["updatemenus"][0]["buttons"]
    assert [each["label"] for each in menu] == [each.strategy for each in known.maps]


def test_what_runs_are_called_never_becomes_html_and_nothing_is_fetched() -> None:
    known = made_up_outlook(EVIL)
    named = tuple(replace(each, strategy=f"{each.strategy} {EVIL}") for each in known.forecasts)
    evil = replace(known, forecasts=named, maps=tuple(replace(each, strategy=EVIL) for each in known.maps))
    seen = Scripts(prediction_page(evil, PLOTLY))
    kinds = [kind for kind, _ in seen.scripts]
    assert kinds == ["application/json"] * 4 + ["javascript"] * 2
    assert not [tag for tag, _ in seen.tags if tag in ("img", "iframe", "object", "embed")]
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
    addresses = [value for _, attributes in seen.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(re.match("#|data:,", value or "") for value in addresses)
    (policy,) = [attributes["content"] for _, attributes in seen.tags if "http-equiv" in attributes]
    assert policy
    assert policy.startswith("default-src 'none'")
    for kind, script in seen.scripts:
        if kind == "application/json":
            names = {trace.get("name", "") for trace in json.loads(script)["data"]}
            assert not [name for name in names if "<" in name], "plotly takes a < for the start of a tag"


def test_all_predictions_are_in_the_table() -> None:
    seen = Scripts(prediction_page(made_up_outlook(), PLOTLY)).text
    assert seen.count(f"EXTRAPOLATED: {MANY}") >= 6 * 4
    assert "5.60 MB" in seen
    assert "600 MB" in seen


@pytest.mark.parametrize(("measured", "said"), [(0.1, "yes"), (0.2, "no")])
def test_a_report_shows_predictions_beside_measurements(measured: float, said: str) -> None:
    scored = Scored("run", "ring", 8, 256, measured, Range(0.11, 0.095, 0.12))
    shown = beside(Beside("mlp on mnist", (1, 2, 4), (scored,), ("gather has none",)))
    inside = int(said == "yes")
    assert shown.summary.startswith(
        "1 run with 8 workers, predicted from runs with 1, 2 and 4 workers only: mean error"
    )
    assert shown.summary.endswith(f"{inside} of 1 inside the 90 % interval.")
    assert shown.table
    assert shown.table.rows[0][-1].text == said
    assert shown.left_out == ("gather has none",)

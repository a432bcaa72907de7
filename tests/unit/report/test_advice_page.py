"""The page of an advice: the verdict first, what is measured, predicted and extrapolated, and no chart without data."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest
from made_up_advice import HERE, MANY, MARGIN, made_up_advice
from made_up_experiments import EVIL
from page_parser import Scripts

from paceline.advise.advice import EXTRAPOLATED, MEASURED, PREDICTED, Advice, Learning, Pricing
from paceline.predict.ranges import Range
from paceline.report.advice import advice_page
from paceline.report.charts_advice import MOST_RELATIVE, advice_charts, identity
from paceline.report.charts_worth import MOST
from paceline.report.figure import Chart
from paceline.report.plotly_js import TRACES

PLOTLY = "var Plotly = {};"
NAMES = ["advised-times", "advised-money", "advised-links", "advised-batches"]


def chart_of(advice: Advice, name: str) -> Chart:
    return next(chart for chart in advice_charts(advice) if chart.name == name)


def traces_of(advice: Advice, name: str) -> dict[str, dict[str, Any]]:
    """The traces of a chart by the name in its legend, without bands."""
    return {trace["name"]: trace for trace in chart_of(advice, name).figure["data"] if "fill" not in trace}


def badges_of(advice: Advice) -> list[str]:
    return re.findall('<span class="badge">(.*?)</span>', advice_page(advice, PLOTLY))


def without_length(advice: Advice) -> Advice:
    """How many updates the training makes is not known."""
    choices = tuple(replace(each, steps=None, seconds=None, money=None) for each in advice.choices)
    return replace(advice, choices=choices, front=(), for_deadline=None, for_budget=None, deadline=None, budget=None)


def test_the_verdict_is_first_and_commands_in_its_reasons_are_code() -> None:
    advice = made_up_advice()
    page = advice_page(advice, PLOTLY)
    assert f'<p class="answer">{advice.sentence}</p>' in page
    assert page.index(advice.sentence) < page.index(advice.reasons[0]) < page.index("<figure")
    assert advice.best
    assert f"<code>{advice.best.command}</code>" in page


def test_badges_say_what_was_not_measured_not_trained_and_not_offered() -> None:
    advice = made_up_advice()
    emulated, example = "emulated compute: nothing was trained", "example prices"
    assert badges_of(advice) == ["predicted, not measured", emulated, example]
    assert advice.best
    assert badges_of(replace(advice, best=replace(advice.best, basis=EXTRAPOLATED)))[0] == "extrapolated, not measured"
    offer = Pricing("EUR", "an offer", "2026-10-01", example=False)
    sure = replace(advice, best=replace(advice.best, basis=MEASURED), emulated="", pricing=offer)
    assert badges_of(sure) == []


def test_every_basis_has_its_own_mark_in_charts_and_its_word_in_the_table() -> None:
    advice = made_up_advice()
    for name in NAMES[:2]:
        marks = [traces_of(advice, name)[basis]["marker"] for basis in (MEASURED, PREDICTED, EXTRAPOLATED)]
        assert len({mark["symbol"] for mark in marks}) == len({mark["color"] for mark in marks}) == 3
        assert f"EXTRAPOLATED ({MANY}" in chart_of(advice, name).caption
    for chart in advice_charts(advice)[2:]:
        assert "Predicted, not measured" in chart.caption
    page = advice_page(advice, PLOTLY)
    table = page[page.index('<section id="results"') : page.index('<section id="missing"')]
    for basis, word in ((MEASURED, MEASURED), (PREDICTED, PREDICTED), (EXTRAPOLATED, "EXTRAPOLATED:")):
        assert table.count(f">{word}<") == sum(each.basis == basis for each in advice.choices) > 0
    assert table.count(">too much<") == sum(not each.fits for each in advice.choices) > 0


def test_the_fastest_settings_and_those_that_the_advice_names_have_a_row() -> None:
    advice = made_up_advice()
    slow = next(each for each in reversed(advice.choices) if each.fits)
    advice = replace(advice, best=slow)
    chart = chart_of(advice, "advised-times")
    fitting = [each for each in advice.choices if each.fits]
    assert len(chart.rows) == MOST < len(fitting)
    hours = [row["hours"] for row in chart.rows]
    assert hours == sorted(hours)
    assert slow.seconds
    assert hours[-1] == pytest.approx(slow.seconds.value / 3600)
    assert chart.figure["layout"]["yaxis"]["ticktext"][-1].startswith("<b>ps-sync, 64 workers")
    one = traces_of(advice, "advised-times")["one process"]
    assert advice.alone
    assert advice.alone.seconds
    assert one["x"] == [advice.alone.seconds.value / 3600] * 2


def test_intervals_are_drawn_from_their_lower_to_their_upper_end() -> None:
    advice = made_up_advice()
    shown = traces_of(advice, "advised-times")[MEASURED]
    bars = shown["error_x"]
    assert advice.alone
    assert advice.alone.seconds
    ends = shown["x"][-1] - bars["arrayminus"][-1], shown["x"][-1] + bars["array"][-1]
    assert ends == pytest.approx((advice.alone.seconds.low / 3600, advice.alone.seconds.high / 3600))


def test_times_are_relative_if_the_length_of_the_training_is_unknown() -> None:
    charts = {chart.name: chart for chart in advice_charts(without_length(made_up_advice()))}
    assert list(charts) == ["advised-times", "advised-links", "advised-batches"]
    assert charts["advised-times"].title == "Time relative to one process"
    assert "relative_time" in charts["advised-times"].rows[0]
    heads = re.findall("<th.*?>(.*?)</th>", advice_page(without_length(made_up_advice()), PLOTLY))
    assert "basis" in heads
    assert not [head for head in heads if head.startswith(("time,", "cost"))], "columns of which nothing is known"
    (one,) = (t for t in charts["advised-times"].figure["data"] if t["name"] == "one process")
    assert one["x"] == [1, 1]


def test_time_and_money_has_the_front_the_limits_and_the_settings_that_are_named() -> None:
    advice = made_up_advice()
    found = traces_of(advice, "advised-money")
    front = found["none is both faster and cheaper"]
    assert front["x"] == sorted(front["x"])
    assert front["y"] == sorted(front["y"], reverse=True)
    assert len(front["x"]) == len(advice.front) > 1
    assert found["deadline: 4 hours"]["x"] == [4, 4]
    assert found["budget: 12 EUR"]["y"] == [12, 12]
    assert advice.best
    assert advice.best.seconds
    assert advice.best.money
    ring = found["best distributed"]
    assert (ring["x"], ring["y"]) == ([advice.best.seconds.value / 3600], [advice.best.money.value])
    points = [text for basis in (MEASURED, PREDICTED, EXTRAPOLATED) for text in found[basis]["hovertext"]]
    assert len(points) == sum(each.fits for each in advice.choices)
    assert any(text.startswith("allreduce, 16 workers, batch 1,024,") for text in points)


def test_free_machines_are_drawn_too() -> None:
    advice = made_up_advice()
    free = tuple(replace(each, money=Range(0.0, 0.0, 0.0)) for each in advice.choices)
    chart = chart_of(replace(advice, choices=free, front=free[:1], budget=None), "advised-money")
    assert chart.figure["layout"]["yaxis"]["range"] == [0, 1]


def test_links_have_a_line_for_each_number_of_workers_and_lines_at_break_even() -> None:
    advice = made_up_advice()
    found = traces_of(advice, "advised-links")
    assert {name for name in found if "workers" in name} == {f"{n} workers" for n in (2, 4, 8, 16)}
    assert found["as fast as one process"]["y"] == [1, 1]
    assert found["faster by 10 %"]["y"] == pytest.approx([1 / (1 + MARGIN)] * 2)
    chart = chart_of(advice, "advised-links")
    assert chart.figure["layout"]["xaxis"]["ticktext"][1:3] == ["100<br>Mbit/s", "1<br>Gbit/s"]
    assert f"Times above {MOST_RELATIVE:g} are cut off" in chart.caption
    fast = replace(advice, links=tuple(each for each in advice.links if each.rate >= 1e9))
    assert "cut off" not in chart_of(fast, "advised-links").caption


def test_the_critical_batch_is_a_line_in_its_interval() -> None:
    advice = made_up_advice()
    critical = advice.learning.critical
    assert critical
    line = traces_of(advice, "advised-batches")["critical batch: 700 (490 to 910)"]
    assert line["x"] == [critical.value] * 2
    assert _critical_ends(advice) == (critical.low, critical.high)
    unbounded = replace(advice.learning, critical=replace(critical, high=float("inf")))
    assert _critical_ends(replace(advice, learning=unbounded)) == pytest.approx((critical.low, 1.3 * 1024))


def _critical_ends(advice: Advice) -> tuple[float, float]:
    """Of the band of the critical batch."""
    found = chart_of(advice, "advised-batches").figure["data"]
    (band,) = (trace["x"] for trace in found if "fill" in trace and trace["name"].startswith("critical"))
    return min(band), max(band)


def test_charts_without_data_are_left_out() -> None:
    advice = made_up_advice()
    assert [chart.name for chart in advice_charts(advice)] == NAMES
    for chart in advice_charts(advice):
        assert {trace["type"] for trace in chart.figure["data"]} <= set(TRACES)
    bare = replace(advice, links=(), learning=Learning("no run was long enough"), pricing=None)
    assert [chart.name for chart in advice_charts(bare)] == ["advised-times"]
    nothing = replace(without_length(bare), choices=(), best=None, alone=None, here=None, left_out=())
    page = advice_page(nothing, PLOTLY)
    assert "<figure" not in page
    assert re.findall('<section id="(.*?)">', page) == ["verdict", "basis"]


def test_a_setting_is_known_again_if_its_time_is_relative_to_another_process() -> None:
    """The best setting on the own machine is compared with one process there."""
    advice = made_up_advice()
    assert advice.here
    other = replace(advice, here=replace(advice.here, relative=Range(1.0, 0.9, 1.1)))
    assert identity(other.here or advice.here) == identity(advice.here)
    assert "best where the runs were made, best for the budget" in traces_of(other, "advised-money")
    assert f"{HERE}; best where the runs were made" in Scripts(advice_page(other, PLOTLY)).text


def test_what_a_user_named_never_becomes_html_and_nothing_is_fetched() -> None:
    advice = made_up_advice(EVIL)
    links = tuple(replace(each, strategy=EVIL) for each in advice.links)
    named = {identity(each): replace(each, strategy=each.strategy + EVIL, beyond=(EVIL,)) for each in advice.choices}
    evil = replace(advice, links=links, choices=tuple(named.values()), pricing=Pricing(EVIL, EVIL, EVIL, example=True),
                   front=tuple(named[identity(each)] for each in advice.front))  # fmt: skip
    seen = Scripts(advice_page(evil, PLOTLY))
    assert [kind for kind, _ in seen.scripts] == ["application/json"] * 4 + ["javascript"] * 2
    assert not [tag for tag, _ in seen.tags if tag in ("img", "iframe", "object", "embed")]
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
    addresses = [value for _, attributes in seen.tags for name, value in attributes.items() if name in ("src", "href")]
    assert all(re.match("#|data:,", value or "") for value in addresses)
    for kind, script in seen.scripts:
        if kind == "application/json":
            figure = json.loads(script)
            texts = [trace["name"] for trace in figure["data"]]
            texts += [text for trace in figure["data"] for text in trace.get("hovertext", ())]
            for part in ("xaxis", "yaxis"):
                axis = figure["layout"][part]
                texts += [axis["title"]["text"], *axis.get("ticktext", ())]
            tags = {tag for text in texts for tag in re.findall("<[^>]*>", text)}
            assert tags <= {"<br>", "<b>", "</b>"}, "plotly takes a < for the start of a tag"


def test_what_it_rests_on_is_said() -> None:
    seen = Scripts(advice_page(made_up_advice(), PLOTLY)).text
    assert "It rests on 7 runs, which took 5.20 min." in seen
    assert "Prices are in EUR, from prices.toml, of 2026-10-01." in seen
    assert "These prices are an example" in seen
    assert "Emulated compute (0.4 s a batch)." in seen
    assert "pipeline cannot have the options of this command" in seen

"""Every chart is one that plotly accepts, says what its axes are in, and draws the numbers of its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from made_up import steady, write_run
from made_up_experiments import MadeUp, language_models, servers_and_ring, training, write

from paceline.analysis.study import Study, read_study
from paceline.report.draw import DRAWN_BY, draw
from paceline.report.figure import COLOURS, Chart
from paceline.report.series import MOST_LINES
from paceline.report.table import CHARTS

# What a title of an axis must have: a unit, or a word that is one.
UNITS = (", s", ", ms", ", %", ", MB", "% of ideal", "times one worker", "per second", "workers", "servers", "rank",
         "times as fast", "samples", "loss", "cores", "MB in and out", "stage")  # fmt: skip
# Of the charts that draw one value a row: the row's column, and the chart's unit in it.
DRAWN_COLUMNS = {
    "strong": ("speedup", 1.0),
    "speedup-by-model": ("speedup", 1.0),
    "throughput": ("samples_per_second", 1.0),
    "traffic": ("bytes_per_update", 1e-6),
    "servers": ("speedup", 1.0),
    "time-by-batch": ("epoch_seconds", 1.0),
    "accuracy-by-batch": ("test_accuracy", 100.0),
    "loss-by-batch": ("test_loss", 1.0),
    "memory": ("peak_rss_bytes", 1e-6),
    "time-to-accuracy": ("seconds", 1.0),
    "time-to-loss": ("seconds", 1.0),
    "loss-by-workers": ("test_loss", 1.0),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([training(tmp_path_factory.mktemp("charts") / "training")])


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([servers_and_ring(tmp_path_factory.mktemp("charts") / "served")])


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([language_models(tmp_path_factory.mktemp("charts") / "spoken")])


@pytest.fixture(scope="module")
def charts(trained: Study, served: Study, spoken: Study) -> list[Chart]:
    return draw(trained) + draw(served) + draw(spoken)


def named(charts: list[Chart], name: str) -> list[Chart]:
    found = [chart for chart in charts if chart.name == name]
    assert found, f"{name} is not drawn"
    return found


def layouts(chart: Chart) -> Iterator[dict[str, Any]]:
    yield chart.figure["layout"]
    yield chart.narrow


def axes(layout: dict[str, Any], which: str) -> dict[str, dict[str, Any]]:
    return {name: axis for name, axis in layout.items() if name.startswith(f"{which}axis")}


def measured(chart: Chart) -> list[dict[str, Any]]:
    """Without the ideal, the laws, and other strategies' levels."""
    return [trace for trace in chart.figure["data"]
            if trace.get("mode") != "lines" or "hovertemplate" in trace]  # fmt: skip


def test_a_language_model_has_charts_of_its_loss_and_none_of_an_accuracy(trained: Study, spoken: Study) -> None:
    names, others = ({chart.name for chart in draw(study)} for study in (spoken, trained))
    by_accuracy = {"accuracy-by-workers", "accuracy-by-batch", "time-to-accuracy"}
    by_loss = {"loss-by-workers", "time-to-loss"}
    assert by_accuracy <= others
    assert by_loss <= names
    assert not by_accuracy & names
    assert not by_loss & others
    assert {"loss-by-batch", "learning-time", "learning-samples"} <= names & others
    curves = next(chart for chart in draw(spoken) if chart.name == "learning-time")
    titles = {axis["title"]["text"] for axis in axes(curves.narrow, "y").values()}
    assert titles == {"validation loss", "training loss"}
    assert curves.caption.startswith("Loss (validation) at the end of each epoch")
    assert all(row["train_accuracy"] is None for row in curves.rows)
    said = [text for trace in measured(curves) for text in trace.get("hovertext", [])]
    assert any("perplexity" in text for text in said)


def test_every_chart_of_the_table_is_drawn_by_one_of_three_experiments(charts: list[Chart]) -> None:
    assert {chart.name for chart in charts} == set(CHARTS) == set(DRAWN_BY)


@pytest.mark.parametrize("name", CHARTS)
def test_plotly_accepts_it_at_both_widths(charts: list[Chart], name: str) -> None:
    for chart in named(charts, name):
        for layout in layouts(chart):
            figure = go.Figure({"data": chart.figure["data"], "layout": layout})  # raises for what it does not know
            assert len(figure.data) == len(chart.figure["data"]) > 0
        assert json.dumps([chart.figure, chart.narrow, chart.rows], allow_nan=False)  # raises for nan, as browsers do


@pytest.mark.parametrize("name", CHARTS)
def test_axes_say_their_units_and_nothing_is_cut(charts: list[Chart], name: str) -> None:
    for chart in named(charts, name):
        for layout in layouts(chart):
            assert "title" not in layout, "the page has the title"
            assert layout["height"] > 200
            assert layout["legend"]["y"] < 0, "legends are below"
            for axis in [*axes(layout, "x").values(), *axes(layout, "y").values()]:
                assert axis["automargin"]
        for axis in axes(chart.narrow, "x").values():
            assert any(unit in axis["title"]["text"] for unit in UNITS), axis["title"]
        for axis in axes(chart.narrow, "y").values():
            named_by_bars = axis.get("type") == "category"
            assert named_by_bars or any(unit in axis["title"]["text"] for unit in UNITS), axis["title"]


@pytest.mark.parametrize("name", CHARTS)
def test_hover_speaks_and_series_are_short(charts: list[Chart], name: str) -> None:
    for chart in named(charts, name):
        assert chart.rows
        assert chart.caption.endswith(".")
        for trace in chart.figure["data"]:
            texts = trace.get("hovertext") or [trace["hovertemplate"]]
            assert len(trace["x"]) <= 400
            assert all(len(text) > 10 for text in texts)
            assert len(texts) in (1, len(trace["x"]))


@pytest.mark.parametrize("name", DRAWN_COLUMNS)
def test_what_is_drawn_are_the_rows(charts: list[Chart], name: str) -> None:
    column, factor = DRAWN_COLUMNS[name]
    for chart in named(charts, name):
        sideways = name.startswith("time-to-")
        drawn = {round(y, 6) for trace in measured(chart) for y in trace["x" if sideways else "y"]}
        rows = {round(factor * (row[column] or 0), 6) for row in chart.rows}
        assert drawn == rows


@pytest.mark.parametrize("name", ["breakdown", "breakdown-by-rank"])
def test_parts_of_a_step_are_the_step(charts: list[Chart], name: str) -> None:
    """Every bar is a row's step, and every row has a bar; what is less than a thousandth of a step is not drawn."""
    for chart in named(charts, name):
        [unit] = {axis["title"]["text"].rpartition(", ")[2] for axis in axes(chart.narrow, "y").values()}
        for row in chart.rows:
            parts = [value for key, value in row.items() if key.endswith("_seconds") and key != "step_seconds"]
            assert sum(parts) == pytest.approx(row["step_seconds"])
        drawn, wanted = heights(chart), [{"s": 1, "ms": 1000}[unit] * row["step_seconds"] for row in chart.rows]
        assert drawn
        assert all(any(height == pytest.approx(each, rel=0.01) for each in wanted) for height in drawn)
        assert all(any(height == pytest.approx(each, rel=0.01) for height in drawn) for each in wanted)


def test_compute_without_a_core_is_drawn_apart(tmp_path: Path) -> None:
    write_run(tmp_path / "shared", [0.1] * 50, workers=2, cores=1, queued=0.5)
    for chart in draw(read_study([tmp_path])):
        if chart.name.startswith("breakdown"):
            drawn = {trace["name"]: trace for trace in chart.figure["data"]}
            assert drawn["compute: waiting for a core"]["y"] == pytest.approx(drawn["compute"]["y"])
            assert "of 70.0 ms of compute, 35.0 ms were CPU time" in " ".join(
                drawn["compute"]["hovertext"][0].split("<br>")
            )
            assert {round(row["core_seconds"], 6) for row in chart.rows} == {0.035}
            assert "Waiting for a core: " in chart.caption


def heights(chart: Chart) -> list[float]:
    """Of the bars, each with all that is stacked in it."""
    found: dict[tuple[Any, ...], float] = {}
    menu = chart.figure["layout"].get("updatemenus")
    pages = [button["args"][0]["visible"] for button in menu[0]["buttons"]] if menu else [[True] * 10_000]
    for page, shown in enumerate(pages):
        for trace, seen in zip(chart.figure["data"], shown, strict=False):
            for x, y in zip(trace["x"], trace["y"], strict=True) if seen else ():
                found[page, trace["xaxis"], x] = found.get((page, trace["xaxis"], x), 0.0) + y
    return list(found.values())


@pytest.mark.parametrize("name", CHARTS)
def test_lines_of_a_panel_are_few_and_each_looks_its_own_way(charts: list[Chart], name: str) -> None:
    for chart in named(charts, name):
        panels: dict[tuple[str, bool], list[dict[str, Any]]] = {}
        for trace in chart.figure["data"]:
            if trace.get("mode") == "lines+markers":
                panels.setdefault((trace["xaxis"], trace["visible"]), []).append(trace)
        for (_, visible), traces in panels.items():
            if visible:
                assert len(traces) <= MOST_LINES
                seen = [(t["line"]["color"], t["line"]["dash"], _shape(t)) for t in traces]
                assert len(set(seen)) == len(seen)
                greys = [(t["line"]["dash"], _shape(t)) for t in traces]
                assert len(set(greys)) == len(greys), "in print without colours they look the same"


def _shape(trace: dict[str, Any]) -> str:
    """Of its markers; those of runs that are not ranked are open."""
    symbols = trace["marker"]["symbol"]
    return (symbols if isinstance(symbols, str) else symbols[0]).removesuffix("-open")


def scaled_by_three(folder: Path, others: float) -> Study:
    """Rings and gathers of 1, 2 and 4 workers by Gustafson's law, where other programs use so many of 4 cores."""
    for n in (1, 2, 4):
        for strategy, serial in (("ring", 0.3), ("gather", 0.1)):
            seconds = steady(0.1 * n / (n - serial * (n - 1)), seed=n)
            write_run(folder / f"{strategy}{n}", seconds, workers=n, strategy=strategy if n > 1 else "sequential",
                      cores=4, others=others)  # fmt: skip
    return read_study([folder])


def test_charts_of_a_busy_machine_rank_nothing(tmp_path: Path) -> None:
    quiet, busy = scaled_by_three(tmp_path / "quiet", 0.0), scaled_by_three(tmp_path / "busy", 2.0)
    for name in ("weak", "speedup-by-model", "throughput", "breakdown"):
        idle, [chart] = named(draw(quiet), name)[0], named(draw(busy), name)
        assert "disturbed" not in idle.caption
        assert "runs were disturbed by other programs: do not compare their times." in chart.caption
        assert "law" not in chart.caption
        assert not any(trace["name"].endswith(": fit") for trace in chart.figure["data"])
        assert all(row["disturbed_runs"] for row in chart.rows)
        for drawn, is_open in ((idle, False), (chart, True)):
            points = [trace["marker"]["symbol"] for trace in drawn.figure["data"] if trace.get("error_y")]
            assert points or name == "breakdown"
            assert all(symbol.endswith("-open") == is_open for symbol in points)
    [weak] = named(draw(quiet), "weak")
    assert "Gustafson's law (dotted): gather 9.8 %; ring 29.8 %" in weak.caption


def test_a_menu_shows_each_trace_on_one_of_its_pages(charts: list[Chart]) -> None:
    menus = 0
    for chart in charts:
        for layout in layouts(chart):
            for menu in layout.get("updatemenus", []):
                menus += 1
                pages = [button["args"][0]["visible"] for button in menu["buttons"]]
                assert pages[0] == [trace["visible"] for trace in chart.figure["data"]]
                assert all(sum(column) == 1 for column in zip(*pages, strict=True))
                for button in menu["buttons"]:
                    known = {name.partition(".")[0] for name in button["args"][1]} - {"annotations"}
                    assert known <= set(layout)
    assert menus >= 4


def test_on_a_phone_panels_are_below_each_other(charts: list[Chart]) -> None:
    for chart in charts:
        assert all(axis["domain"] == [0, 1] for axis in axes(chart.narrow, "x").values())
        heights = sorted(axis["domain"] for axis in axes(chart.narrow, "y").values())
        assert all(lower[1] < upper[0] for lower, upper in pairwise(heights))


def test_a_strategy_has_one_colour_in_all_charts(charts: list[Chart], served: Study) -> None:
    colours = {
        trace["line"]["color"]
        for chart in draw(served)
        if chart.name in ("weak", "throughput", "traffic")
        for trace in chart.figure["data"]
        if trace["name"].startswith("ring")
    }
    assert len(colours) == 1


def test_emulated_runs_are_said_to_be(served: Study, trained: Study) -> None:
    assert all("Emulated compute (k80" in chart.caption for chart in draw(served))
    assert not any("mulated" in chart.caption for chart in draw(trained))


def test_no_rank_has_the_colour_of_its_node(trained: Study) -> None:
    [chart] = [each for each in draw(trained) if each.name == "utilisation"]
    lines = [trace for trace in chart.figure["data"] if trace["name"] in ("rank 0", "rank 1", "n1 (worker)")]
    colours = {(trace["name"], trace["line"]["color"]) for trace in lines}
    assert len({colour for _, colour in colours}) == len(colours) == 3


def test_a_single_setting_is_beside_the_line_of_one_process(tmp_path: Path) -> None:
    for n in (1, 2):
        write_run(tmp_path / f"{n}", steady(0.1, 60, seed=n), workers=n, cores=2, threads=2 // n)
    chart = DRAWN_BY["worth"](read_study([tmp_path]))
    assert chart
    for layout in layouts(chart):
        [line] = layout["shapes"]
        assert (line["x0"], line["x1"], line["y0"], line["y1"], line["yref"]) == (1, 1, 0, 1, "paper")


def test_no_name_becomes_a_tag(charts: list[Chart]) -> None:
    """One of the models is called like one."""
    for chart in charts:
        text = json.dumps([chart.figure, chart.narrow])
        assert "</script>" not in text
        assert '<b>\\"' not in text


def test_the_experiment_says_which_charts_and_in_which_order(trained: Study) -> None:
    assert trained.bench
    asked = replace(trained, bench=replace(trained.bench, draw=("nodes", "servers", "pie", "strong")))
    assert [chart.name for chart in draw(asked)] == ["worth", "nodes", "strong"], "there are no servers in it"


def test_the_picture_of_the_verdict_is_drawn_also_where_the_experiment_asks_for_others(
    tmp_path: Path, trained: Study
) -> None:
    """On a busy machine it is the one that shows who used the cores."""
    busy = scaled_by_three(tmp_path, 2.0)
    assert trained.bench
    asked = replace(busy, bench=replace(trained.bench, draw=("weak",)))
    assert busy.headline.chart == "utilisation"
    assert [chart.name for chart in draw(asked)] == ["utilisation", "weak"]


def test_of_nothing_nothing_is_drawn(trained: Study) -> None:
    nothing = replace(trained, bench=None, groups=(), strong=(), weak=())
    assert draw(nothing) == []


def test_repeats_of_which_one_knows_no_accuracy_have_no_curve(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steady(0.1), train_accuracy=[0.5])
    write_run(tmp_path / "b", steady(0.1), seed=1, train_accuracy=[])
    [curves] = [chart for chart in draw(read_study([tmp_path])) if chart.name == "learning-time"]
    assert curves.figure["data"][0]["x"] == []


def test_a_run_alone_has_its_own_charts(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steady(0.1, 40))
    assert {chart.name for chart in draw(read_study([tmp_path]))} == {"breakdown", "utilisation"}


def scaling_study(folder: Path, serial: float, *, strategy: str = "ring") -> Study:
    """A global batch of 64, of whose work a part is not divided."""
    for n in (1, 2, 4, 8):
        steps = steady(0.1 * (serial + (1 - serial) / n), 60, seed=n)
        write_run(folder / f"{strategy}-{n}", steps, workers=n, batch=64 // n, strategy=strategy if n > 1 else None)
    return read_study([folder])


def test_strong_scaling_says_the_serial_part_and_draws_its_law(tmp_path: Path) -> None:
    chart = DRAWN_BY["strong"](scaling_study(tmp_path, 0.2))
    assert chart
    assert "Amdahl's law (dotted): ring " in chart.caption
    assert float(chart.caption.partition("ring ")[2].partition(" %")[0]) == pytest.approx(20, abs=2)
    [law] = [trace for trace in chart.figure["data"] if trace["line"].get("dash") == "dot"]
    assert law["y"][0] == pytest.approx(1)
    assert law["y"][-1] == pytest.approx(1 / (0.2 + 0.8 / 8), rel=0.1)
    [ideal] = [trace for trace in chart.figure["data"] if trace["name"] == "ideal"]
    assert (ideal["x"], ideal["y"]) == ([1, 8], [1, 8])
    [line] = measured(chart)
    assert line["x"] == [1, 2, 4, 8]
    assert line["y"][0] == 1.0
    assert all(high >= 0 and low >= 0 for high, low in zip(line["error_y"]["array"], line["error_y"]["arrayminus"],
                                                          strict=True))  # fmt: skip


def test_a_law_that_does_not_fit_is_not_drawn(tmp_path: Path) -> None:
    """Two workers are slower than one, and more of them ever faster: no fixed part of the work does that."""
    for n, seconds in {1: 0.1, 2: 0.4, 4: 0.1, 8: 0.03}.items():
        write_run(tmp_path / f"{n}", steady(seconds, 60, seed=n), workers=n, batch=64 // n)
    chart = DRAWN_BY["strong"](read_study([tmp_path]))
    assert chart
    assert "fits none of these" in chart.caption
    assert not [trace for trace in chart.figure["data"] if trace["line"].get("dash") == "dot"]


def test_weak_scaling_of_one_model_also_shows_the_whole_step(tmp_path: Path) -> None:
    for n in (1, 2, 4):
        write_run(tmp_path / f"{n}", steady(0.1 * n / (n - 0.1 * (n - 1)), 60, seed=n), workers=n)
    chart = DRAWN_BY["weak"](read_study([tmp_path]))
    assert chart
    assert [axis["title"]["text"] for axis in axes(chart.narrow, "y").values()] == [
        "efficiency, % of ideal",
        "time of a step, ms",
    ]
    efficiency, step = measured(chart)
    assert efficiency["y"][-1] == pytest.approx(100 * (4 - 0.1 * 3) / 4, rel=0.05)
    assert step["y"][0] == pytest.approx(100, rel=0.05)


def test_the_same_workers_on_more_nodes_are_beside_each_other(trained: Study) -> None:
    chart = DRAWN_BY["nodes"](trained)
    assert chart
    bars = {trace["name"]: trace for trace in chart.figure["data"]}
    assert set(bars) == {"1 node", "2 nodes"}
    assert "4" in bars["1 node"]["x"]
    assert "4" in bars["2 nodes"]["x"]
    assert all(trace["marker"]["color"] in COLOURS for trace in bars.values())


def test_one_setting_far_from_the_baseline_is_a_point_and_no_line(tmp_path: Path) -> None:
    """Two servers were run with six workers only: nobody knows what is between."""
    for workers, servers in ((1, 0), (2, 1), (4, 1), (6, 1), (6, 2)):
        strategy = "ps-sync" if servers else "sequential"
        write(tmp_path / f"{workers}-{servers}", MadeUp(strategy=strategy, workers=workers, servers=servers, steps=12))
    chart = DRAWN_BY["throughput"](read_study([tmp_path]))
    assert chart
    assert {trace["name"]: trace["x"] for trace in chart.figure["data"]} == {
        "1 server": [1, 2, 4, 6],
        "2 servers": [6],
    }


def batches(folder: Path, learned: dict[int, float]) -> Study:
    for batch, accuracy in learned.items():
        write_run(folder / f"{batch}", steady(0.1, 20), batch=batch, test_accuracy=accuracy, test_loss=0.1)
    return read_study([folder])


def test_batch_sizes_are_the_ticks(tmp_path: Path) -> None:
    chart = DRAWN_BY["accuracy-by-batch"](batches(tmp_path, {32: 0.98, 2048: 0.90}))
    assert chart
    [x] = axes(chart.narrow, "x").values()
    assert (x["type"], x["tickvals"], x["ticktext"]) == ("log", [32, 2048], ["32", "2,048"])


def test_an_axis_of_accuracies_does_not_make_much_of_nothing(tmp_path: Path) -> None:
    chart = DRAWN_BY["accuracy-by-batch"](batches(tmp_path, {32: 0.98, 64: 0.9801}))
    assert chart
    [y] = axes(chart.narrow, "y").values()
    assert y["range"][0] == pytest.approx(97.0, abs=0.1)
    assert y["range"][1] == pytest.approx(99.0, abs=0.1)


def test_a_long_error_bar_does_not_make_all_else_small(tmp_path: Path) -> None:
    """Two repeats, one of which took twice as long: the truth may be anywhere."""
    for seed, factor in enumerate((1.0, 2.0)):
        for workers in (1, 2):
            write_run(tmp_path / f"{seed}-{workers}", steady(0.1 * factor, 60), workers=workers, seed=seed)
    chart = DRAWN_BY["throughput"](read_study([tmp_path]))
    assert chart
    [trace] = chart.figure["data"]
    assert max(trace["error_y"]["array"]) > 10 * max(trace["y"])
    assert chart.narrow["yaxis"]["range"][1] == pytest.approx(1.6 * max(trace["y"]))
    assert "Error bars that reach the upper edge are cut off" in chart.caption


def test_many_lines_are_in_several_panels(tmp_path: Path) -> None:
    for batch in (16, 32, 64, 128, 256, 512):
        for strategy, workers in (("sequential", 1), ("ring", 2), ("gather", 2), ("allreduce", 2)):
            write(tmp_path / f"{strategy}-{batch}", MadeUp(strategy=strategy, workers=workers, batch=batch, steps=12))
    chart = DRAWN_BY["throughput"](read_study([tmp_path]))
    assert chart
    panels = [trace["xaxis"] for trace in chart.figure["data"]]
    assert len(set(panels)) == 6
    assert max(panels.count(each) for each in panels) <= MOST_LINES

"""Studies with links of several speeds, rings with and without overlap, and batch sizes of runs of any length."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run
from made_up_experiments import SHORT_EVIL, servers_and_ring, sizes_cut_short

from paceline.analysis.lines import all_lines
from paceline.analysis.study import Study, read_study
from paceline.analysis.traffic import moved
from paceline.report.draw import DRAWN_BY, draw
from paceline.report.figure import Chart
from paceline.report.page import page

MODELS = (SHORT_EVIL, "resnet50")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([servers_and_ring(tmp_path_factory.mktemp("links") / "served")])


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([sizes_cut_short(tmp_path_factory.mktemp("links") / "sized")])


def drawn(study: Study, name: str) -> Chart:
    found = DRAWN_BY[name](study)
    assert found
    return found


def titles(chart: Chart) -> list[str]:
    texts = [each["text"] for each in chart.figure["layout"]["annotations"]]
    return [text.removeprefix("<b>").removesuffix("</b>").replace("<br>", " ") for text in texts]


@pytest.mark.parametrize(
    "name", ["speedup-by-model", "weak", "throughput", "traffic", "breakdown", "utilisation", "packets"]
)
def test_no_line_is_lost_among_links_and_overlaps(served: Study, name: str) -> None:
    """One server and a ring, at both speeds of links, and the ring that waits for backward: of both models."""
    chart = drawn(served, name)
    found = {(row["model"], row["shrink"], row["strategy"], row.get("overlap")) for row in chart.rows
             if row["servers"] < 2 and row["strategy"] != "sequential"}  # fmt: skip
    kinds = [(32, "ring", "on"), (32, "ring", "off"), (32, "ps-sync", None), (256, "ring", "on"),
             (256, "ps-sync", None)]  # fmt: skip
    assert found == {(model, *kind) for model in MODELS for kind in kinds}
    text = json.dumps([chart.figure, chart.caption])
    assert "links as of 2 Gbit/s" in text
    assert "links as of 16 Gbit/s" in text
    assert "overlap off" in text
    assert "shrink" not in text


def test_speedups_of_other_links_are_in_other_panels(served: Study) -> None:
    assert titles(drawn(served, "speedup-by-model")) == [
        "ps-sync, links as of 2 Gbit/s",
        "ring, overlap off, links as of 2 Gbit/s",
        "ring, overlap on, links as of 2 Gbit/s",
        "ps-sync, links as of 16 Gbit/s",
        "ring, overlap on, links as of 16 Gbit/s",
    ]
    assert len(titles(drawn(served, "weak"))) == 4, "two models, links of two speeds"


def test_a_chart_of_servers_sets_the_ring_of_the_same_links_beside_them(served: Study) -> None:
    chart = drawn(served, "servers")
    assert {row["servers"] for row in chart.rows} == {1, 2, 3}
    assert {row["workers"] for row in chart.rows} == {6}
    assert {row["shrink"] for row in chart.rows} == {32}, "with the faster links there is one server only"
    rings = {(point.group.first.summary.model, point.group.first.summary.shrink, point.group.setting.get("overlap")):
             point.speedup.value for curve in served.weak for point in curve.points
             if point.workers == 6 and point.group.strategy == "ring"}  # fmt: skip
    assert len(rings) == 6
    for called, overlap in (("ring, overlap on, no server", "on"), ("ring, overlap off, no server", "off")):
        levels = [trace["y"] for trace in chart.figure["data"] if trace["name"] == called]
        assert sorted(levels) == sorted([rings[model, 32, overlap]] * 2 for model in MODELS)


def test_at_the_server_traffic_grows_and_at_workers_it_does_not(served: Study) -> None:
    rows = [row for row in drawn(served, "traffic").rows
            if (row["model"], row["servers"], row["shrink"]) == ("resnet50", 1, 32)]  # fmt: skip
    at = {role: [row["bytes_per_update"] for row in rows if row["role"] == role] for role in ("server", "worker")}
    assert at["server"][-1] > 4 * at["server"][0]
    assert at["worker"][-1] == pytest.approx(at["worker"][0], rel=0.2)


def test_the_chart_of_traffic_has_the_numbers_of_the_claims(served: Study) -> None:
    """The busiest server's; of a ring a node's, on the mean."""
    rows, compared = drawn(served, "traffic").rows, 0
    for line in all_lines(served.groups):
        found, first = moved(line), line.first.first
        if isinstance(found, str):
            continue
        for workers, value in found.bytes.items():
            same = [row["bytes_per_update"] for row in rows
                    if (row["model"], row["strategy"], row["servers"]) == (line.model, line.strategy, line.servers)
                    and (row["role"], row["workers"]) == ("server" if line.servers else "worker", workers)
                    and row["shrink"] == first.summary.shrink
                    and row.get("overlap") == (first.spec["overlap"] if line.strategy == "ring" else None)]  # fmt: skip
            assert same == [pytest.approx(value)]
            compared += 1
    assert compared >= 20


def test_the_claims_of_the_experiment_s_file_are_judged(served: Study) -> None:
    """They go from the file through bench.json into the report."""
    found = {claim.name: claim.verdict for claim in served.claims}
    assert found.keys() == {"server-levels-off", "ring-proportional", "server-traffic-grows", "ring-traffic-constant",
                            "ring-beats-server", "several-servers-win"}  # fmt: skip
    assert found["ring-beats-server"] in ("supported", "supported in part")
    html = page(served, [], "")
    assert html.count('<div class="claim">') == len(served.claims)
    assert '<span class="verdict supported' in html


def test_times_of_sizes_are_one_line_however_long_they_ran(sized: Study) -> None:
    """One network trained whole epochs, the other was stopped after 80, 20 and 8 steps."""
    chart = drawn(sized, "time-by-batch")
    lines = [trace["x"] for trace in chart.figure["data"]]
    assert sorted(lines) == [[16, 64, 160], [32, 256, 2048], [32, 2048]]
    layout = chart.narrow
    assert {layout[name]["title"]["text"] for name in ("yaxis", "yaxis2")} == {
        "time of an epoch, s",
        "time of 1,000 samples, s",
    }
    short = [row for row in chart.rows if row["model"] == "resnet18"]
    assert [row["seconds_per_1000_samples"] for row in short] == pytest.approx([22] * 3, rel=0.1)
    assert not any("epoch_seconds" in row for row in short)


def test_charts_of_times_have_all_sizes_and_charts_of_learning_what_learned(sized: Study) -> None:
    charts = {chart.name: {row.get("model") for row in chart.rows} for chart in draw(sized)}
    assert charts["breakdown"] == charts["memory"] == {"shallow-cnn", "resnet18"}
    assert charts["accuracy-by-batch"] == charts["learning-time"] == {"shallow-cnn"}


@pytest.mark.parametrize("spec", [{"image_size": 64}, {"hidden": [32]}, {"dtype": "float64"}])
def test_what_is_another_problem_is_in_another_panel(tmp_path: Path, spec: dict[str, Any]) -> None:
    """Also where a batch size would tell them apart."""
    given: list[tuple[dict[str, Any], int]] = [({}, 32), (spec, 64)]
    for number, (each, batch) in enumerate(given):
        for workers in (1, 2):
            write_run(tmp_path / f"{number}-{workers}", steady(0.1, 20), workers=workers, batch=batch, spec=each)
    chart = drawn(read_study([tmp_path]), "throughput")
    assert len({trace["xaxis"] for trace in chart.figure["data"]}) == 2


def test_devices_of_another_pace_are_another_problem(tmp_path: Path) -> None:
    for pace in (1.0, 8.0):
        lab = {"nodes": [{"name": "n1", "up": 1e9, "down": 1e9, "cpu": None, "speed": pace, "rack": 0}]}
        for workers in (1, 2):
            write_run(tmp_path / f"{pace}-{workers}", steady(0.1, 20), workers=workers, lab=lab)
    chart = drawn(read_study([tmp_path]), "throughput")
    assert titles(chart) == ["mlp", "devices 8 times as fast"]

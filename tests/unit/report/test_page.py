"""The page: nothing in it can run but its own, nothing is fetched, and its tables have the numbers of the runs."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from made_up import steady, write_run
from made_up_experiments import EVIL, MadeUp, servers_and_ring, sizes_cut_short, training, write
from page_parser import Scripts

from paceline.analysis import headline
from paceline.analysis.checks import RunWarning
from paceline.analysis.findings import Finding
from paceline.analysis.headline import Headline
from paceline.analysis.statistics import Interval
from paceline.analysis.study import Study, read_study
from paceline.analysis.verdicts import Case, Claim
from paceline.report import sections, tables
from paceline.report.cells import number, within
from paceline.report.draw import draw
from paceline.report.figure import Chart
from paceline.report.page import page
from paceline.report.plotly_js import SHA256, TRACES, VERSION, plotly_js

PLOTLY = "var Plotly = {};"


def chart_of(text: str) -> Chart:
    figure = {"data": [{"type": "scatter", "x": [1, 2], "y": [1.0, float("nan")], "name": text}], "layout": {}}
    rows = [{f"name {text}": text, "n": 2}]
    return Chart("strong", f"Title {text}", f"Caption {text}", figure, rows, {"height": 300})


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([training(tmp_path_factory.mktemp("made-up") / "training")])


@pytest.fixture(scope="module")
def scaled(tmp_path_factory: pytest.TempPathFactory) -> Study:
    folder = tmp_path_factory.mktemp("scaled")
    for i in range(3):
        learned = {"test_accuracy": 0.9 + i / 100, "peak_rss_bytes": [5 * 10**8]}
        write_run(folder / f"one-{i}", steady(0.1, seed=i), seed=i, **learned)  # type: ignore[arg-type]
        write_run(folder / f"two-{i}", steady(0.11, seed=9 + i), seed=i, workers=2, read_seconds=0.5)
    return read_study([folder])


def test_what_runs_are_called_never_becomes_html(study: Study) -> None:
    assert study.bench
    evil = replace(
        study,
        bench=replace(study.bench, title=EVIL, about=EVIL, source=EVIL, limits=(EVIL,), left_out=(EVIL,)),
        findings=(Finding("ran", EVIL), Finding("best", EVIL, ((EVIL,), (EVIL,))), Finding(EVIL, f"`{EVIL}`")),
        warnings=(RunWarning(EVIL, EVIL, EVIL), *(RunWarning("sum", EVIL, text) for text in (EVIL, EVIL, "other"))),
        claims=(Claim("c", EVIL, EVIL, "supported", EVIL, (Case(EVIL, EVIL, None, EVIL),)),),
        headline=Headline(EVIL, (EVIL,), (headline.Case(EVIL, EVIL, EVIL, 1, EVIL, None, None),) * 2, "strong"),
    )
    seen = Scripts(page(evil, [chart_of(EVIL)], PLOTLY))
    assert [kind for kind, _ in seen.scripts] == ["application/json", "javascript", "javascript"]
    assert not [tag for tag, _ in seen.tags if tag in ("img", "iframe", "object", "embed")]
    assert not [name for _, attributes in seen.tags for name in attributes if name.startswith("on")]
    assert seen.text.count("onerror=") >= 30  # it is all there, to be read


def test_only_our_own_style_and_scripts_are_not_escaped() -> None:
    templates = [each for each in files("paceline.report").joinpath("templates").iterdir() if each.is_file()]
    marked = [
        (each.name, name) for each in templates for name in re.findall(r"(\w+) *\| *safe", each.read_text("utf-8"))
    ]
    assert marked == [("page.html", "style"), ("page.html", "script")]
    assert not [each.name for each in templates if "autoescape" in each.read_text("utf-8")]


def test_the_figures_arrive_as_they_were(study: Study) -> None:
    [(_, data), *_] = Scripts(page(study, [chart_of(EVIL)], PLOTLY)).scripts
    figure = json.loads(data)
    assert figure["data"][0]["name"] == EVIL
    assert figure["data"][0]["y"] == [1.0, None]
    assert figure["narrow"] == {"height": 300}


def test_only_the_two_scripts_may_run_and_nothing_is_fetched(study: Study) -> None:
    seen = Scripts(page(study, [chart_of("a")], PLOTLY))
    [policy] = [str(a["content"]) for tag, a in seen.tags if tag == "meta" and "http-equiv" in a]
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for _, text in seen.scripts[-2:]]
    assert re.findall(r"'sha256-([^']+)'", policy) == digests
    assert policy.startswith("default-src 'none'; ")
    assert "http" not in policy
    addresses = [str(a.get(name)) for _, a in seen.tags for name in ("src", "href") if name in a]
    assert not [each for each in addresses if not each.startswith(("#", "data:"))]


def test_the_library_that_draws_is_the_small_bundle_as_published(study: Study) -> None:
    """The full bundle made every report 5 MB."""
    text = plotly_js()
    assert hashlib.sha256(text.encode()).hexdigest() == SHA256
    assert f"plotly.js (basic - minified) v{VERSION}" in text[:200]
    assert "Licensed under the MIT license" in text[:300]
    charts = draw(study)
    assert {trace["type"] for chart in charts for trace in chart.figure["data"]} <= set(TRACES)
    assert len(page(study, [], text)) < 1_500_000


def test_parts_come_in_their_order_and_the_contents_lead_to_them(study: Study) -> None:
    seen = Scripts(page(study, [chart_of("a")], PLOTLY))
    ids = [a["id"] for tag, a in seen.tags if tag == "section"]
    assert ids == ["verdict", "summary", "warnings", "limits", "charts", "results", "paper", "missing", "method"]
    links = [str(a["href"])[1:] for tag, a in seen.tags if tag == "a"]
    assert set(links) == {*ids, "chart-strong"}
    assert {a.get("id") for _, a in seen.tags} >= set(links)


def test_a_single_classifier_shows_what_each_class_was_taken_for(tmp_path: Path) -> None:
    confusion = [[8, 2, 0], [0, 9, 1], [0, 0, 0]]  # no sample is of the last class
    write_run(tmp_path / "a", steady(0.1), confusion=confusion, test_accuracy=0.85)
    study = read_study([tmp_path])
    made = tables.classes_table(study)
    assert made is not None
    assert made.headers == ("class", "samples", "correct", "most often taken for", "0", "1", "2")
    texts = [[each.text for each in row] for row in made.rows]
    assert texts[0] == ["0", "10", "80.00 %", "1 (2)", "8", "2", ""]
    assert texts[2] == ["2", "0", "–", "–", "", "", ""]
    assert [each.shade**2 for each in made.rows[1][4:]] == pytest.approx([0, 0.9, 0.1])
    html = page(study, [], PLOTLY)
    assert 'style="--shade: 89%"' in html
    assert "Accuracy by class" in html
    write_run(tmp_path / "b", steady(0.1), confusion=confusion, workers=2)
    assert tables.classes_table(read_study([tmp_path])) is None, "several runs are compared in other ways"


def test_many_classes_are_a_table_without_a_heat_map(tmp_path: Path) -> None:
    size = tables.MOST_CLASSES + 1
    write_run(tmp_path / "a", steady(0.1), confusion=[[int(i == j) for j in range(size)] for i in range(size)])
    made = tables.classes_table(read_study([tmp_path]))
    assert made is not None
    assert (len(made.headers), len(made.rows), made.note) == (4, size, "")


def test_a_confusion_that_is_not_square_is_damaged(tmp_path: Path) -> None:
    write_run(tmp_path / "a", steady(0.1), confusion=[[1, 2], [3]])
    [left] = read_study([tmp_path]).left_out
    assert "confusion" in left.why


def test_badges_say_what_is_not_the_real_thing(study: Study, tmp_path: Path) -> None:
    assert sections.badges(study) == ("quick form",)
    write(tmp_path / "a", MadeUp(compute="emulated:k80", steps=20))
    assert sections.badges(read_study([tmp_path])) == ("emulated compute: nothing was trained",)
    write_run(tmp_path / "b", steady(0.1), spec={"lr": 1})
    [mixed] = sections.badges(read_study([tmp_path]))
    assert "emulated compute in 1 of 2 runs" in mixed
    assert '<p class="badges"><span class="badge">quick form</span> </p>' in page(study, [], PLOTLY)


def test_without_badges_nothing_is_where_they_would_be(scaled: Study) -> None:
    """The style sheet hides it if it is empty, also of white space."""
    assert '<p class="badges"></p>' in page(scaled, [], PLOTLY)


def test_the_verdict_comes_first_then_its_picture_then_the_rest(study: Study) -> None:
    """Before, a reader scrolled past paragraphs and warnings before the first chart."""
    html = page(study, draw(study), PLOTLY)
    places = [html.index(text) for text in ('class="answer"', 'id="chart-worth"', 'id="summary"', 'id="chart-weak"')]
    assert places == sorted(places)
    assert html.index("<p", html.index("<main>")) == html.index('<p class="answer"')
    assert escape(study.headline.sentence) in html
    assert html.count('id="chart-worth"') == 1


def test_sixty_runs_with_one_doubt_are_one_entry(study: Study) -> None:
    same = [RunWarning("drift", f"run-{i}", "it had not settled") for i in range(60)]
    others = [RunWarning("sum", "a", "one is wrong"), RunWarning("of-tomorrow", "b", "who knows")]
    html = page(replace(study, warnings=(*same, *others)), [], PLOTLY)
    assert html.count('class="warning"') == 3
    assert "60 ×" in html
    assert html.count("it had not settled") == 1
    assert "run-59" in html
    assert "<b>Of tomorrow</b> (b: who knows)." in html


def test_every_doubt_of_the_checks_has_words_here() -> None:
    from paceline.analysis import checks

    kinds = set(re.findall(r'RunWarning\(\s*"([\w-]+)"', Path(checks.__file__).read_text()))
    assert kinds
    assert kinds <= set(sections.WARNINGS)


def test_results_have_the_numbers_of_the_runs(scaled: Study) -> None:
    one, two = tables.results(scaled)
    assert (one["strategy"], one["workers"], one["repeats"]) == ("sequential", 1, 3)
    assert one["update_seconds"] == pytest.approx(0.1, rel=0.02)
    assert one["update_seconds_low"] <= one["update_seconds"] <= one["update_seconds_high"]
    assert one["test_accuracy"] == pytest.approx(0.91)
    assert one["peak_memory_bytes"] == 5 * 10**8
    assert two["samples_per_second"] == pytest.approx(64 / 0.11, rel=0.02)
    assert two["speedup_weak"] == pytest.approx(2 * 0.1 / 0.11, rel=0.03)
    assert one["speedup_weak"] == 1.0
    assert two["speedup_strong"] is None
    assert two["read_seconds"] == 0.5


def test_processor_time_is_beside_wall_time_where_they_differ(tmp_path: Path) -> None:
    """11 s of wall time: two ranks computed 8 s each, and one process all of the time."""
    for n, cpu in ((1, [10.9]), (2, [8.0, 8.0])):
        write_run(tmp_path / f"{n}", [0.1] * 100, workers=n, cores=4, others=0.0, cpu_seconds=cpu)
    study = read_study([tmp_path])
    assert [row["cpu_seconds"] for row in tables.results(study)] == [10.9, 16.0]
    assert [row["preemptions_per_second"] for row in tables.results(study)] == [3.0, 3.0]
    html = page(study, [], PLOTLY)
    assert "<td>11.0</td>" in html
    assert "<td>11.0<small>CPU 16.0</small></td>" in html


def test_speedups_of_runs_that_cannot_be_ranked_are_left_out(tmp_path: Path) -> None:
    for n in (1, 2):
        write_run(tmp_path / f"{n}", steady(0.1, seed=n), workers=n, cores=4, others=2.0 if n == 2 else 0.0)
    study = read_study([tmp_path])
    one, two = tables.results(study)
    assert (one["speedup_weak"], one["speedup_one_process"]) == (1.0, 1.0)
    assert (two["speedup_weak"], two["speedup_one_process"]) == (None, None)
    assert two["disturbed"] == "other processes used 2.0 of 4 cores"
    notes = [row[0].note for row in tables.results_table(study).table.rows]
    assert notes == ["", "disturbed: other processes used 2.0 of 4 cores"]


def test_what_all_settings_share_is_said_once(scaled: Study) -> None:
    found = tables.results_table(scaled)
    assert found.shared.startswith("mlp, mnist-mini")
    assert f"<p>The same in all settings: {found.shared}.</p>" in page(scaled, [], PLOTLY)
    headers = found.table.headers
    assert headers[:4] == ("setting", "samples/s", "speedup over one process", "weak speedup"), (
        "numbers are in sight on a phone"
    )
    assert "strong speedup" not in headers
    assert "test loss" not in headers


def settings(study: Study) -> list[str]:
    return [row[0].text for row in tables.results_table(study).table.rows]


def test_settings_that_differ_in_anything_can_be_told_apart(tmp_path: Path) -> None:
    for i, lr in enumerate((0.1, 0.2)):
        write_run(tmp_path / str(i), steady(0.1, seed=i), spec={"lr": lr})
    assert settings(read_study([tmp_path])) == [
        "sequential, 1 worker, learning rate 0.1",
        "sequential, 1 worker, learning rate 0.2",
    ]


def test_what_only_repeats_the_strategy_is_not_told(tmp_path: Path) -> None:
    write_run(tmp_path / "alone", steady(0.1))
    for i, (workers, encrypt) in enumerate(((2, True), (2, False), (4, True))):
        spec = {"worker_timeout": 25.0, "encrypt": encrypt}
        write_run(tmp_path / str(i), steady(0.1), workers=workers, servers=1, spec=spec)
    study = read_study([tmp_path])
    assert "timeout" not in repr(tables.results_table(study))
    assert "ps-sync, 2 workers, no encryption" in settings(study)


def test_a_papers_row_stands_beside_each_of_ours_that_it_is_about(study: Study) -> None:
    rows = tables.beside_paper(study)
    assert len(rows) == 4
    assert {row["setting"] for row in rows[:3]} == {"2 workers, 1 node"}
    assert "allreduce" in rows[0]["ours"]
    for row in rows[:3]:
        assert row["epoch_seconds_ratio"] == pytest.approx(row["epoch_seconds_ours"] / 82.06)
    assert rows[3]["ours"] == ""
    html = page(study, [], PLOTLY)
    assert "no run of this setting" in html
    assert re.search(r"[−+]\d+\.\d\d\u00a0points", html)
    assert "×\u00a00.0" in html


@pytest.fixture(scope="module")
def sized(tmp_path_factory: pytest.TempPathFactory) -> Study:
    return read_study([sizes_cut_short(tmp_path_factory.mktemp("made-up") / "sized")])


def test_an_epoch_that_was_cut_short_has_no_time(sized: Study) -> None:
    times = {(row["model"], row["epoch_seconds"] is None) for row in tables.results(sized)}
    assert times == {("shallow-cnn", False), ("resnet18", True)}


def test_a_paper_of_other_data_is_told_from_ours_and_only_pace_is_divided(sized: Study) -> None:
    first, *_, last = tables.beside_paper(sized)
    assert first["setting"] == "shallow-cnn, batch 32, mnist, 5 epochs"
    assert first["ours_is_of"] == "mnist-mini, 3 epochs"
    assert first["update_seconds_ratio"] == pytest.approx(first["update_seconds_ours"] / 0.01)
    assert first["epoch_seconds_ours"] > 0
    assert first["epoch_seconds_ratio"] is None
    assert last["ours"] == "", "no run of ours was of that data for so many epochs"
    html = page(sized, [], PLOTLY)
    assert html.count("no run of this setting") == 1
    assert "mnist-mini, 3 epochs</small>" in html


def test_a_study_of_several_machines_says_so_and_shows_all_of_them(study: Study, tmp_path: Path) -> None:
    for cores in (2, 16):
        for workers in (1, 2):
            made = MadeUp(strategy="ring" if workers > 1 else "sequential", workers=workers, cores=cores, steps=12)
            write(tmp_path / f"{cores}-{workers}", made)
    mixed = read_study([tmp_path])
    html = page(mixed, draw(mixed), PLOTLY)
    assert "Several machines or versions" in html
    assert "the machines</th>" in html
    assert "16 and 2" in html
    assert any("2 workers, 16 cores" in setting for setting in settings(mixed))
    [throughput] = [chart for chart in draw(mixed) if chart.name == "throughput"]
    assert [each["text"] for each in throughput.figure["layout"]["annotations"]] == [
        "<b>2 cores</b>",
        "<b>16 cores</b>",
    ]
    assert "the machine</th>" in page(study, [], PLOTLY)


def test_what_smaller_gradients_stand_for_is_said(tmp_path: Path) -> None:
    served = read_study([servers_and_ring(tmp_path / "served")])
    assert {row["links_as_of"] for row in tables.results(served)} == {"2 Gbit/s", "16 Gbit/s"}
    html = page(served, [], PLOTLY)
    assert "devices 8 times as fast; gradients 32 times smaller: links as of 2 Gbit/s; gradients 256 times" in html
    assert "As <code>paceline bench</code> would make it." in html


def test_only_what_is_between_two_backticks_is_code(study: Study) -> None:
    said = replace(study, findings=(Finding("ran", "a `b <c>` d ` e"),))
    assert "<li>a <code>b &lt;c&gt;</code> d ` e</li>" in page(said, [], PLOTLY)


@pytest.mark.parametrize(
    ("wanted", "fits"),
    [
        ({"workers": 2, "strategy": "ring"}, True),
        ({"workers": [2, 4]}, True),
        ({"device": "cpu", "nodes": 1, "model": "mlp", "optimizer": "sgd"}, True),
        ({"data": "mnist-mini", "epochs": 1, "read": "own"}, True),
        ({"data": "mnist"}, False),
        ({"epochs": 5}, False),
        ({"workers": 3}, False),
        ({"no_such_thing": 1}, False),
    ],
)
def test_a_match_asks_summary_spec_and_machine(scaled: Study, wanted: dict[str, object], fits: bool) -> None:
    assert any(tables.matches(one, wanted) for one in scaled.groups) is fits


def test_what_is_missing_is_listed_with_its_reason(study: Study) -> None:
    assert study.bench
    bench = replace(study.bench, runs=(*study.bench.runs, "never"))
    found = dict(tables.missing(replace(study, bench=bench)))
    assert set(found) == {"damaged", "lost", "never"}
    assert found["never"] == "not run yet"
    assert found["lost"].startswith("rank 1 died")


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1234567, "1,234,567"), (1234.5, "1,234"), (0.001234, "0.00123"), (99.87, "99.9"), (-3.14159, "−3.14"),
     (float("nan"), "–"), (None, "–"), (float("inf"), "–")],
)  # fmt: skip
def test_numbers_have_few_digits_and_no_exponent(value: float | None, text: str) -> None:
    assert number(value) == text


def test_an_interval_has_as_many_decimals_as_its_value() -> None:
    cell = within(Interval(0.1234, 0.12, 0.13), 1000)
    assert (cell.text, cell.note) == ("123", "120–130")


def test_a_long_table_is_cut_and_says_so(study: Study) -> None:
    chart = replace(chart_of("a"), rows=[{"n": 1000 + i} for i in range(500)])
    html = page(study, [chart], PLOTLY)
    assert re.findall(r"<td>(1,\d\d\d)</td>", html) == [f"1,{i:03}" for i in range(200)]
    assert "200 of 500 rows" in html


def test_json_in_a_script_cannot_end_it(study: Study) -> None:
    values = {"a": "</script><!--", "b": [float("inf")], "c": np.array([1.5, np.nan]), "d": np.int64(3),
              "e": (np.float64("inf"),)}  # fmt: skip
    html = page(study, [replace(chart_of("a"), figure={"data": [values], "layout": {}})], PLOTLY)
    _, _, rest = html.partition('<script type="application/json" id="data-strong">')
    data, _, _ = rest.partition("</script>")
    assert "<" not in data
    assert json.loads(data)["data"] == [{"a": "</script><!--", "b": [None], "c": [1.5, None], "d": 3, "e": [None]}]

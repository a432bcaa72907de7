"""paceline report: what it writes, what it says, and what it refuses."""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import look
import pytest
from conftest import NO_BROWSER
from made_up import steady, write_run
from made_up_experiments import language_models, training

from paceline.cli.main import main
from paceline.run.folder import check_summary, write_summary


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    for i, workers in enumerate((1, 2, 4)):
        write_run(tmp_path / "runs" / f"r{workers}", steady(0.1, seed=i), workers=workers)
    return tmp_path / "runs"


def test_it_writes_one_page_and_says_where_and_of_what(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "half").mkdir()
    (runs / "half" / "summary.json").write_text('{"status": "comp')
    output = tmp_path / "new" / "folder" / "out.html"
    assert main(["report", str(runs), "-o", str(output)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("Whether distributing is worth it is not known: ring with 4 workers is 4"), (
        "the verdict first"
    )
    assert f"The report is {output}" in said
    assert "3 runs in 3 settings, 1 left out" in said
    assert f"left out: {runs / 'half'}: no summary that can be read" in said
    text = output.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "plotly.js (basic" in text
    assert "1 run with 4 workers, predicted from runs with 1 and 2 workers only: mean error" in text
    assert [path.name for path in output.parent.iterdir()] == ["out.html"]


def test_numbers_are_written_for_each_chart(tmp_path: Path) -> None:
    folder = training(tmp_path / "training")
    assert main(["report", str(folder), "-o", str(tmp_path / "a.html"), "--csv", str(tmp_path / "csv")]) == 0
    names = {path.stem for path in (tmp_path / "csv").iterdir()}
    assert names >= {"results", "paper", "weak", "throughput", "breakdown"}
    with (tmp_path / "csv" / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["strategy"] for row in rows} == {"sequential", "allreduce", "reduce-bcast", "pipeline"}
    assert all(float(row["samples_per_second_low"]) <= float(row["samples_per_second"]) for row in rows)


def test_language_models_are_reported_and_compared_without_an_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, page, tables = language_models(tmp_path / "spoken"), tmp_path / "a.html", tmp_path / "csv"
    assert main(["report", str(folder), "-o", str(page), "--csv", str(tables)]) == 0
    assert "accurac" not in page.read_text().split("<script")[0]
    assert "perplexity" in page.read_text()
    with (tables / "results.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert all(
        float(row["test_perplexity"]) == pytest.approx(math.exp(float(row["test_loss"])), rel=0.01) for row in rows
    )
    assert {row["test_accuracy"] for row in rows} == {""}
    assert all(float(row["tokens_per_second"]) > 100 * float(row["samples_per_second"]) for row in rows)
    assert {"loss-by-workers", "time-to-loss"} <= {path.stem for path in tables.iterdir()}
    one, two = str(folder / "000-sequential-1"), str(folder / "002-ring-2")
    capsys.readouterr()
    assert main(["compare", one, two]) == 0
    assert "The second is significantly faster" in capsys.readouterr().out


@pytest.mark.skipif(look.programs() is None, reason=NO_BROWSER)
def test_charts_become_pictures(runs: Path, tmp_path: Path) -> None:
    vector, points = tmp_path / "svg", tmp_path / "png"
    assert main(["report", str(runs), "-o", str(tmp_path / "a.html"), "--svg", str(vector), "--png", str(points)]) == 0
    weak = (vector / "weak.svg").read_text()
    assert weak.startswith("<svg")
    assert "Weak scaling" in weak
    assert (points / "weak.png").read_bytes().startswith(b"\x89PNG")
    assert {path.stem for path in vector.iterdir()} == {path.stem for path in points.iterdir()}


def test_without_a_browser_pictures_are_refused_with_what_to_do(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "nowhere"))
    assert main(["report", str(runs), "-o", str(tmp_path / "a.html"), "--png", str(tmp_path / "png")]) == 2
    assert "apt-get install chromium" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()


def test_a_report_of_nothing_says_so_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs" / "bad", steady(0.1), status="failed", error="rank 1 died")
    (tmp_path / "runs" / "other").mkdir()
    (tmp_path / "runs" / "other" / "summary.json").write_text("[]")
    output = tmp_path / "out" / "a.html"
    assert main(["report", str(tmp_path / "runs"), "-o", str(output)]) == 2
    said = capsys.readouterr().err
    assert "no completed run" in said
    assert f"{tmp_path / 'runs' / 'bad'}: failed: rank 1 died" in said
    assert f"{tmp_path / 'runs' / 'other'}: no summary" in said
    assert not output.parent.exists()


@pytest.mark.parametrize("wrong", ["nowhere", "file"])
def test_what_is_no_folder_is_refused(
    wrong: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(runs), str(tmp_path / wrong), "-o", str(tmp_path / "a.html")]) == 2
    assert f"{tmp_path / wrong} is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()


def test_an_output_that_cannot_be_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main(["report", str(runs), "-o", str(tmp_path)]) == 2
    assert "is a folder: name a file" in capsys.readouterr().err
    assert main(["report", str(runs), "-o", str(tmp_path / "file" / "a.html")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err
    assert main(["report", str(runs), "-o", str(tmp_path / "a.html"), "--csv", str(tmp_path / "file")]) == 2
    assert not (tmp_path / "a.html").exists()


def test_numbers_that_cannot_be_written_are_refused(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "csv" / "results.csv").mkdir(parents=True)
    assert main(["report", str(runs), "-o", str(tmp_path / "a.html"), "--csv", str(tmp_path / "csv")]) == 2
    assert f"cannot write {tmp_path / 'csv' / 'results.csv'}: Is a directory" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()


def test_what_folders_are_called_and_say_cannot_control_the_terminal(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    odd = runs / "odd\x1b[2J\udcff"
    write_run(odd, steady(0.1), status="failed", error="\x1b]0;title\x07")
    assert main(["report", str(runs), "-o", str(tmp_path / "a.html")]) == 0
    assert main(["compare", str(odd), str(runs / "r1")]) == 2
    said = "".join(capsys.readouterr())
    assert said.count(r"odd\x1b[2J\udcff: failed: \x1b]0;title\x07") == 2
    assert all(letter.isprintable() or letter == "\n" for letter in said)
    fastest = check_summary(write_run(runs / "r8", steady(0.05), workers=8))
    write_summary(runs / "r8", replace(fastest, strategy="ri\x1b[2Jng\ud800"))
    assert main(["report", str(runs), "-o", str(tmp_path / "a.html")]) == 0
    assert r"ri\x1b[2Jng\ud800 with 8 workers is" in capsys.readouterr().out
    (runs / "r1").rename(runs / "a\x1b[2J")
    assert main(["compare", str(runs / "a\x1b[2J"), str(runs / "r2")]) == 0
    assert r"a\x1b[2J: " in capsys.readouterr().out

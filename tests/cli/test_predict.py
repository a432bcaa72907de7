"""paceline predict: a table or JSON from run folders; wrong values are refused with what is allowed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_up import steady, write_run

from paceline.cli.main import main
from paceline.predict.limits import CAUSES

SPEC = {"model": "mnist-cnn", "data": "mnist", "overlap": "on"}


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    write_run(tmp_path / "runs" / "one", steady(0.10, 60), spec={"model": "mnist-cnn", "data": "mnist"})
    write_run(tmp_path / "runs" / "two", steady(0.12, 60), workers=2, spec=SPEC)
    return tmp_path / "runs"


def test_a_table_says_that_it_is_predicted_and_what_is_extrapolated(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(runs), "--workers", "1,2,16", "--link", "1gbit", "--strategy", "ring"]) == 0
    first, head, one, two, sixteen = capsys.readouterr().out.splitlines()
    assert first.startswith("Predicted, not measured: mnist-cnn on mnist, links of 1gbit; runs used: 2, workers: 1, 2")
    assert head.split() == ["strategy", "workers", "step", "samples/s", "efficiency", "memory"]
    assert "EXTRAPOLATED" not in one
    assert "EXTRAPOLATED: links that were not measured" in two
    assert "more than 4 times the 2 workers" in sixteen
    assert "limited by compute (0.07 s)" in one


def test_what_was_measured_on_one_machine_can_be_predicted_there(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["predict", str(runs), "--workers", "1,2,4", "--strategy", "ring"]) == 0
    *_, two, four = capsys.readouterr().out.splitlines()
    assert "EXTRAPOLATED" not in two
    assert "EXTRAPOLATED: compute with so many workers on one machine was not measured" in four


def test_a_run_is_scored_beside_its_prediction(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "held", steady(0.125, 60, seed=3), workers=2, spec=SPEC)
    assert main(["predict", str(runs), "--score", str(tmp_path / "held"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["runs"] == 1
    assert said["mean_error"] < 0.1
    assert main(["predict", str(runs), "--score", str(runs / "two")]) == 2
    assert "is a probe, and cannot be scored" in capsys.readouterr().err
    write_run(tmp_path / "other", steady(0.1, 60), spec={"model": "mlp", "data": "mnist"})
    assert main(["predict", str(runs), "--score", str(tmp_path / "other")]) == 2
    assert "of one model and data set" in capsys.readouterr().err


def test_a_device_that_was_not_measured_is_marked(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["predict", str(runs), "--workers", "1,2", "--link", "10gbit", "--strategy", "ring", "--device", "v100"]
    assert main(words) == 0
    first, _, one, two = capsys.readouterr().out.splitlines()
    assert "compute of a v100, by published figures" in first
    how = "EXTRAPOLATED: device v100 was not measured: derived from resnet50's 1075 images/s at 224x224 pixels by FLOPs"
    for line in (one, two):
        assert "memory estimated" in line
        assert how in line


def test_settings_that_a_model_cannot_have_are_left_out_of_all(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(runs), "--workers", "2,64", "--link", "1gbit", "--strategy", "all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("pipeline")] == ["2"]
    assert any(line.startswith("Not predicted: pipeline with 64 workers: 64 stages: the model has") for line in lines)


def test_json_has_every_number_with_its_interval(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(runs), "--workers", "2", "--link", "1gbit", "--strategy", "all", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert not said["emulated"]
    by_name = {each["strategy"]: each for each in said["predictions"]}
    assert {"ring", "allreduce", "gather", "reduce-bcast", "local-sgd", "ps-sync", "ps-async"} <= by_name.keys()
    assert {"pipeline", "tensor"} <= by_name.keys()
    for each in by_name.values():
        for name in ("step_seconds", "samples_per_second", "memory"):
            assert 0 < each[name]["low"] <= each[name]["value"] < each[name]["high"]
        assert each["limit"] in CAUSES
        assert each["limit_seconds"] < each["step_seconds"]["value"]
    assert by_name["ring"]["bytes_sent"] == pytest.approx(690_590 * 4, rel=0.01)


def test_a_page_is_written_beside_the_table(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "prediction.html"
    words = ["predict", str(runs), "--workers", "1,2,16", "--link", "1gbit", "--strategy", "ring", "-o", str(page)]
    assert main(words) == 0
    assert f"The page is {page}" in capsys.readouterr().out
    text = page.read_text()
    assert text.startswith("<!DOCTYPE html>")
    assert "ring with 16 workers on links of 1gbit is predicted to be" in text
    assert "more than 4 times the 2 workers of the probes" in text
    assert "plotly.js (basic" in text


def test_an_output_that_cannot_be_is_refused(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    words = ["predict", str(runs), "--workers", "1", "--strategy", "sequential", "-o"]
    assert main([*words, str(tmp_path)]) == 2
    assert f"-o {tmp_path} is a folder: name a file, such as {tmp_path / 'prediction.html'}" in capsys.readouterr().err
    assert main([*words, str(tmp_path / "file" / "a.html")]) == 2
    assert "cannot make the folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workers", "two"], "--workers two: give whole numbers with commas"),
        (["--workers", "0,2"], "give numbers from 1 to 10,240"),
        (["--workers", "20000"], "give numbers from 1 to 10,240"),
        (["--workers", "2", "--link", "0mbit"], "--link is '0mbit'; it takes a string such as"),
        (["--workers", "2", "--link", "fast"], "--link is 'fast'"),
        (["--workers", "2", "--lab", "nowhere.toml"], "there is no lab file|cannot read the lab file"),
        (["--workers", "2", "--strategy", "rnig"], "did you mean 'ring'"),
        (["--workers", "2", "--device", "v10"], "unknown device 'v10'.*did you mean 'v100'.*k80, p100, v100"),
        (["--score", "x", "--device", "v100"], "--device with --score"),
        (["--workers", "64", "--strategy", "pipeline", "--link", "1gbit"], "64 stages: the model has 16 layers"),
        (["--workers", "2", "--seed", "-1"], "--seed -1: give a whole number"),
        (["--workers", "2", "--batch-size", "0"], "--batch-size 0: give a whole number"),
        (["--score", "x", "--link", "1gbit"], "--link with --score"),
        (["--score", "x", "-o", "a.html"], "--output with --score"),
        (["--workers", "16", "--lab", "1gbit:2"], "16 workers on 2 machines would share cores"),
        (["--workers", "16"], "would share cores, which is not predicted"),
    ],
)
def test_wrong_values_are_refused(runs: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    import re

    assert main(["predict", str(runs), *words]) == 2
    assert re.search(said, capsys.readouterr().err)


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["predict", str(tmp_path), "--workers", "2"]) == 2
    assert "not a run folder" in capsys.readouterr().err

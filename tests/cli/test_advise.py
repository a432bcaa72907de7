"""paceline advise: a verdict from runs, or from a training whose short runs it makes; nothing wrong is answered.

Runs are made up, because real ones say nothing while other tests use the cores.
"""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run

from paceline.advise import probing
from paceline.bench.run import Outcome
from paceline.cli import advise
from paceline.cli.main import main
from paceline.cli.train import layers_of
from paceline.spec import resolve

SPEC = {"model": "mnist-cnn", "data": "mnist"}
TRAINING = ["--", "train", "--model", "mnist-cnn", "--data", "mnist", "--epochs", "50", "--batch-size", "64"]
PRICES = """
currency = "EUR"
source = "a shop"
dated = 2026-11-01
[[machine]]
name = "node"
per_hour = 0.5
"""


def write_runs(folder: Path, alone: float = 0.10, two: float = 0.07, **both: Any) -> Path:
    """One process with the whole batch and with half of it, and two workers that have half of it each."""
    write_run(folder / "one", steady(alone, 60), batch=64, spec=SPEC, **both)
    write_run(folder / "half", steady(0.55 * alone, 60, seed=1), batch=32, spec=SPEC, **both)
    for name in ("allreduce", "ring"):
        write_run(folder / name, steady(two, 60, seed=2), workers=2, batch=32, strategy=name,
                  spec=SPEC | {"overlap": "on"}, **both)  # fmt: skip
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    return write_runs(tmp_path / "runs")


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main(["advise", *words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_workers_that_were_measured_to_be_faster_are_advised(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, str(runs), "--workers", "1,2")
    assert found["distribute"]
    assert re.match(r"Distribute: 2 processes on this machine with \w+ take 0\.\d+ \(.*\) of the time of one process "
                    r"\(measured\)", found["sentence"])  # fmt: skip
    assert 0.66 < found["best"]["relative"]["value"] < 0.74
    assert found["best"]["faster"] > 0.99
    assert found["here"]["command"].startswith("paceline train --model mnist-cnn --data mnist")


def test_workers_that_were_measured_to_be_slower_are_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, str(write_runs(tmp_path / "runs", two=0.12)), "--workers", "1,2")
    assert not found["distribute"]
    assert found["sentence"].startswith("Do not distribute: 2 processes on this machine")
    assert "times as long as one process (measured)" in found["sentence"]
    assert found["here"]["workers"] == 1


def test_a_gain_that_is_smaller_than_the_margin_is_not_worth_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = write_runs(tmp_path / "runs", two=0.095)
    assert not said(capsys, str(runs), "--workers", "1,2")["distribute"]
    assert said(capsys, str(runs), "--workers", "1,2", "--margin", "0")["distribute"]


def test_links_decide_over_machines(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (said(capsys, str(runs), "--workers", "1,2,4", "--link", link) for link in ("10mbit", "10gbit"))
    assert not slow["distribute"]
    assert "machines over 10 Mbit/s links" in slow["sentence"]
    assert "sending" in slow["sentence"]
    assert slow["best"]["limit"] == "link"
    assert any(
        line.startswith("What would change it: with a machine for each worker, it is worth it from")
        for line in slow["reasons"]
    )
    assert fast["distribute"]
    assert fast["best"]["basis"] == "extrapolated"
    assert fast["best"]["workers"] == 4
    # The faster the links, the less time: a relation that no single prediction shows.
    four = [point["relative"]["value"] for point in fast["links"] if point["workers"] == 4]
    assert four == sorted(four, reverse=True)


def test_the_command_that_is_given_is_valid(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, str(runs), "--workers", "1,2,4", "--link", "10gbit", "--epochs", "5")
    from paceline.cli import train
    from paceline.cli.main import Parser

    for each in (found["here"], found["best"], found["alone"]):
        words = shlex.split(each["command"])
        parser = Parser()
        train.add_arguments(parser)
        values = layers_of(parser.parse_args(words[words.index("train") + 1 :]))
        spec = resolve(*values, here=False).spec
        assert (spec.model, spec.epochs, spec.update_batch) == ("mnist-cnn", 5, each["batch"])
        assert spec.strategy == each["strategy"]


def test_money_is_machines_times_price_times_hours_and_the_runs(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prices.toml").write_text(PRICES + 'link = "10gbit"\n')
    words = [str(runs), "--workers", "1,2,4", "--epochs", "50", "--prices", str(tmp_path / "prices.toml")]
    found = said(capsys, *words)
    for each in found["choices"]:
        if each["where"] != found["where"]:
            continue
        hours = each["seconds"]["value"] * each["machines"] + found["probe_seconds"]
        assert each["money"]["value"] == pytest.approx(0.5 * hours / 3600)
    (front,) = [line for line in found["reasons"] if line.startswith("No setting is both faster and cheaper than")]
    assert front.count(" EUR") == min(5, len(found["front"]))
    times = [each["seconds"]["value"] for each in found["front"]]
    money = [each["money"]["value"] for each in found["front"]]
    assert times == sorted(times)
    assert money == sorted(money, reverse=True)


def test_the_deadline_takes_the_cheapest_and_the_budget_the_fastest(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prices.toml").write_text(PRICES + 'link = "10gbit"\n')
    words = [str(runs), "--workers", "1,2,4", "--epochs", "50", "--prices", str(tmp_path / "prices.toml")]
    every = [each for each in said(capsys, *words)["choices"] if each["money"] and each["fits"]]
    ends = sorted(each["seconds"]["high"] for each in every)
    deadline = ends[len(ends) // 2]
    chosen = said(capsys, *words, "--deadline", f"{deadline + 1:.0f}s")["for_deadline"]
    in_time = [each for each in every if each["seconds"]["high"] <= deadline + 1]
    assert chosen["money"]["value"] == min(each["money"]["value"] for each in in_time)
    budget = max(each["money"]["high"] for each in every) + 1
    chosen = said(capsys, *words, "--budget", f"{budget:.2f}EUR")["for_budget"]
    assert chosen["relative"]["value"] == min(each["relative"]["value"] for each in every)


def test_the_best_single_process_is_on_the_fastest_node(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A slow first node is no reason to distribute."""
    slow = "[[node]]\nspeed = 0.25\n"
    (tmp_path / "lab.toml").write_text('rate = "1mbit"\n' + slow + "[[node]]\n" * 2)
    found = said(capsys, str(runs), "--workers", "1,2", "--cluster", str(tmp_path / "lab.toml"))
    assert not found["distribute"]
    assert 0.07 < found["alone"]["compute_seconds"] < 0.08
    assert found["where"] == f"nodes of {tmp_path / 'lab.toml'}"


def test_nodes_of_a_cluster_are_paid_for_by_name(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lab.toml").write_text('rate = "10gbit"\n[[node]]\nname = "a"\n[[node]]\nname = "b"\n')
    prices = PRICES.replace('"node"', '"a"') + '[[machine]]\nname = "b"\nper_hour = 2.5\n'
    (tmp_path / "prices.toml").write_text(prices)
    words = ["--workers", "1,2", "--epochs", "50", "--cluster", str(tmp_path / "lab.toml")]
    found = said(capsys, str(runs), *words, "--prices", str(tmp_path / "prices.toml"))
    hours = {each["workers"]: each["seconds"]["value"] / 3600 for each in (found["alone"], found["best"])}
    runs_money = 0.5 * found["probe_seconds"] / 3600
    assert found["alone"]["money"]["value"] == pytest.approx(0.5 * hours[1] + runs_money)
    assert found["best"]["money"]["value"] == pytest.approx(3.0 * hours[2] + runs_money)


def test_machines_without_a_link_are_single(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fast = '[[machine]]\nname = "fast"\nper_hour = 9\nspeed = 10.0\n'
    (tmp_path / "prices.toml").write_text(PRICES + 'link = "1gbit"\n' + fast)
    found = said(capsys, str(runs), "--workers", "1,2", "--prices", str(tmp_path / "prices.toml"))
    assert {each["workers"] for each in found["choices"] if "fast" in each["where"]} == {1}
    assert found["alone"]["where"] == "machines “fast”"
    assert found["alone"]["basis"] != "measured"
    assert not found["distribute"]


def test_runs_without_one_worker_tell_nothing_of_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "two", steady(0.07, 60), workers=2, batch=32, spec=SPEC | {"overlap": "on"})
    assert main(["advise", str(tmp_path / "two"), "--workers", "1,2"]) == 2
    assert "nothing is known of one process" in capsys.readouterr().err


def test_commands_have_the_options_of_their_own_strategy_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "one", steady(0.1, 60), batch=64, spec=SPEC)
    write_run(tmp_path / "two", steady(0.07, 60), workers=2, batch=32, spec=SPEC | {"overlap": "on", "bucket_mb": 9.0})
    found = said(capsys, str(tmp_path), "--workers", "1,2")
    assert "--bucket-mb 9.0" in found["best"]["command"]
    assert "--bucket-mb" not in found["alone"]["command"]


def test_a_page_is_written(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "new" / "advice.html"
    assert main(["advise", str(runs), "--workers", "1,2,4", "--link", "1gbit", "--epochs", "5", "-o", str(page)]) == 0
    out = capsys.readouterr().out
    assert f"The page is {page}" in out
    sentence = " ".join(out.split("\n\n")[0].split())
    assert sentence.split(";")[0] in page.read_text()


def test_a_model_that_does_not_fit_on_one_machine_is_divided(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = said(capsys, str(runs), "--link", "1gbit", "--memory", "16MB")
    assert found["alone"] is None
    assert found["sentence"].startswith("Distribute, because the model does not fit on one machine (it needs 25.7 MB")
    assert found["best"]["memory"]["high"] <= 16e6
    assert all(each["memory"]["high"] > 16e6 for each in found["choices"] if not each["fits"])


def test_a_model_that_fits_nowhere_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Processes were measured to need 300 MB, whatever part of the model they have."""
    write_run(tmp_path / "one", steady(0.1, 60), batch=64, spec=SPEC, peak_rss_bytes=[300_000_000])
    assert main(["advise", str(tmp_path / "one"), "--link", "1gbit", "--memory", "16MB"]) == 2
    wrong = capsys.readouterr().err
    assert re.search(r"the model fits on no machine: even .* needs \d+ MB .* of memory in one process; give", wrong)


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["--budget", "50EUR"], "--budget without --prices"),
        (["--deadline", "soon"], "--deadline soon: give a length of time"),
        (["--deadline", "1s", "--epochs", "5"], "nothing ends within 1.00 s: the fastest setting"),
        (["--deadline", "6h"], "give its --epochs or --steps"),
        (["--link", "fast"], "--link is 'fast'"),
        (["--margin", "-1"], "--margin -1: give a number from 0 to 10"),
        (["--workers", "two"], "give whole numbers with commas"),
        (["--strategy", "rnig"], "did you mean 'ring'"),
        (["--strategy", "sequential"], "give strategies of several workers"),
        (["--strategy", "ps-async"], "ps-async trains another model"),
        (["--batch", "100000"], "nothing is known of one process: sequential with 1 .* 100000"),
        (["--device", "v100"], "--device v100 is about other machines"),
        (["--cluster", "nowhere.toml"], "there is no lab file|cannot read the lab file"),
        (["--prices", "nowhere.toml"], "cannot read the prices"),
        (["--device", "v10", "--link", "1gbit"], "unknown device 'v10'"),
        (["--lab", "1gbit"], "--lab is for runs that are made now"),
        (["--epochs", "0"], "--epochs 0: give a whole number"),
        (["--memory", "much"], "--memory is 'much'"),
        (["--", "train"], "give either RUNS, or a training"),
    ],
)
def test_wrong_values_are_refused(runs: Path, words: list[str], wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", str(runs), *words]) == 2
    assert re.search(wrong, capsys.readouterr().err)


def test_too_small_a_budget_names_the_cheapest(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "prices.toml").write_text(PRICES + 'link = "10gbit"\n')
    words = ["--epochs", "50", "--prices", str(tmp_path / "prices.toml"), "--budget", "0.01EUR"]
    assert main(["advise", str(runs), *words]) == 2
    assert (
        "nothing costs at most 0.0100 EUR: the cheapest setting, one of the machines “node”, costs"
        in capsys.readouterr().err
    )


def test_runs_that_cannot_be_compared_are_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(runs / "other", steady(0.1, 60), spec={"model": "mlp", "data": "mnist"})
    assert main(["advise", str(runs), "--workers", "1,2"]) == 2
    assert "of one model and data set" in capsys.readouterr().err


def test_a_busy_machine_gets_no_verdict_but_the_reason_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(advise, "busy_now", lambda: "other processes used 1.7 of 2 cores")
    assert main(["advise", "--runs-dir", str(tmp_path / "probes"), *TRAINING]) == 2
    wrong = capsys.readouterr().err
    assert "no verdict: this machine is busy (other processes used 1.7 of 2 cores" in wrong
    assert "End the other programs, and run the same command again" in wrong
    assert not (tmp_path / "probes").exists()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[tuple[str, int, int]]]:
    """The strategy, workers and batch of the runs of each round, which take no time."""
    rounds: list[list[tuple[str, int, int]]] = []

    def bench(experiment: Any, store: Any, _say: Any, **_: Any) -> Outcome:
        tasks = [task for task in experiment.tasks() if not (store.folder / task.name).exists()]
        rounds.append([])
        for task in tasks:
            spec = task.point.resolved.spec
            batch = -(-spec.update_batch // spec.workers)
            rounds[-1].append((spec.strategy, spec.workers, batch))
            seconds = 0.1 * batch / 64 + 0.01 * spec.workers
            # As long as the law of steps and batches with a critical batch of 500 says.
            scale = 400 * (1 + 500 / spec.update_batch)
            losses = [2 * math.exp(-step / scale) for step in range(spec.steps)]
            write_run(store.folder / task.name, steady(seconds, spec.steps, seed=len(rounds)), workers=spec.workers,
                      batch=batch, strategy=spec.strategy, spec=SPEC | ({"overlap": "on"} if spec.workers > 1 else {}),
                      cores=2, update_seconds=seconds, losses=losses)  # fmt: skip
        return Outcome(made=len(tasks))

    monkeypatch.setattr(probing, "bench", bench)
    monkeypatch.setattr(probing, "cores", lambda: 2)
    monkeypatch.setattr(advise, "busy_now", lambda: None)
    return rounds


def test_a_training_is_run_for_a_short_time_before_the_verdict(
    made: list[list[tuple[str, int, int]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First a trial; then one process with the whole batch and with half of it, and two workers, in rounds."""
    assert main(["advise", "--json", "--runs-dir", str(tmp_path / "probes"), *TRAINING, "--workers", "1,2,4"]) == 0
    found = json.loads(capsys.readouterr().out)
    trial, *rounds = made
    assert trial == [("sequential", 1, 64)]
    expected = [("allreduce", 2, 32), ("ring", 2, 32), ("sequential", 1, 32), ("sequential", 1, 64)]
    assert [sorted(each) for each in rounds] == [expected] * 2
    assert found["distribute"]
    assert found["alone"]["steps"]["value"] == 50 * 938
    assert "the longest run has seen" in found["learning"]["unknown"]


def test_runs_with_several_batches_tell_how_many_updates_larger_ones_need(
    made: list[list[tuple[str, int, int]]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--batches", "--runs-dir", str(tmp_path / "probes"), *TRAINING, "--workers", "1,2"]
    assert main(["advise", "--json", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(made[-1]) == [("allreduce", 2, 32), ("allreduce", 2, 64), ("allreduce", 2, 256)]
    critical = found["learning"]["critical"]
    assert critical["low"] < critical["high"]
    steps = {point["batch"]: point["steps"] for point in found["learning"]["batches"]}
    assert steps[64]["value"] == 1
    # Twice the batch takes (1 + 500/128) / (1 + 500/64) = 0.56 of the updates. The critical batch of a whole training
    # is taken to be larger than that of its first tenth, so that it may be less.
    assert steps[128]["low"] < 0.56 < steps[128]["high"]
    larger = [each for each in found["choices"] if each["batch"] == 1024]
    assert all(each["lr"] > 0.001 for each in larger)
    assert larger


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ([], "give either RUNS, or a training"),
        (["--", "bench", "x.toml"], "give the training after --"),
        (["--", "train", "--model", "mnist-cn"], "did you mean 'mnist-cnn'"),
        (["--", "train", "--workers", "1,x"], "give whole numbers with commas"),
        (["--", "train", "--strategy", "rnig"], "did you mean 'ring'"),
        (["--workers", "1,2", *TRAINING], "--workers: give it after --"),
        (["--time-limit", "long", *TRAINING], "--time-limit long: give a length of time"),
    ],
)
def test_wrong_commands_are_refused_before_any_run(
    made: list[Any], words: list[str], wrong: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["advise", "--runs-dir", str(tmp_path / "probes"), *words]) == 2
    assert wrong in capsys.readouterr().err
    assert made == []

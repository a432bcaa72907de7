"""The summary in words: right numbers, no claim that the runs do not carry, and no study that it cannot take."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from made_up import START, steady, write_run
from test_claims import check, cluster
from test_runs import check_read

from paceline.analysis.finding_learning import apart
from paceline.analysis.findings import Finding, findings
from paceline.analysis.headline import headline
from paceline.analysis.learning import ACCURACY, LOSS
from paceline.analysis.problems import problems
from paceline.analysis.resources import node_series, rank_series, traffic
from paceline.analysis.runs import LeftOut, Run
from paceline.analysis.scaling import curves, group
from paceline.run.records import COMPLETED, Step, Summary


def found_in(runs: list[Run], left_out: tuple[LeftOut, ...] = ()) -> list[Finding]:
    groups = group(runs)
    return findings(groups, curves(groups, "strong"), curves(groups, "weak"), left_out)


def texts(runs: list[Run], kind: str) -> list[str]:
    return [found.text for found in found_in(runs) if found.kind == kind]


def repeats(folder: Path, mean: float, *, count: int = 3, steps: int = 40, **options: Any) -> list[Run]:
    found = []
    for seed in range(count):
        times = steady(mean, steps, seed, 0.01)
        found.append(check_read(write_run(folder / str(seed), times, seed=seed, **options)))
    return found


@pytest.fixture(scope="module")
def strong(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """A global batch of 64: of a ring's work a tenth is serial, and gathering is no faster with 4 than with 2."""
    folder, runs = tmp_path_factory.mktemp("strong"), []
    runs += repeats(folder / "1", 0.1, batch=64)
    for n in (2, 4):
        runs += repeats(folder / f"ring-{n}", 0.1 * (0.1 + 0.9 / n), workers=n, batch=64 // n, compute=[0.4] * n)
        runs += repeats(folder / f"gather-{n}", 0.06, workers=n, batch=64 // n, strategy="gather")
    return runs


def test_what_ran(strong: list[Run]) -> None:
    [text] = texts(strong, "ran")
    assert text.startswith(
        "Trained mlp on mnist-mini, by sequential, ring and gather, with 1, 2 and 4 workers, batch 16, 32 and 64 per "
        "worker: 5 settings, 3 runs each, on 8 cores"
    )


def test_the_fastest(strong: list[Run]) -> None:
    [text] = texts(strong, "best")
    assert re.match(r"The fastest is ring, 4 workers, batch 16[^:]*: 1,9.* samples/s\.$", text)


def test_efficiency_and_the_serial_part(strong: list[Run]) -> None:
    [text] = texts(strong, "scaling")
    assert "Strong scaling (fixed global batch)" in text
    assert "efficiency: ring, 4 workers 77 %" in text
    serial = re.search(r"The serial fraction of the first is ([\d.]+) % by Amdahl's law", text)
    assert serial
    assert float(serial[1]) == pytest.approx(10, abs=1)


FOUR = ("ring", "gather", "reduce-bcast", "allreduce")


@pytest.mark.parametrize(
    ("times", "said"),
    [
        ((0.06, 0.07, 0.08, 0.09), "; 2 more between them."),
        ((0.06, 0.09, 0.0901, 0.0902), "; 2 more."),
        ((0.06, 0.0601, 0.0602, 0.0603), "for 4 settings that cannot be distinguished."),
    ],
)
def test_an_order_is_told_only_where_it_is_known(tmp_path: Path, times: tuple[float, ...], said: str) -> None:
    runs = repeats(tmp_path / "1", 0.1, batch=64)
    for strategy, seconds in zip(FOUR, times, strict=True):
        runs += repeats(tmp_path / strategy, seconds, workers=2, batch=32, strategy=strategy)
    [text] = texts(runs, "scaling")
    assert text.endswith(said)


def test_of_many_slower_settings_those_between_are_told_only_where_they_are(tmp_path: Path) -> None:
    runs = repeats(tmp_path / "best", 0.05, workers=2, strategy="ps-sync", servers=1)
    for number, strategy in enumerate(FOUR):
        runs += repeats(tmp_path / strategy, 0.1 + 0.0001 * number, workers=2, strategy=strategy)
    [text] = texts(runs, "not-worth")
    assert "; 2 more." in text


def test_where_the_time_goes_and_what_would_help(strong: list[Run]) -> None:
    text = texts(strong, "cost")[0]
    assert re.match(r"A step of ring, 4 workers, batch 16.* takes 32", text)
    assert "40 % computing, 50 % communication" in text
    assert text.endswith("fewer workers or a larger batch would help most.")  # all are on one machine


def test_uneven_workers_are_told(tmp_path: Path) -> None:
    runs = repeats(tmp_path, 0.1, workers=3, compute=[0.3, 0.3, 0.8])
    [text] = texts(runs, "cost")
    assert "33 % waiting for the slowest worker" in text
    assert text.endswith("speeding up the slowest worker would help most.")


def test_what_is_not_worth_it(strong: list[Run]) -> None:
    found = texts(strong, "not-worth")
    assert re.match(
        r"More workers are not worth it from 2 to 4 with gather: (1.00|0.99\d) .* times the speed\.", found[0]
    )
    assert found[1].startswith("With 4 workers, relative to the speed of ring: gather reaches 5")
    assert len(found) == 2


def test_more_workers_that_are_slower_than_one(tmp_path: Path) -> None:
    runs = repeats(tmp_path / "1", 0.1) + repeats(tmp_path / "2", 0.3, workers=2)
    assert texts(runs, "best")[0].startswith("The fastest is sequential, 1 worker: 320")
    assert texts(runs, "not-worth")[0].startswith("More workers are not worth it from 1 to 2 with ring: 0.66")


def test_what_the_intervals_do_not_carry_is_not_claimed(tmp_path: Path) -> None:
    """Runs of the ring differ by a third, and so its 5 % less time proves nothing."""
    means = (0.07, 0.095, 0.12)
    ring = [check_read(write_run(tmp_path / f"r{i}", steady(mean, 40, i), seed=i, workers=2, batch=16))
            for i, mean in enumerate(means)]  # fmt: skip
    [text] = texts(repeats(tmp_path / "one", 0.1) + ring, "best")
    assert text.startswith("The fastest settings cannot be distinguished: ")
    assert "ring, 2 workers" in text
    assert "sequential, 1 worker" in text


def test_few_runs_are_said_to_be_few(tmp_path: Path) -> None:
    runs = repeats(tmp_path / "1", 0.1, count=1) + repeats(tmp_path / "2", 0.095, count=1, workers=2, batch=16)
    [text] = texts(runs, "best")
    assert "cannot be distinguished" in text
    assert "It rests on" not in text  # so it is with all: said once
    assert any("fewer than 3 runs" in said for said in texts(runs, "missing"))
    more = runs[:1] + repeats(tmp_path / "3", 0.2, count=3, workers=4, batch=8)
    [text] = texts(more, "best")
    assert text.endswith("It rests on 1 run.")
    assert any(said.startswith("Every setting has fewer than 3 runs") for said in texts(runs, "missing"))


def accurate(folder: Path, batch: int, seconds: float, tests: list[float], **options: Any) -> list[Run]:
    """Two epochs of 5,120 images; what is learned in the first is half."""
    found = []
    for seed, value in enumerate(tests):
        course, losses = [value / 2, value], [1.0, 0.5]
        learned: dict[str, Any] = {"test_accuracy": value, "train_accuracy": course, "train_loss": losses,
                                   "validation_accuracy": course, "validation_loss": losses}  # fmt: skip
        each = 5120 // batch
        times = steady(seconds, 2 * each, seed, 0.005)
        found.append(check_read(write_run(folder / f"{batch}-{seed}", times, batch=batch, seed=seed, per_epoch=each,
                                          **learned, **options)))  # fmt: skip
    return found


def test_accuracy_time_to_it_and_the_price_of_a_batch_size(tmp_path: Path) -> None:
    """Of 32, 256 and 1024, the last is the fastest and loses accuracy; 256 keeps it."""
    runs = accurate(tmp_path, 32, 0.05, [0.981, 0.983, 0.985])
    runs += accurate(tmp_path, 256, 0.2, [0.980, 0.982, 0.984])
    runs += accurate(tmp_path, 1024, 0.6, [0.951, 0.952, 0.953])
    soonest, best, batches = texts(runs, "learned")
    assert soonest.startswith("98 % validation accuracy is reached first by sequential, 1 worker, batch 256, after ")
    assert "next is sequential, 1 worker, batch 32" in soonest
    assert "1 setting did not reach it in most runs" in soonest
    assert best == (
        "The best test accuracy is 98.30 % (98.10 % to 98.50 %), with sequential, 1 worker, batch 32; 1 of the 2 "
        "others cannot be distinguished from it; sequential, 1 worker, batch 1,024 has the lowest, 95.20 % (95.10 % to "
        "95.30 %)."
    )
    assert batches.startswith("Of the batch sizes 32 to 1,024 (sequential, 1 worker), 1,024 is the fastest, 2.6")
    assert "256 is the fastest that reaches it, with 7" in batches
    assert batches.endswith("% of the speed.")


def test_the_first_to_an_accuracy_is_told_apart_from_settings_that_are_not_ranked(tmp_path: Path) -> None:
    runs = accurate(tmp_path, 32, 0.02, [0.985, 0.986, 0.987], spec={"threads": 1})
    runs += accurate(tmp_path, 64, 0.08, [0.981, 0.982, 0.983], spec={"threads": 1})
    for run in (busy := accurate(tmp_path / "busy", 32, 0.01, [0.985, 0.986, 0.987], spec={"threads": 2})):
        vars(run)["disturbed"] = "other processes used 1.6 of 2 cores"
    soonest, *_ = texts(runs + busy, "learned")
    assert soonest.startswith("98 % validation accuracy is reached first by sequential, 1 worker, batch 32, 1 thread, ")


def test_who_is_next_and_who_is_last_is_told_only_where_it_is_known(tmp_path: Path) -> None:
    """64 and 128 take as long and learn as much as each other; 32 is better than both."""
    runs = accurate(tmp_path, 32, 0.02, [0.985, 0.986, 0.987])
    runs += accurate(tmp_path, 64, 0.08, [0.981, 0.982, 0.983])
    runs += accurate(tmp_path, 128, 0.16, [0.980, 0.982, 0.984])
    soonest, best, _ = texts(runs, "learned")
    assert soonest.startswith("98 % validation accuracy is reached first by sequential, 1 worker, batch 32, after ")
    assert "next is" not in soonest
    assert best == (
        "The best test accuracy is 98.60 % (98.50 % to 98.70 %), with sequential, 1 worker, batch 32; the 2 others "
        "have a lower accuracy, down to 98.20 %."
    )


def test_accuracies_of_single_runs_that_differ_little_are_alike(tmp_path: Path) -> None:
    runs = accurate(tmp_path, 32, 0.05, [0.981]) + accurate(tmp_path, 64, 0.08, [0.976])
    assert (
        texts(runs, "learned")[1]
        == "The test accuracies of the 2 settings cannot be distinguished: 97.60 % to 98.10 %."
    )
    assert "not a significant difference" in texts(runs, "learned")[2]


def test_models_are_not_compared_with_each_other(tmp_path: Path) -> None:
    runs = [run for model in ("big", "small") for run in repeats(tmp_path / model, 0.1, spec={"model": model})]
    [best] = [found for found in found_in(runs) if found.kind == "best"]
    assert [row[:2] for row in best.rows[1:]] == [("big", "sequential, 1 worker"), ("small", "sequential, 1 worker")]
    assert not texts(runs, "not-worth")


def test_one_run_and_no_baseline(tmp_path: Path) -> None:
    runs = repeats(tmp_path, 0.1, count=1, workers=2)
    assert texts(runs, "ran")[0].endswith("with 2 workers, batch 32 per worker: 1 run, on 8 cores.")
    assert texts(runs, "best")[0].startswith("The speed of ring, 2 workers is 64")
    assert texts(runs, "missing")[0].startswith(
        "There is no run of one worker to compare 1 setting with (ring, 2 workers)."
    )


def test_emulated_servers_alone(tmp_path: Path) -> None:
    runs = cluster(tmp_path, "big", 2, 1) + cluster(tmp_path, "big", 4, 1)
    for run in runs:
        run.summary.compute, run.summary.shrink = "emulated:k80", 10
    [text] = texts(runs, "ran")
    for run in runs:
        run.summary.compute = "emulated:0.175"
    assert "emulated (0.175 s): " in texts(runs, "ran")[0]
    assert text.startswith("Timed big on mnist-mini, by ps-sync, with 2 and 4 workers and 1 server")
    assert "in a lab of 3 and 5 nodes with links of 1 Gbit/s" in text
    assert "emulated (k80): times show communication and waiting, and nothing was trained" in text
    assert "Gradients were 10 times smaller than the models', so that links stand for 10 Gbit/s." in text
    assert texts(runs, "learned") == []
    assert "more servers" in texts(runs, "cost")[0]


def test_nothing_and_what_was_left_out(tmp_path: Path) -> None:
    out = (LeftOut(tmp_path / "a", "failed: rank 1 was killed"),)
    assert [found.text for found in found_in([], out)] == [
        "There is no completed run.",
        "1 folder could not be used: a (failed: rank 1 was killed).",
    ]


def test_runs_of_few_steps_prove_nothing(tmp_path: Path) -> None:
    runs = repeats(tmp_path / "1", 0.1, steps=3) + repeats(tmp_path / "2", 0.3, steps=3, workers=2)
    assert texts(runs, "not-worth") == []
    assert any("runs of 2 settings are too short" in text for text in texts(runs, "missing"))


def test_of_what_cannot_be_told_it_is_not_said_that_it_is_not_worth_it(tmp_path: Path) -> None:
    """Two workers are 1.29 times as fast, and their runs differ so much that it may be 0.9 times, or 1.5."""
    means = (0.065, 0.0775, 0.107)
    ring = [check_read(write_run(tmp_path / f"r{i}", steady(mean, 40, i), seed=i, workers=2, batch=16))
            for i, mean in enumerate(means)]  # fmt: skip
    runs = repeats(tmp_path / "one", 0.1) + ring
    assert texts(runs, "not-worth") == []


def test_accuracies_that_overlap_are_alike_however_few(tmp_path: Path) -> None:
    runs = accurate(tmp_path, 32, 0.05, [0.1518, 0.1562]) + accurate(tmp_path, 64, 0.08, [0.1250, 0.1562])
    assert any("accuracies of the 2 settings cannot be distinguished" in text for text in texts(runs, "learned"))
    assert not apart(ACCURACY, [0.1518, 0.1562], [0.1250, 0.1562])
    assert apart(ACCURACY, [0.95, 0.96], [0.90, 0.91])
    assert not apart(ACCURACY, [0.95], [0.945])


def test_accuracies_after_fewer_samples_are_not_compared(tmp_path: Path) -> None:
    runs = accurate(tmp_path, 32, 0.05, [0.90] * 3) + accurate(tmp_path, 64, 0.05, [0.80] * 3)
    longer = repeats(tmp_path / "long", 0.05, steps=400, batch=128, test_accuracy=0.99)
    [best] = [text for text in texts(runs + longer, "learned") if "best test accuracy" in text]
    assert best.startswith("The best test accuracy is 90.00 %")
    assert "Settings that saw more or fewer samples (10,240 to 51,200) are not compared." in best


def test_asynchronous_workers_are_said_to_be_and_divide_no_batch(tmp_path: Path) -> None:
    runs = repeats(tmp_path / "1", 0.1) + repeats(tmp_path / "2", 0.1, workers=2)
    for n in (2, 4):
        runs += repeats(tmp_path / f"a{n}", 0.1 / n, workers=n, servers=1, strategy="ps-async")
    [best] = texts(runs, "best")
    assert best.startswith("The fastest is ps-async, 4 workers")
    assert "Its workers do not wait for each other" in best
    assert not any(text.startswith("Strong") for text in texts(runs, "scaling"))
    assert any("a worker's step of ps-async" in text.lower() for text in texts(runs, "cost"))


def test_workers_that_take_turns_are_no_scaling(tmp_path: Path) -> None:
    runs = repeats(tmp_path / "1", 0.1, cores=2)
    runs += [run for n in (2, 4) for run in repeats(tmp_path / str(n), 0.05 * n, workers=n, cores=2)]
    [text] = texts(runs, "scaling")
    assert "ring, 2 workers 99 %" in text or "ring, 2 workers 100 %" in text
    [idle] = texts(runs, "not-worth")
    assert idle.startswith("More workers are not worth it from 2 to 4 with ring")
    assert "This setting has more workers than this machine has cores" in idle


def test_many_problems_are_small_tables(tmp_path: Path) -> None:
    """Four models on links of two speeds, by servers and rings: no sentence has a clause for each."""
    runs = []
    for model in ("a", "b", "c", "d"):
        for shrink in (2, 16):
            for workers, servers, step in ((1, 0, 0.5), (2, 0, 0.6), (4, 0, 0.7), (2, 1, 1.0), (4, 1, 2.0)):
                made = cluster(tmp_path / str(shrink), model, workers, servers, step=step, repeats=1, steps=40,
                               shrink=shrink, spec={"shrink": shrink, "compute": "emulated:k80"})  # fmt: skip
                for run in made:
                    run.summary.compute = "emulated:k80"
                runs += made
    found = found_in(runs)
    assert len(found) <= 12
    assert max(len(each.text) for each in found) < 700
    tables = {each.rows[0][-1]: each.rows[1:] for each in found if each.rows}
    assert [row[:2] for row in tables["samples/s"]][:2] == [
        ("a, links as of 2 Gbit/s", "ring, 4 workers"),
        ("a, links as of 16 Gbit/s", "ring, 4 workers"),
    ]
    assert len(tables["samples/s"]) == len(tables["relative speed"]) == 8
    idle = [row[:3] for row in tables["times the speed"]]
    assert ("a, links as of 2 Gbit/s", "ps-sync, 1 server", "1 to 4") in idle


@st.composite
def odd_runs(draw: st.DrawFn) -> Run:
    """A run in memory of any kind: few steps, servers or none, emulated or not, with and without accuracies."""
    servers, workers = draw(st.sampled_from([0, 0, 1, 3])), draw(st.sampled_from([1, 2, 4]))
    alone = workers == 1 and not servers
    strategy = draw(st.sampled_from(["ps-sync", "ps-async"] if servers else ["sequential"] if alone else
                                    ["ring", "allreduce"]))  # fmt: skip
    model, batch = draw(st.sampled_from(["a", "b"])), draw(st.sampled_from([16, 32, 64]))
    steps, epochs, seed = draw(st.integers(1, 12)), draw(st.integers(1, 2)), draw(st.integers(0, 3))
    emulated, tested, validated = (draw(st.booleans()) for _ in range(3))
    total = batch if strategy == "ps-async" else batch * workers
    found: dict[int, list[Step]] = {}
    for rank in range(servers + workers):
        count = 0 if 0 < rank < servers else steps
        now, found[rank] = START, []
        for number, value in enumerate(steady(0.1, count, rank + seed)):
            now += value
            spans = {} if rank < servers else {"forward": value / 2, "wait": value / 3}
            loss = None if emulated else 1.0
            found[rank].append(Step(number, number * epochs // count, now, value, total, spans, loss))
    accuracies = [] if emulated else [draw(st.floats(0, 1)) for _ in range(epochs)]
    held_out, transport = accuracies if validated else [], "zmq" if servers else "gloo"
    summary = Summary(COMPLETED, strategy, workers, transport, model, "d", batch, total, epochs, seed,
                      compute="emulated:k80" if emulated else "real", servers=servers, steps=steps,
                      epoch_seconds=[1.0] * epochs, train_accuracy=accuracies, train_loss=accuracies,
                      validation_accuracy=held_out, validation_loss=held_out,
                      test_accuracy=0.9 if tested and not emulated else None)  # fmt: skip
    hosts = [{"rank": r, "role": "", "host": draw(st.sampled_from("xy"))} for r in range(servers + workers)]
    lab = {"nodes": [{"up": 10**9, "down": 10**9}]} if draw(st.booleans()) else None
    environment: dict[str, Any] = draw(st.sampled_from([{}, {"ranks": hosts, "cores": 2, "lab": lab, "gpus": ["T4"]}]))
    spec = {"model": model, "strategy": strategy, "workers": workers, "batch_size": batch, "servers": servers,
            "compute": summary.compute, "lr": draw(st.sampled_from([0.1, 0.2]))}  # fmt: skip
    return Run(Path(f"run-{seed}"), spec, summary, environment, found, {})


@given(st.lists(odd_runs(), max_size=8))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_study_has_a_summary(runs: list[Run]) -> None:
    found = found_in(runs)
    assert found[0].kind == ("ran" if runs else "missing")
    for each in found:
        assert each.text[-1] == ".", each
        assert not re.search(r"\bnan\b|\binf\b|None|\de[+-]|  |\(\)|, ,|\.\.", each.text), each
    groups = group(runs)
    verdict = headline(groups, [*curves(groups, "weak"), *curves(groups, "strong")]).text
    assert not re.search(r"\bnan\b|\binf\b|None|\de[+-]|\(\)|, ,|\.\.", verdict), verdict
    for claim in check(runs).values():
        assert claim.why.endswith(".")
        assert not re.search(r"\bnan\b|\binf\b|None|  ", claim.why + "".join(case.why for case in claim.cases)), claim
    for run in runs:
        assert not node_series(run)
        assert not traffic(run)
        assert len(rank_series(run)) == run.summary.workers


def spoken(folder: Path, batch: int, seconds: float, losses: list[float], **options: Any) -> list[Run]:
    """A run of a language model for each test loss."""
    return [
        check_read(write_run(folder / f"{batch}-{i}", steady(seconds, 6400 // batch, i), batch=batch, seed=i,
                             per_epoch=6400 // batch // 2, train_loss=[2.0, loss], validation_loss=[2.0, loss],
                             test_loss=loss, spec={"task": "language-model"}, task="language-model", **options))
        for i, loss in enumerate(losses)
    ]  # fmt: skip


def test_language_models_are_compared_by_loss_and_perplexity(tmp_path: Path) -> None:
    runs = spoken(tmp_path, 32, 0.05, [1.50, 1.51, 1.52]) + spoken(tmp_path, 64, 0.05, [1.70, 1.71, 1.72])
    soonest, best, sizes = texts(runs, "learned")
    assert "A validation loss of 1.6 (perplexity 4.95) is reached" in soonest
    assert best.startswith("The best test loss is 1.510 (1.500 to 1.520; perplexity 4.53), with ")
    assert "has the highest, 1.710 (1.700 to 1.720; perplexity 5.53)" in best
    assert "its test loss is 1.71" in sizes
    assert "32 is the" not in sizes
    assert not any("accurac" in each.text for each in findings(group(runs), [], []))


def test_losses_that_differ_by_less_than_noise_are_alike() -> None:
    assert apart(LOSS, [1.0], [1.1])
    assert not apart(LOSS, [1.0], [1.01])
    assert not apart(LOSS, [1.1], [1.0])


def test_only_runs_of_one_task_are_compared(tmp_path: Path) -> None:
    """Even if everything else is the same."""
    both = [*spoken(tmp_path / "a", 32, 0.05, [1.5]), *spoken(tmp_path / "b", 32, 0.05, [1.5])]
    assert len(problems(group(both))) == 1
    other = check_read(write_run(tmp_path / "c", steady(0.05, 200), test_accuracy=0.9))
    found = problems(group([both[0], other]))
    assert [problem.label for problem in found] == ["language-model", "classification"]

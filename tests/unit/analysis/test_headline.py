"""The verdict: compared with the best single process, as certain as the runs permit, and withheld where they do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from made_up import steady, write_run
from test_runs import check_read

from paceline.analysis.checks import all_warnings
from paceline.analysis.findings import findings
from paceline.analysis.headline import (
    NO_BASELINE,
    NOT,
    OPEN,
    PROBABLY,
    SPOILED,
    UNFAIR,
    WITHHELD,
    WORTH,
    Headline,
    headline,
)
from paceline.analysis.runs import Run
from paceline.analysis.scaling import curves, group

BUSY = "other processes used 1.6 of 2 cores"


def verdict_on(runs: list[Run]) -> Headline:
    groups = group(runs)
    found = [*curves(groups, "weak"), *curves(groups, "strong")]
    return headline(groups, found, all_warnings(groups, found))


def repeats(folder: Path, seconds: float, *, threads: int = 1, count: int = 3, steps: int = 120, spread: float = 0.03,
            spec: dict[str, Any] | None = None, **options: Any) -> list[Run]:  # fmt: skip
    """Runs of one setting on two cores whose steps take about so long."""
    seeds = [seed + round(1e4 * seconds) for seed in range(count)]
    given: dict[str, Any] = {"cores": 2, "threads": threads, "spec": {"threads": threads, **(spec or {})}, **options}
    return [check_read(write_run(folder / str(seed), steady(seconds, steps, seed, spread), seed=seed, **given))
            for seed in seeds]  # fmt: skip


def demo(folder: Path, two: float = 0.1226, **options: Any) -> list[Run]:
    """Two threads make one process 1.36 times as fast; two workers are 1.63 times as fast as one of one thread."""
    runs = repeats(folder / "one", 0.1, **options)
    runs += repeats(folder / "threads", 0.0735, threads=2, **options)
    return runs + repeats(folder / "ring", two, workers=2, **options)


def disturb(runs: list[Run]) -> list[Run]:
    for run in runs:
        vars(run)["disturbed"] = BUSY
    return runs


def test_two_workers_are_compared_with_one_process_that_has_all_cores(tmp_path: Path) -> None:
    found = verdict_on(demo(tmp_path))
    [case] = found.cases
    assert case.verdict == WORTH
    assert case.speedup
    assert case.speedup.value == pytest.approx(1.2, abs=0.01)
    assert case.speedup.low <= case.speedup.value <= case.speedup.high
    start = (
        "Distributing is worth it: ring with 2 workers is 1.20 times as fast as the best single process, with 2 threads"
    )
    assert found.sentence.startswith(f"{start} (95 % interval 1.1")
    assert found.sentence.endswith(", 3 runs each).")
    assert found.notes[0].startswith("Compared with one worker with 1 thread, it is 1.6")
    assert found.notes[0].endswith("82 % of the ideal for 2 workers.")
    assert found.chart == "worth"


def test_without_such_a_process_nothing_is_concluded_and_what_to_run_is_said(tmp_path: Path) -> None:
    found = verdict_on(repeats(tmp_path / "one", 0.1) + repeats(tmp_path / "ring", 0.1226, workers=2))
    assert found.cases[0].verdict == UNFAIR
    assert found.sentence.startswith("Whether distributing is worth it is not known: ring with 2 workers is 1.63 times")
    assert found.sentence.endswith("but one process did not use all the cores.")
    assert "run the same with --strategy sequential --threads 2" in found.notes[0]


@pytest.mark.parametrize("spoil", ["disturbed", "too short"])
def test_a_process_with_all_cores_that_cannot_be_ranked_is_to_be_repeated(tmp_path: Path, spoil: str) -> None:
    rival = repeats(tmp_path / "threads", 0.0735, threads=2, steps=120 if spoil == "disturbed" else 5)
    rest = repeats(tmp_path / "one", 0.1) + repeats(tmp_path / "ring", 0.1226, workers=2)
    found = verdict_on(rest + (disturb(rival) if spoil == "disturbed" else rival))
    assert found.cases[0].verdict == SPOILED
    assert found.sentence.endswith("but the runs of one process with all the cores were disturbed or too short.")
    assert found.notes[0].startswith("One process with 2 threads was run, but its runs were disturbed or too short")
    assert "No run of one process used" not in found.text


GPUS = {"gpus": ["T4"] * 4}


@pytest.mark.parametrize(
    ("four", "kind", "why"),
    [
        (0.0242, "ring, 4 workers, batch 8: it is 4.1", "that is more than its workers can explain"),
        (0.026, "ring, 4 workers, batch 8: efficiencies", "that contradicts the speed with other numbers of workers"),
    ],
)
def test_speedups_that_cannot_be_right_qualify_the_verdict(tmp_path: Path, four: float, kind: str, why: str) -> None:
    """4 workers are 4.1 times as fast as one, or 3.8 times, but 2.3 times as fast as 2."""
    runs = []
    for n, seconds in {1: 0.1, 2: 0.06, 4: four}.items():
        runs += repeats(tmp_path / str(n), seconds, workers=n, batch=32 // n, machine=GPUS, cores=8)
    found = verdict_on(runs)
    assert found.cases[0].verdict == PROBABLY
    assert found.sentence.startswith("Distributing is probably worth it: ring with 4 workers, batch 8 is ")
    assert found.sentence.endswith(f", 3 runs each), but {why}.")
    assert found.notes[0].lower().startswith(kind)
    assert found.cases[0].contenders[0].verdict == PROBABLY
    sound = [run for run in runs if run.summary.workers < 4]
    assert verdict_on(sound).sentence.startswith("Distributing is worth it: ")
    other = demo(tmp_path / "other", spec={"model": "other"})
    assert "in 1 case the speedup is more than the workers can explain" in verdict_on(runs + other).text.lower()


def test_that_it_is_slower_needs_no_better_baseline(tmp_path: Path) -> None:
    found = verdict_on(repeats(tmp_path / "one", 0.1) + repeats(tmp_path / "ring", 0.4, workers=2))
    assert found.cases[0].verdict == NOT
    assert found.sentence.startswith("Distributing is not worth it: ring with 2 workers is 0.")


def test_single_runs_show_only_what_is_probable(tmp_path: Path) -> None:
    found = verdict_on(demo(tmp_path, count=1))
    assert found.cases[0].verdict == PROBABLY
    assert found.sentence.startswith("Distributing is probably worth it: ")
    assert "only 1 run each" in found.sentence


def test_a_difference_that_the_runs_do_not_carry_is_no_speedup(tmp_path: Path) -> None:
    found = verdict_on(demo(tmp_path, two=0.142, count=1))
    assert found.cases[0].verdict == OPEN
    assert found.sentence.startswith("No significant speedup over one process: ")


def test_leaders_that_cannot_be_distinguished_are_not_ranked(tmp_path: Path) -> None:
    runs = demo(tmp_path) + repeats(tmp_path / "gather", 0.1227, workers=2, strategy="gather")
    runs += repeats(tmp_path / "tree", 0.14, workers=2, strategy="reduce-bcast")
    found = verdict_on(runs)
    assert "the fastest settings are 1.20 times as fast" in found.sentence
    assert "ring" not in found.sentence
    assert "gather" not in found.sentence
    [leaders] = [note for note in found.notes if "cannot be distinguished" in note]
    assert "ring with 2 workers" in leaders
    assert "gather with 2 workers" in leaders
    assert "reduce-bcast" not in leaders
    assert [each.verdict for each in found.cases[0].contenders] == [WORTH, WORTH, WORTH]


def test_a_busy_machine_ranks_nothing(tmp_path: Path) -> None:
    runs = disturb(demo(tmp_path, count=2) + repeats(tmp_path / "gather", 0.3, workers=2, strategy="gather"))
    found = verdict_on(runs)
    assert found.sentence == (
        f"The machine was busy during 9 of 9 runs ({BUSY}): nothing is ranked. Run again on an idle machine."
    )
    assert found.cases == ()
    assert found.chart == "utilisation"
    groups = group(runs)
    said = findings(groups, curves(groups, "strong"), curves(groups, "weak"))
    assert {each.kind for each in said} <= {"ran", "missing"}


def test_nothing_is_ranked_by_a_baseline_that_was_disturbed(tmp_path: Path) -> None:
    runs = disturb(repeats(tmp_path / "one", 0.1)) + repeats(tmp_path / "ring", 0.1226, workers=2)
    assert verdict_on(runs).sentence.startswith("The machine was busy during 3 of 6 runs")
    assert "nothing is ranked" in verdict_on(runs).sentence
    more = verdict_on(runs + repeats(tmp_path / "gather", 0.3, workers=2, strategy="gather")).sentence
    assert "whether distributing is worth it cannot be judged" in more, "the summary says which of the two is faster"


def test_what_was_not_disturbed_is_still_ranked(tmp_path: Path) -> None:
    runs = demo(tmp_path) + disturb(repeats(tmp_path / "gather", 0.05, workers=2, strategy="gather"))
    found = verdict_on(runs)
    assert found.sentence.startswith(
        f"The machine was busy during 3 of 12 runs ({BUSY}): their settings are not ranked. Distributing is worth it"
    )
    assert [(each.name, each.verdict) for each in found.cases[0].contenders] == [
        ("ring with 2 workers", WORTH),
        ("gather with 2 workers", WITHHELD),
    ]


def test_runs_that_are_too_short_rank_nothing(tmp_path: Path) -> None:
    found = verdict_on(demo(tmp_path, count=1, steps=10))
    assert found.sentence == "3 of 3 runs are too short: nothing is ranked. Run again for longer."
    assert found.cases == ()


def test_many_cases_are_a_table(tmp_path: Path) -> None:
    runs = []
    for model, seconds in (("good", 0.1226), ("poor", 0.4), ("even", 0.145)):
        runs += demo(tmp_path / model, two=seconds, spec={"model": model})
    runs += repeats(tmp_path / "alone", 0.1, workers=2, spec={"model": "alone"})
    found = verdict_on(runs)
    assert [(case.name, case.verdict) for case in found.cases] == [
        ("good", WORTH), ("poor", NOT), ("even", NOT), ("alone", NO_BASELINE),
    ]  # fmt: skip
    assert found.sentence == (
        "Of 4 cases, distributing is worth it in 1 (1.20 times as fast as one process), is not worth it in 2 and "
        "cannot be judged in 1."
    )
    head, good, *_ = found.text.splitlines()[-5:]
    assert head.split() == ["case", "best", "verdict", "speedup", "over", "one", "process"]
    assert good.startswith("good")
    assert "worth it" in good
    assert "1.20 (1.1" in good


def test_of_one_process_alone_the_fastest_is_named(tmp_path: Path) -> None:
    one, two = repeats(tmp_path / "1", 0.1), repeats(tmp_path / "2", 0.0735, threads=2)
    assert verdict_on(one).sentence.startswith("One setting was run, sequential with 1 worker: 3")
    assert (
        "the fastest setting with one process is sequential with 1 worker, 2 threads" in verdict_on(one + two).sentence
    )
    alike = repeats(tmp_path / "3", 0.1001, threads=2)
    assert "the fastest settings cannot be distinguished" in verdict_on(one + alike).sentence
    assert verdict_on([]).sentence == "There is no completed run."


def test_gpus_and_emulated_devices_are_no_cores_that_one_process_could_have_used(tmp_path: Path) -> None:
    gpus = {"gpus": ["T4", "T4"]}
    runs = repeats(tmp_path / "1", 0.1, machine=gpus) + repeats(tmp_path / "2", 0.11, workers=2, machine=gpus)
    assert verdict_on(runs).cases[0].verdict == WORTH

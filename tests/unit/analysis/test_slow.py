"""Which rank is slow, and what the steps of a run wait for: made-up steps with known answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_up import START, steady, write_run

from paceline.analysis.slow import (
    FEWEST,
    LAST_STEPS,
    NO_CORE,
    OTHER_WORK,
    SLOW_INPUT,
    SLOW_RANK,
    SLOW_UPDATE,
    STAGES,
    THRESHOLD,
    UNEVEN_SHARES,
    Judgement,
    judge,
    judge_folder,
    others,
)
from paceline.analysis.study import read_study
from paceline.layout import Grid
from paceline.report.sections import overview
from paceline.run.records import Step, Summary

HERE: Mapping[int, str] = {}


def summary(workers: int, strategy: str = "ring", **values: Any) -> Summary:
    return Summary("completed", strategy, workers, "gloo", "mlp", "mnist-mini", 32, 32 * workers, 1, 0, **values)


def times(ranks: int, count: int, noise: float, seed: int, rho: float = 0.5, late: float = 0.02) -> Any:
    """Seconds of compute of each rank and step: noise that lasts over steps, a part that all ranks share, outliers."""
    rng = np.random.default_rng(seed)
    shocks = rng.normal(0, noise * np.sqrt(1 - rho**2), (ranks + 1, count))
    for at in range(1, count):
        shocks[:, at] += rho * shocks[:, at - 1]
    return 0.01 * np.exp(shocks[1:] + shocks[0]) * np.where(rng.random((ranks, count)) < late, 10.0, 1.0)


def steps_of(
    compute: Any,
    own: Sequence[int] | None = None,
    inputs: Sequence[float] | None = None,
    queued: Sequence[float] | None = None,
) -> dict[int, list[Step]]:
    """Synchronous steps: all ranks wait for the slowest. `queued` is the part of compute without a core."""
    ranks, count = compute.shape
    own, inputs, queued = own or [32] * ranks, inputs or [0.0] * ranks, queued or [0.0] * ranks
    busy = compute + np.array(inputs)[:, None]
    ends = START + np.cumsum(busy.max(0) + 0.002)
    found: dict[int, list[Step]] = {}
    for rank in range(ranks):
        for at in range(count):
            took, whole = float(compute[rank, at]), float(busy[:, at].max() + 0.002)
            spans = {"input": inputs[rank], "forward": took / 3, "backward": took * 2 / 3,
                     "wait": whole - took - inputs[rank]}  # fmt: skip
            missed = {name: queued[rank] * spans[name] for name in ("forward", "backward")}
            step = Step(at, 0, float(ends[at]), whole, sum(own), spans, own=own[rank], queued=missed)
            found.setdefault(rank, []).append(step)
    return found


def found_in(steps: dict[int, list[Step]], hosts: Mapping[int, str] = HERE, **values: Any) -> Judgement:
    judged = judge(steps, hosts, summary(len(steps), **values))
    assert judged is not None
    return judged


def named(ranks: int, factor: float, noise: float, seeds: int, count: int = 150) -> int:
    """In how many made-up runs the last rank is named, which is so many times slower; it is the only one ever named."""
    hits = 0
    for seed in range(seeds):
        compute = times(ranks, count, noise, 1000 * ranks + seed)
        compute[-1] *= factor
        rank = found_in(steps_of(compute)).rank
        assert rank in (None, ranks - 1)
        hits += rank is not None
    return hits


@pytest.mark.parametrize("noise", [0.02, 0.2])
@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_equal_ranks_raise_no_alarm_and_slow_ones_are_named(ranks: int, noise: float) -> None:
    seeds = 40 if ranks < 16 else 10
    assert named(ranks, 1.0, noise, seeds) == 0
    assert named(ranks, 3.0, noise, seeds) == seeds
    # Of 300 made-up runs with two ranks and much noise, 96 % named the rank that is 1.5 times slower.
    assert named(ranks, 1.5, noise, seeds) >= (seeds if noise < 0.1 else 0.9 * seeds)


def test_a_rank_at_the_threshold_is_rarely_named() -> None:
    """In 2.5 % of runs, its interval is above the true value."""
    assert named(4, THRESHOLD, 0.05, 120) <= 9


def test_waiting_for_others_in_forward_is_no_slow_computing() -> None:
    """Synchronised batch-norm: rank 0's input is late, and rank 1 waits for it in forward, not after backward."""
    steps = steps_of(times(2, 150, 0.05, 1), inputs=[0.02, 0.0])
    for at, step in enumerate(steps[1]):
        moved = step.spans["wait"] - 0.002
        spans = step.spans | {"forward": step.spans["forward"] + moved, "wait": 0.002}
        steps[1][at] = replace(step, spans=spans)
    judged = found_in(steps)
    assert (judged.kind, judged.rank) == (SLOW_INPUT, 0)


@pytest.mark.parametrize(("kind", "span"), [(OTHER_WORK, "augment"), (OTHER_WORK, None), (SLOW_UPDATE, "optimizer")])
def test_a_rank_that_does_more_besides_computing_is_named(kind: str, span: str | None) -> None:
    compute = times(4, 150, 0.05, 1)
    busy = compute.copy()
    busy[3] += 0.01
    steps = steps_of(busy)
    for at, step in enumerate(steps[3]):
        computed = {"forward": compute[3, at] / 3, "backward": compute[3, at] * 2 / 3}
        steps[3][at] = replace(step, spans=step.spans | computed | ({span: 0.01} if span else {}))
    judged = found_in(steps)
    assert (judged.kind, judged.rank) == (kind, 3)


def test_nothing_is_said_of_ranks_that_wait_only_inside_of_backward() -> None:
    steps = steps_of(times(2, 150, 0.02, 1))
    for rank, made in steps.items():
        steps[rank] = [replace(step, spans=step.spans | {"backward": step.seconds - step.spans["forward"], "wait": 0.0})
                       for step in made]  # fmt: skip
    assert "no rank" not in found_in(steps).text


def test_steps_of_different_sizes_are_judged() -> None:
    compute, rng = times(2, 150, 0.02, 1), np.random.default_rng(0)
    compute[1] *= 2
    steps = steps_of(compute)
    for at in range(150):
        own = int(rng.integers(40, 60))
        for rank in (0, 1):
            step = steps[rank][at]
            spans = {name: value * own / 32 for name, value in step.spans.items()}
            steps[rank][at] = replace(step, samples=2 * own, own=own, spans=spans, seconds=step.seconds * own / 32)
    assert found_in(steps).rank == 1


def test_a_rank_that_is_slow_now_and_then_is_named() -> None:
    compute = times(4, 150, 0.05, 1)
    compute[2, ::3] *= 4
    judged = found_in(steps_of(compute))
    assert (judged.kind, judged.rank) == (SLOW_RANK, 2)


def test_single_late_steps_name_nobody() -> None:
    compute = times(4, 150, 0.05, 1)
    compute[2, ::30] *= 100
    assert found_in(steps_of(compute)).rank is None


def test_the_sentence_names_rank_host_and_ratio() -> None:
    compute = times(4, 100, 0.01, 1)
    compute[3] *= 1.8
    judged = found_in(steps_of(compute), {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"})
    assert judged.sentence.startswith("rank 3 on node-b computes 1.8")
    assert judged.sentence.endswith("times slower than the median of the other ranks")
    assert judged.ratio is not None
    assert 1.7 < judged.ratio.low < 1.8 < judged.ratio.high < 1.9
    assert "the others wait and communicate for 60 % of a step, and it for 14 %" in judged.evidence
    assert judged.advice.startswith("the same run without node-b")
    alone = found_in(steps_of(compute[2:]))
    assert (alone.rank, alone.sentence.endswith("times slower than rank 0")) == (1, True)


def test_ranks_are_compared_by_sample() -> None:
    """A rank with more samples is not slow; one that gets fewer because it is slow holds nobody up."""
    compute = times(3, 100, 0.02, 1)
    compute[1] *= 2
    uneven = found_in(steps_of(compute, own=[32, 64, 32]))
    assert (uneven.kind, uneven.rank) == (UNEVEN_SHARES, 1)
    assert "2.00 times as many" in uneven.evidence
    balanced = found_in(steps_of(times(3, 100, 0.02, 1), own=[32, 16, 32]))
    assert balanced.rank is None


def test_a_rank_without_samples_is_not_compared() -> None:
    assert found_in(steps_of(times(3, 100, 0.02, 1), own=[32, 0, 32])).rank is None


def test_smaller_last_batches_of_epochs_do_not_count() -> None:
    steps = steps_of(times(2, 120, 0.02, 1))
    for rank, made in steps.items():  # of four samples, rank 0 has three
        for at in range(0, 120, 2):
            short = vars(made[at]) | {"samples": 4, "own": 3 if rank == 0 else 1}
            made[at] = Step(**short)
    assert found_in(steps).rank is None


def test_time_without_a_core_is_not_slowness() -> None:
    compute = times(4, 100, 0.02, 1)
    compute[1] *= 2
    steps = steps_of(compute, queued=[0.0, 0.5, 0.0, 0.0])
    assert found_in(steps).rank is None  # ranks of one machine take turns
    judged = found_in(steps, {0: "a", 1: "b", 2: "c", 3: "d"})
    assert (judged.kind, judged.rank) == (NO_CORE, 1)
    # Emulated compute sleeps: all of it counts.
    assert found_in(steps, compute="emulated:k80").kind == SLOW_RANK


def test_shared_cores_do_not_hide_a_slow_rank() -> None:
    compute = times(4, 100, 0.1, 1)
    assert found_in(steps_of(compute, queued=[0.5] * 4)).kind == "short of cores"
    compute[0] *= 1.6
    judged = found_in(steps_of(compute, queued=[0.5] * 4))
    assert (judged.kind, judged.rank) == (SLOW_RANK, 0)


def test_slow_input_of_one_rank_and_of_all() -> None:
    compute = times(4, 100, 0.05, 1)
    one = found_in(steps_of(compute, inputs=[0.004, 0.004, 0.012, 0.004]))
    assert (one.kind, one.rank) == (SLOW_INPUT, 2)
    assert one.sentence == "rank 2 waits for its input 3.00 times as long as the median of the other ranks"
    every = found_in(steps_of(compute, inputs=[0.02] * 4))
    assert (every.kind, every.rank) == ("input-bound", None)


def test_what_most_of_a_step_is_spent_on() -> None:
    compute = times(4, 100, 0.02, 1, late=0)
    busy = found_in(steps_of(compute * 5))
    assert (busy.kind, busy.rank) == ("compute-bound", None)
    assert "no rank is significantly more than 1.2 times slower" in busy.evidence
    assert found_in(steps_of(compute / 10)).kind == "communication-bound"
    assert found_in(steps_of(times(4, 100, 0.02, 1, late=0.1))).kind == "uneven steps"
    assert busy.text.startswith("Compute-bound: a step takes ")
    assert busy.text.endswith(" Try more workers or faster processors.")


def test_stages_are_compared_with_each_other_and_ranks_with_those_of_their_stage() -> None:
    compute = times(4, 100, 0.02, 1)
    compute[[1, 3]] *= 2  # the second stage of each replica
    judged = found_in(steps_of(compute), strategy="pipeline", grid=Grid(2, 2))
    assert (judged.kind, judged.rank) == (STAGES, None)
    assert judged.sentence.startswith("imbalanced stages: stage 1 (rank 1) computes 2.0")
    assert "--cut measured" in judged.advice
    compute[2] *= 1.5
    slow = found_in(steps_of(compute), strategy="pipeline", grid=Grid(2, 2))
    assert (slow.kind, slow.rank) == (SLOW_RANK, 2)
    assert slow.sentence.endswith("times slower than rank 0")


def test_shards_wait_for_each_other_while_they_compute() -> None:
    compute = times(2, 100, 0.02, 1)
    compute[0] *= 2
    judged = found_in(steps_of(compute), strategy="tensor", grid=Grid(1, 1, 2))
    assert judged.rank is None
    assert "no rank" not in judged.evidence


def test_asynchronous_workers_are_compared_though_they_make_different_steps() -> None:
    compute = times(3, 120, 0.05, 1)
    compute[1] *= 2
    steps = {rank + 1: made for rank, made in steps_of(compute).items()}
    steps[2] = steps[2][::2]
    judged = judge(steps, {}, summary(3, "ps-async", servers=1))
    assert judged is not None
    assert (judged.kind, judged.rank) == (SLOW_RANK, 2)


def test_nothing_is_said_about_few_steps_or_one_rank() -> None:
    compute = times(2, FEWEST, 0.02, 1)
    assert judge(steps_of(compute), {}, summary(2)) is None  # the first ones are left out
    assert judge(steps_of(times(1, 100, 0.02, 1)), {}, summary(2)) is None
    assert judge({}, {}, summary(2)) is None
    assert judge({0: [], 1: []}, {}, summary(2)) is None


def test_steps_without_any_compute_are_no_error() -> None:
    judged = found_in(steps_of(0 * times(3, 100, 0.02, 1)))
    assert (judged.kind, judged.rank) == ("communication-bound", None)


def test_missing_steps_and_ranks_are_left_out() -> None:
    compute = times(4, 150, 0.02, 1)
    compute[3] *= 2
    steps = steps_of(compute)
    steps[0], steps[1] = steps[0][:70], []
    assert found_in(steps).rank == 3


def test_the_median_of_the_others_is_that_of_numpy() -> None:
    rng = np.random.default_rng(1)
    table = rng.random((5, 40))
    table[rng.random((5, 40)) < 0.3] = np.nan
    found = others(table)
    for rank, at in np.ndindex(table.shape):
        rest = np.delete(table[:, at], rank)
        rest = rest[np.isfinite(rest)]
        wanted = np.median(rest) if len(rest) and np.isfinite(table[rank, at]) else np.nan
        np.testing.assert_equal(found[rank, at], wanted)


def test_only_the_end_of_a_folder_counts_and_damage_is_left_out(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steady(0.1, 3 * LAST_STEPS), workers=3, compute=[0.3, 0.3, 0.6],
                       hosts=["node-a", "node-a", "node-b"])  # fmt: skip
    path = folder / "rank_2.jsonl"
    text = path.read_text()
    lines = text.splitlines()
    lines[-LAST_STEPS // 2] = lines[-LAST_STEPS // 2].replace('"seconds"', '"second"')
    path.write_text("no JSON\n" + "\n".join(lines) + '\n{"kind": "step", "st')
    judged = judge_folder(folder)
    assert judged is not None
    assert judged.sentence == "rank 2 on node-b computes 2.00 times slower than the median of the other ranks"
    path.write_text("\n".join(lines[: 2 * LAST_STEPS]))  # a rank that has written nothing of late
    judged = judge_folder(folder)
    assert judged is not None
    assert judged.rank is None
    (folder / "env.json").write_text("{")
    (folder / "rank_1.jsonl").unlink()
    assert judge_folder(folder) is None
    assert judge_folder(tmp_path) is None


def test_a_report_has_the_verdict_on_each_setting_where_the_time_goes(tmp_path: Path) -> None:
    """Of the settings with several workers; what most runs say, if they differ."""
    hosts = ["node-a", "node-a", "node-b"]
    for number, last in enumerate((0.6, 0.6, 0.3)):
        write_run(tmp_path / f"ring-{number}", steady(0.1, 60, number), workers=3, seed=number, hosts=hosts,
                  compute=[0.3, 0.3, last])  # fmt: skip
    write_run(tmp_path / "one", steady(0.2, 60))
    slow = "rank 2 on node-b computes 2.00 times slower than the median of the other ranks (in 2 of 3 runs)"
    (topic,) = [each for each in overview(read_study([tmp_path])).topics if each.heading == "Where the time goes"]
    (text,) = [each for each in topic.sentences if slow in each]
    assert text.startswith("The steps of ring")
    assert "Try the same run without node-b" in text
    write_run(tmp_path / "gather", steady(0.1, 60), workers=3, strategy="gather", compute=[0.8] * 3)
    (topic,) = [each for each in overview(read_study([tmp_path])).topics if each.heading == "Where the time goes"]
    (found,) = topic.tables
    cells = [[cell.text for cell in row] for row in found.table.rows]
    assert [row[1] for row in cells] == ["Compute-bound", slow[0].upper() + slow[1:]]

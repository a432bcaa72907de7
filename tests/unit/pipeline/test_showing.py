"""A plan as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.pipeline import showing
from paceline.pipeline.plan import Stage, StagePlan

MB = 10**6


def stage(number: int, layers: tuple[str, ...], seconds: float, transfer: float = 0.0, sends: int = 0) -> Stage:
    memory = {"base": 200 * MB, "weights": 4 * MB, "gradients": 4 * MB, "optimizer": 8 * MB, "working": 1500}
    memory["activations"] = (number + 1) * 1024 * MB
    return Stage(number, number + 1, layers, 1_000_000, seconds, transfer, sends, memory)


PLAN = StagePlan(
    (
        stage(0, ("conv1", "relu", "pool"), 0.020, 0.004, 2 * MB),
        stage(1, ("layer1.0.conv",), 0.010, 0.006, 1 * MB),
        stage(2, ("add", "fc"), 0.001, 0.002),
    ),
    schedule="1f1b",
    micros=8,
    micro_size=16,
    bandwidth=125 * MB,
    how="measured",
)


def test_a_plan_in_full() -> None:
    expected = """\
3 stages, 8 micro-batches of 16 samples, schedule 1f1b; cut where the slowest stage is fastest

stage  layers             parameters  compute, ms  transfer, ms  sends on   memory
    0  conv1 … pool (3)    1,000,000         20.0          4.00   2.00 MB  1.24 GB
    1  layer1.0.conv (1)   1,000,000         10.0          6.00   1.00 MB  2.26 GB
    2  add … fc (2)        1,000,000         1.00          2.00         –  3.29 GB

memory of stage    base  weights  gradients  optimizer  activations  working
              0  200 MB  4.00 MB    4.00 MB    8.00 MB      1.02 GB  1.50 kB
              1  200 MB  4.00 MB    4.00 MB    8.00 MB      2.05 GB  1.50 kB
              2  200 MB  4.00 MB    4.00 MB    8.00 MB      3.07 GB  1.50 kB

stage 0  █████████████████████████████████████████████████████░░░░░░░░░░░ 24.0 ms
         │ 2.00 MB forward for each micro-batch
stage 1  ███████████████████████████░░░░░░░░░░░░░░░░ 16.0 ms
         │ 1.00 MB forward for each micro-batch
stage 2  ███░░░░░ 3.00 ms
         █ computing a micro-batch, forward and backward   ░ sending and receiving at 1 Gbit/s

A step should take about (8 + 3 - 1) x 24.0 ms = 240 ms, 533 samples/s: stage 0 sets the pace.
Idle in theory, while the pipeline fills and drains: (3 - 1) / (8 + 3 - 1) = 20 % of the stages' time; with 16
micro-batches it would be 11 %.
Faster stages also wait for the slowest: on average stages take 60 % of its time."""
    assert "\n".join(showing.lines(PLAN)) == expected


def test_one_at_a_time_takes_the_sum_of_all_stages() -> None:
    plan = StagePlan((stage(0, ("a",), 0.3, sends=MB), stage(1, ("b",), 0.1)), "one-at-a-time", 4, 1, None, "layers")
    assert showing.pace(plan) == [
        "A step should take about 4 x 400 ms = 1,600 ms, 2.50 samples/s: one micro-batch after the other goes through",
        "all stages.",
        "Idle in theory, one stage at a time: (2 - 1) / 2 = 50 % of their time.",
    ]
    assert showing.heading(plan).endswith("of 1 sample, schedule one-at-a-time; cut by the number of layers")
    best = showing.heading(replace(plan, how="measured"))
    assert best.endswith("schedule one-at-a-time; cut where a micro-batch takes least time through all stages")
    assert showing.bars(plan)[-1].endswith("(without the cost of messages: see --bandwidth)")


def test_one_stage_has_no_bubble() -> None:
    plan = StagePlan((stage(0, ("a", "b"), 2.0),), "gpipe", 8, 4, None, "given")
    assert showing.pace(plan) == [
        "A step should take about 8 x 2,000 ms = 16.0 s, 2.00 samples/s: one stage computes them all."
    ]
    assert showing.heading(plan) == "1 stage, 8 micro-batches of 4 samples, schedule gpipe; cut as given"


def test_stages_that_are_equal_wait_for_nobody() -> None:
    plan = StagePlan((stage(0, ("a",), 1.0), stage(1, ("b",), 1.0)), "gpipe", 8, 4, None, "parameters")
    assert not any("Faster stages" in line for line in showing.pace(plan))


def test_a_stage_that_takes_next_to_no_time_is_drawn_all_the_same() -> None:
    plan = StagePlan((stage(0, ("a",), 1.0), stage(1, ("b",), 1e-6)), "gpipe", 8, 4, None, "given")
    assert showing.bars(plan)[2] == "stage 1  █ 0.00100 ms"


def test_where_no_layer_was_run_nothing_is_said_of_time_and_memory() -> None:
    plan = StagePlan(
        (stage(0, ("a", "b"), 0.0, 1e-3, MB), stage(1, ("c",), 0.0, 1e-3)), "gpipe", 3, 4, 1e9, "parameters"
    )
    assert showing.lines(plan) == [
        "2 stages, 3 micro-batches of 4 samples, schedule gpipe; cut by the number of parameters",
        "",
        "stage  layers     parameters  sends on",
        "    0  a … b (2)   1,000,000   1.00 MB",
        "    1  c (1)       1,000,000         –",
        "",
        "The time of a step was not predicted, because no layer was run.",
        "Idle in theory, while the pipeline fills and drains: (2 - 1) / (3 + 2 - 1) = 25 % of the stages' time; with 6",
        "micro-batches it would be 14 %.",
    ]


@pytest.mark.parametrize("stages", [1, 8, 64])
def test_no_line_is_wider_than_a_terminal_whatever_layers_are_called(stages: int) -> None:
    names = tuple(f"encoder.layers.{i}.attention.output.projection.{'x' * 40}" for i in range(100))
    made = tuple(stage(i, names, 1234.5, 0.0123, 10**12) for i in range(stages))
    lines = showing.lines(StagePlan(made, "one-at-a-time", 10_000, 10_000, 1e3, "parameters"))
    assert max(map(len, lines)) <= showing.WIDTH
    assert sum("…" in line for line in lines) == stages


def test_the_ends_of_long_names_are_kept() -> None:
    made = stage(0, ("features.denseblock1.conv1", "relu"), 1.0)
    assert showing.layers(made, 40) == "features.denseblock1.conv1 … relu (2)"
    assert showing.layers(made, 23) == "…lock1.conv1 … relu (2)"
    assert showing.layers(stage(0, ("features.denseblock1.conv1",), 1.0), 16) == "…lock1.conv1 (1)"

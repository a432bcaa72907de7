"""`paceline cut`: a plan without training, and how it says no."""

from __future__ import annotations

import argparse
import io
import json
import re

import pytest

from paceline.cli import cut, main
from paceline.pipeline.plan import MEMORY, StagePlan
from paceline.spec import RunSpec


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command that is refused, on one line."""
    try:
        code = main(["cut", *arguments])
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    said = capsys.readouterr()
    assert (code, said.out) == (2, "")
    assert "Traceback" not in said.err
    return said.err.splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: --stages"),
        (["--stages", "two"], "flag: --stages is 'two'; it takes a whole number"),
        (["--stages", "0"], "flag: --stages is 0; it takes numbers of at least 1"),
        (["--stages", "2", "--memory", "2GB,1GB,1GB"], "--memory 2GB,1GB,1GB has 3 values for 2 stages"),
        (["--stages", "3", "--memory", "2GB", "--memory", "1GB"], "--memory 2GB,1GB has 2 values for 3 stages"),
        (["--stages", "2", "--memory", "2XB"], "--memory is '2XB'; it takes a size such as 2GB, 512MB or 1.5GiB"),
        (["--stages", "2", "--speed", "1,0.5,2"], "--speed 1,0.5,2 has 3 values for 2 stages: give one for all, or 2"),
        (["--stages", "2", "--speed", "0"], "--speed is '0'"),
        (
            ["--stages", "2", "--bandwidth", "fast"],
            "--bandwidth is 'fast'; it takes the speed of a link, such as 1Gbit",
        ),
        (["--stages", "2", "--bandwidth", "1GB"], "--bandwidth is '1GB'"),
        (["--stages", "2", "--schedule", "f1b1"], "unknown schedule 'f1b1'; did you mean '1f1b'?"),
        (["--stages", "2", "--microbatches", "300"], "--microbatches 300 of a batch of 128: give at most 128"),
        (["--stages", "2", "--model", "resnet51"], "unknown model 'resnet51'; did you mean 'resnet"),
        (["--stages", "2", "--hidden", "64"], "--hidden is for the mlp"),
        (["--stages", "2", "--epochs", "3"], "unrecognized arguments: --epochs"),
        (["--stages", "2", "--band-width", "1gbit"], "did you mean '--bandwidth'?"),
    ],
)
def test_a_wrong_argument_is_refused_in_words(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, *arguments)


def spec_of(*arguments: str) -> RunSpec:
    parser = argparse.ArgumentParser()
    cut.add_arguments(parser)
    return cut.spec_of(parser.parse_args(arguments))


def test_a_cut_is_of_the_training_with_the_same_flags() -> None:
    model = ("--model", "mlp", "--hidden", "64,32", "--microbatches", "4", "--recompute", "--cut", "hidden.0,hidden.2")
    spec = spec_of(*model, "--stages", "3", "--memory", "2GB", "--memory", "1GB,1GB", "--speed", "1,1,0.05")
    assert (spec.strategy, spec.workers, spec.stages, spec.grid.replicas) == ("pipeline", 3, 3, 1)
    assert (spec.memory, spec.speed, spec.cut) == ("2GB,1GB,1GB", "1,1,0.05", "hidden.0,hidden.2")
    assert (spec.microbatches, spec.schedule, spec.recompute, spec.hidden) == (4, "1f1b", True, (64, 32))


def test_a_small_model_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cut", "--model", "mnist-cnn", "--stages", "2", "--data", "mnist-mini", "--batch-size", "16",
                 "--microbatches", "4", "--threads", "1"]  # fmt: skip
    assert main([*arguments, "--json", "--bandwidth", "1gbit"]) == 0
    plan = StagePlan.from_dict(json.loads(capsys.readouterr().out))
    assert sum(stage.parameters for stage in plan.stages) == 690_590
    assert (plan.micros, plan.micro_size, plan.bandwidth, plan.how) == (4, 4, 125e6, "measured")
    assert all(tuple(stage.memory) == MEMORY and stage.seconds > 0 for stage in plan.stages)
    assert plan.stages[0].transfer_seconds == pytest.approx(2 * plan.stages[0].forward_bytes / 125e6)

    layer = plan.stages[0].layers[-1]
    assert main([*arguments, "--cut", layer, "--memory", "4GB"]) == 0
    said = capsys.readouterr()
    assert f"… {layer} ({len(plan.stages[0].layers)})" in said.out
    assert "cut as given" in said.out
    assert said.err == ""

    message = refusal(capsys, *arguments[1:], "--memory", "4GB,50MB")
    assert re.search(r"no cut into 2 stages fits the memory: stage 1 has 50\.0 MB .* give it more memory", message)


def test_progress_is_shown_to_people_alone() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    for out, expected in (
        (io.StringIO(), ""),
        (Terminal(), "\rmeasuring layer 1 of 2\rmeasuring layer 2 of 2\r\033[K"),
    ):
        progress = cut.Progress(out)
        progress(0, 2)
        progress(1, 2)
        progress.done()
        assert out.getvalue() == expected

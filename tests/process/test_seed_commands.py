"""The settings of the published studies run as they are written, on made-up data of the real shapes."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_run import PACELINE, LiveRun

from paceline.run.records import COMPLETED

COLOUR, GREY = "synthetic:3x32x32,train=100,test=4", "synthetic:1x28x28,train=100,test=4"
COMMANDS = {
    "Torres": ["--model", "resnet50v2", "--data", COLOUR, "--image-size", "128", "--optimizer", "sgd", "--lr", "0.01"],
    "Shi": ["--model", "vgg16", "--data", COLOUR, "--optimizer", "sgd", "--lr", "0.0001"],
    "Pani": ["--model", "resnet18", "--data", GREY],
}
PARAMETERS = {"Torres": 23_539_850, "Shi": 33_638_218, "Pani": 11_172_810}


@pytest.mark.parametrize("study", COMMANDS)
def test_two_workers_take_two_steps(study: str, tmp_path: Path) -> None:
    command = [*PACELINE, *COMMANDS[study], "--workers", "2", "--batch-size", "2", "--steps", "2"]
    with LiveRun(command, tmp_path) as run:
        assert run.end() == 0, run.stderr()
        summary = run.summary()
        assert (summary.status, summary.steps, summary.workers) == (COMPLETED, 2, 2)
        assert summary.parameters == PARAMETERS[study]
        assert summary.test_loss is not None
        assert len(summary.input_seconds) == 2
        assert all(0 < waited < sum(summary.epoch_seconds) for waited in summary.input_seconds)
        run.check_nothing_is_left()

"""TensorBoard follows a user's own loop that is recorded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from event_files import scalars

import paceline
from paceline.comm.single import SingleComm
from paceline.errors import UsageError


def test_a_recorded_loop_writes_events_as_it_trains(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25)
    losses = []
    with paceline.record(tmp_path / "run", model, tensorboard=True, comm=SingleComm()) as run:
        for _ in range(4):
            with run.step() as step:
                optimizer.zero_grad()
                loss = model(torch.ones(8, 3)).square().mean()
                loss.backward()
                optimizer.step()
                step.log(loss=loss, f1=0.5)
            losses.append(loss.item())
        run.validation(loss=0.125)
    shown = scalars(tmp_path / "run" / "tensorboard" / "rank_0")
    assert [(step, value) for step, _, value in shown["train/loss"]] == list(enumerate(losses))
    assert [value for *_, value in shown["train/f1"]] == [0.5] * 4
    assert [(step, value) for step, _, value in shown["validation/loss"]] == [(4, 0.125)]
    assert "seconds/forward" in shown


def test_without_tensorboardx_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    run = paceline.record(tmp_path / "run", torch.nn.Linear(1, 1), tensorboard=True)
    with pytest.raises(UsageError, match="tensorboard=True: tensorboardX is not installed"), run:
        pass
    assert not list(tmp_path.iterdir())

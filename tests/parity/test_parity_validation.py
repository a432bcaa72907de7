"""Every synchronous strategy is validated after the updates of one process, to the same losses, and stops with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import parity_cases as cases
import pytest
from parity_cases import distance, values_for
from raw_lines import raw_lines
from safetensors.torch import load_file
from served import train_served
from torch import Tensor
from worlds import ThreadWorld

from paceline.run.folder import read_summary
from paceline.run.records import COMPLETED, Summary

# 109 samples are trained on, in 5 updates an epoch; the loss on the others rises for a while.
VALIDATED: dict[str, Any] = {
    "validation": 0.25,
    "lr": 0.05,
    "scale_lr": False,
    "epochs": 6,
    "decay": "none",
    "log_every": 0,
}
STOPPING: dict[str, Any] = VALIDATED | {"evaluate_every": 3, "patience": 3}
STRATEGIES: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("allreduce", "ring", "reduce-bcast", "gather", "sharded", "tensor")},
    "local-sgd": {"sync_every": 1, "averaging": "ring"},
    "pipeline": {"microbatches": 2, "cut": "parameters"},
    "ps-sync": {"servers": 2},
    "ps-async": {"servers": 2, "workers": 1},
}


def train(folder: Path, strategy: str, workers: int, more: dict[str, Any]) -> tuple[Summary, dict[str, Tensor]]:
    values = values_for("mlp-sgd", workers, strategy=strategy, momentum=0.0) | more
    values["batch_size"] = 24 if strategy in ("tensor", "pipeline", "ps-async") else values["batch_size"]
    folder.mkdir()
    if strategy.startswith("ps-"):
        return train_served(values, folder)
    ThreadWorld(workers).run(cases.train_here, folder=str(folder), values=values)
    summary = read_summary(folder)
    assert summary is not None
    return summary, load_file(folder / "model.safetensors")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[Summary, dict[str, Tensor]]:
    """One process that stops early, in the middle of an epoch."""
    folder = tmp_path_factory.mktemp("alone")
    found = train(folder / "run", "sequential", 1, STOPPING)
    summary = found[0]
    steps, losses = summary.validation_steps, summary.validation_loss
    best = losses.index(min(losses))
    assert best > 0
    assert steps == [3 * number for number in range(1, best + 5)]
    assert summary.steps == steps[-1] < 30
    assert summary.steps % 5
    assert (summary.best_step, summary.best_epoch) == (steps[best], (steps[best] - 1) // 5)
    _, shorter = train(folder / "shorter", "sequential", 1, VALIDATED | {"steps": steps[best]})
    assert distance(found[1], shorter) == 0
    assert summary.stopped_early == "no better loss in the last 3 validations"
    assert summary.status == COMPLETED
    assert summary.epochs == len(summary.train_loss) == -(-summary.steps // 5)
    return found


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_all_ranks_stop_after_the_update_of_one_process(
    alone: tuple[Summary, dict[str, Tensor]], tmp_path: Path, strategy: str
) -> None:
    workers = STRATEGIES[strategy].get("workers", 3)
    summary, weights = train(tmp_path / "run", strategy, workers, STOPPING | STRATEGIES[strategy])
    wanted = alone[0]
    for name in ("steps", "epochs", "validation_steps", "best_step", "best_epoch", "stopped_early", "status"):
        assert getattr(summary, name) == getattr(wanted, name), name
    for name in ("validation_loss", "train_loss", "test_loss"):
        assert getattr(summary, name) == pytest.approx(getattr(wanted, name), rel=1e-10), name
    assert distance(weights, alone[1]) <= 1e-10
    for path in (tmp_path / "run").glob("rank_*.jsonl"):
        steps = [line["step"] for line in raw_lines(path) if line["kind"] == "step"]
        assert strategy.startswith("ps-") or steps == list(range(wanted.steps))


def test_validating_more_often_does_not_change_the_training(tmp_path: Path) -> None:
    often, seldom = (
        train(tmp_path / str(every), "ring", 3, VALIDATED | {"evaluate_every": every})[0] for every in (3, 0)
    )
    assert seldom.validation_steps == [5, 10, 15, 20, 25, 30]
    assert often.validation_steps == [*range(3, 31, 3)]
    assert often.train_loss == seldom.train_loss
    assert often.validation_loss[4::5] == seldom.validation_loss[2::3]  # after 15 and 30 updates
    assert (often.steps, often.epochs, often.stopped_early) == (30, 6, None)


def test_the_best_accuracy_need_not_have_the_lowest_loss(tmp_path: Path) -> None:
    found = {}
    for strategy in ("sequential", "ps-sync"):
        more = VALIDATED | {"evaluate_every": 2, "best_by": "accuracy"}
        summary, found[strategy] = train(tmp_path / strategy, strategy, 1, more)
        best = summary.validation_accuracy.index(max(summary.validation_accuracy))
        assert summary.best_step == summary.validation_steps[best]
        assert summary.validation_loss[best] > min(summary.validation_loss)
    assert distance(*found.values()) <= 1e-10

"""Local SGD against the plain loop, and against one of its own: every worker alone, averaged now and then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
from parity_cases import check_trains, data_of, distance, model_of, values_for
from raw_lines import raw_lines
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from worlds import ThreadWorld, Worlds

from paceline.collectives.ring import RING
from paceline.run.folder import read_summary
from paceline.strategies.synchronous import RIDERS

# 144 samples in steps of 24: six steps an epoch, in which all workers have as many samples.
EVEN = {"data": "synthetic:1x16x16,train=144,test=30", "momentum": 0.0, "scale_lr": False, "decay": "none"}
LOCAL = {"strategy": "local-sgd", "averaging": "ring"}


@pytest.mark.parametrize(("transport", "workers"), [("threads", 2), ("threads", 3), ("gloo", 3), ("mpi", 2)])
@pytest.mark.parametrize("setting", ["mlp-sgd", "norm-sgd"])
def test_averaging_after_every_step_of_plain_sgd_is_synchronous_training(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, workers: int, setting: str
) -> None:
    """With ragged last batches, in which workers have parts of different size or none, and batch-norm statistics."""
    values = values_for(setting, workers, momentum=0.0)
    check_trains(worlds.get(transport, workers), tmp_path, values | LOCAL | {"sync_every": 1}, expected(values))


def test_the_first_steps_are_synchronous_with_any_optimizer(expected: Any, tmp_path: Path) -> None:
    values, local = values_for("cnn-adam", 3), LOCAL | {"sync_every": 100, "sync_first": 1000}
    check_trains(ThreadWorld(3), tmp_path, values | local, expected(values))


def plain_local_sgd(values: dict[str, Any], workers: int, every: int, steps: int) -> dict[str, torch.Tensor]:
    """Plain PyTorch: a model and an optimizer for each worker; after so many steps the mean of all weights."""
    data, models = data_of(values), [model_of(values).double() for _ in range(workers)]
    momentum, decay = values["momentum"], values["weight_decay"]
    optimizers = [torch.optim.SGD(m.parameters(), values["lr"], momentum, weight_decay=decay) for m in models]
    images, labels = torch.from_numpy(data.train).double() / 255, torch.from_numpy(data.train_labels).long()
    orders = [np.random.default_rng([0, 0, epoch]).permutation(len(images)) for epoch in range(10)]
    per_epoch, size = len(images) // 24, 24 // workers
    for step in range(steps):
        batch = orders[step // per_epoch][step % per_epoch * 24 :][:24]
        for worker, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            own = torch.from_numpy(batch[worker * size : (worker + 1) * size])
            optimizer.zero_grad()
            cross_entropy(model(images[own]), labels[own]).backward()
            optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            with torch.no_grad():
                for same in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack([p.detach() for p in same]).mean(0)
                    for p in same:
                        p.copy_(mean)
    return models[0].state_dict()


@pytest.mark.parametrize(("every", "momentum"), [(4, 0.0), (5, 0.9)])
def test_workers_that_train_alone_for_a_while_are_those_of_a_plain_loop(
    tmp_path: Path, every: int, momentum: float
) -> None:
    """17 steps: the last round is cut short by the end of the training."""
    values = values_for("mlp-sgd", 3, **EVEN | {"momentum": momentum, "sync_every": every, "steps": 17}, **LOCAL)
    ThreadWorld(3).run(cases.train_here, folder=str(tmp_path), values=values)
    wanted = plain_local_sgd(values, 3, every, 17)
    assert distance(load_file(tmp_path / "model.safetensors"), wanted) <= 1e-12


def test_it_sends_what_the_ring_costs_once_in_so_many_steps(tmp_path: Path) -> None:
    sent = {}
    for every in (1, 3, 6):
        folder = tmp_path / str(every)
        values = values_for("mlp-sgd", 3, **EVEN | {"sync_every": every, "steps": 12, "test": False}, **LOCAL)
        ThreadWorld(3).run(cases.train_here, folder=str(folder), values=values)
        summary = read_summary(folder)
        assert summary is not None
        assert summary.parameters is not None
        cost = RING.cost(3, summary.parameters + RIDERS, 8)
        assert summary.bytes_sent == [12 // every * each for each in cost.bytes_sent]
        assert summary.bytes_received == [12 // every * each for each in cost.bytes_received]
        assert summary.wire == "exact"
        sent[every] = sum(summary.bytes_sent)
    assert sent[1] == 3 * sent[3] == 6 * sent[6]


def test_steps_of_a_workers_own_have_its_own_loss_and_the_last_of_a_round_has_everybodys(tmp_path: Path) -> None:
    values = values_for("mlp-sgd", 2, **EVEN | {"sync_every": 3, "steps": 6}, **LOCAL)
    ThreadWorld(2).run(cases.train_here, folder=str(tmp_path), values=values)
    lines = [[r for r in raw_lines(tmp_path / f"rank_{rank}.jsonl") if r["kind"] == "step"] for rank in (0, 1)]
    same = [one["loss"] == other["loss"] for one, other in zip(*lines, strict=True)]
    assert same == [False, False, True, False, False, True]


def test_replicas_are_compared_after_an_average(tmp_path: Path) -> None:
    values = values_for("norm-sgd", 3, sync_every=4, check_replicas=3, steps=12, **LOCAL)
    ThreadWorld(3).run(cases.train_here, folder=str(tmp_path), values=values)
    spans = [r["spans"] for r in raw_lines(tmp_path / "rank_0.jsonl") if r["kind"] == "step"]
    assert ["check" in span for span in spans] == [step % 4 == 0 for step in range(1, 13)]


def test_a_rank_may_have_no_samples(tmp_path: Path) -> None:
    values = {name: value for name, value in values_for("norm-sgd", 4).items() if name != "batch_size"}
    values |= LOCAL | {"global_batch": 2, "steps": 5, "sync_every": 10}
    assert ThreadWorld(4).run(cases.train_here, folder=str(tmp_path), values=values) == [5] * 4
    assert [r for r in raw_lines(tmp_path / "rank_0.jsonl") if r["kind"] == "epoch"]

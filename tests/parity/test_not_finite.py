"""A model that is not finite is an error that names step, tensor and, where one is to blame, rank; never a result."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import spoiled_cases as cases
from fitting import fitting
from parity_cases import values_for
from served import train_served
from worlds import ThreadWorld

from paceline.comm.single import SingleComm
from paceline.data.input import OwnInput
from paceline.data.sampler import shuffle
from paceline.spec import resolve
from paceline.strategies.setup import choose_place
from paceline.training.setup import make_input

STEPS, WORKERS = 4, 3


def spoiled(**more: Any) -> dict[str, Any]:
    """The last sample of the last step is poison: the last of three workers has it."""
    data = {"data": f"synthetic:1x8x8,train={24 * STEPS},test=30", "model": "spoiled", "epochs": 1}
    values = values_for("mlp-sgd", WORKERS, **data, **more)
    spec = resolve(("test", fitting(values | {"model": "mlp"}))).spec
    source = make_input(spec, SingleComm(), choose_place(spec, 0))
    assert isinstance(source, OwnInput)
    last = shuffle(24 * STEPS, spec.seed, 0)[-1:]
    cases.register(float(source.pick("train", last, 0).inputs.flatten()[0]))
    return values


@pytest.mark.parametrize("strategy", ["ring", "sharded"])
def test_a_bad_gradient_in_the_last_step_is_found_and_its_rank_is_named(tmp_path: Path, strategy: str) -> None:
    answers = ThreadWorld(WORKERS).run(cases.fails, folder=str(tmp_path), values=spoiled(strategy=strategy))
    for message, rank in answers:
        assert f"a gradient is not finite after step {STEPS}" in message
        assert "the first tensor that is not finite is last.weight" in message
        assert rank == 2
        assert "check the samples of rank 2 in that step" in message
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(("strategy", "servers"), [("ps-sync", 2), ("ps-async", 1)])
def test_servers_name_the_worker_that_sent_a_bad_gradient(tmp_path: Path, strategy: str, servers: int) -> None:
    values = spoiled(strategy=strategy, servers=servers)
    with pytest.raises(pytest.fail.Exception) as failure:
        train_served(values, tmp_path)
    (message,) = {line for line in str(failure.value).splitlines() if "DivergedError" in line}
    if strategy == "ps-sync":
        assert f"after step {STEPS}" in message
        assert f"check the samples of rank {servers + 2} in" in message
    assert "check the samples of rank" in message
    assert "the first tensor that is not finite is last.weight" in message
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(("strategy", "servers"), [("sequential", None), ("ps-sync", 2)])
@pytest.mark.parametrize(("evaluated", "validation", "steps"), [("test", 0.0, 2 * STEPS), ("validation", 0.25, STEPS)])
def test_an_evaluation_that_is_not_finite_fails_a_run_whose_weights_are(
    tmp_path: Path, strategy: str, servers: int | None, evaluated: str, validation: float, steps: int
) -> None:
    """The validation set is looked at after the first of two epochs, the test set after both."""
    samples = 24 * STEPS * 4 // 3 if validation else 24 * STEPS
    data = {"data": f"synthetic:1x8x8,train={samples},test=30", "model": "spoiled_cases:Blind", "epochs": 2}
    values = values_for("mlp-sgd", WORKERS if servers else 1, strategy=strategy, servers=servers, **data)
    values = {name: value for name, value in values.items() if name != "dropout"} | {"validation": validation}
    if servers:
        with pytest.raises(pytest.fail.Exception) as failure:
            train_served(values, tmp_path)
        message = str(failure.value)
    else:
        [(message, _)] = ThreadWorld(1).run(cases.fails, folder=str(tmp_path), values=values)
    assert f"the {evaluated} loss is nan after step {steps}" in message
    assert "the first tensor that is not finite" not in message
    assert not (tmp_path / "model.safetensors").exists()


OVERFLOW: dict[str, Any] = {"steps": 1, "lr": 1e308, "weight_decay": 1e3}
DIVIDED: dict[str, dict[str, Any]] = {
    "pipeline": {"stages": 2, "cut": "layers", "microbatches": 2},
    "tensor": {"tensor": 2},
}


@pytest.mark.parametrize(("strategy", "workers"), [("sequential", 1), ("sharded", 2), ("pipeline", 2), ("tensor", 2)])
def test_a_last_step_that_overflows_is_blamed_on_the_learning_rate(tmp_path: Path, strategy: str, workers: int) -> None:
    values = values_for("mlp-sgd", workers, strategy=strategy, **OVERFLOW, **DIVIDED.get(strategy, {}))
    for message, rank in ThreadWorld(workers).run(cases.fails, folder=str(tmp_path), values=values):
        assert rank is None
        assert "the model is not finite after step 1: the training has diverged; lower --lr" in message
        assert "the first tensor that is not finite is " in message
    assert not (tmp_path / "model.safetensors").exists()


def test_servers_do_not_save_what_overflowed(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception) as failure:
        train_served(values_for("mlp-sgd", 2, strategy="ps-sync", test=False, **OVERFLOW), tmp_path)
    assert "the model is not finite after step 1: the training has diverged; lower --lr" in str(failure.value)
    assert not (tmp_path / "model.safetensors").exists()

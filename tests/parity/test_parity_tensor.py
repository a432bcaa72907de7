"""A model whose wide layers are split trains what one process trains; replicas of it too, with every averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensor_cases as cases
from parity_cases import distance, train_here
from safetensors.torch import load_file
from worlds import TRANSPORTS, ThreadWorld, Worlds

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.records import read_summary
from paceline.training.weights import save


@pytest.mark.parametrize(("shards", "optimizer"), [(2, "adam"), (4, "sgd")])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_shards_train_the_model_of_one_process(worlds: Worlds, transport: str, shards: int, optimizer: str) -> None:
    found = worlds.get(transport, shards).run(cases.trains_the_same, shards=shards, steps=10, optimizer=optimizer)
    for weights, test_loss, moved in found:
        assert weights <= 1e-10
        assert test_loss <= 1e-10
        assert moved > 1e-4


@pytest.mark.parametrize("averaging", AVERAGINGS)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_two_replicas_of_two_shards_train_it_too(worlds: Worlds, transport: str, averaging: str) -> None:
    overlap = {"ring": "on", "gather": "auto"}.get(averaging, "off")
    found = worlds.get(transport, 4).run(
        cases.trains_the_same,
        **{"shards": 2, "steps": 6, "optimizer": "sgd", "averaging": averaging, "overlap": overlap},
        **{"sync_batchnorm": True, "bucket_mb": 0.1},
    )
    for weights, test_loss, moved in found:
        assert weights <= 1e-10
        assert test_loss <= 1e-10
        assert moved > 1e-4


@pytest.mark.parametrize(("shards", "wisher"), [(2, 3), (4, 1), (2, 0)])
def test_the_wish_of_any_one_rank_to_stop_reaches_all_in_the_same_step(shards: int, wisher: int) -> None:
    found = ThreadWorld(4).run(cases.one_wishes_to_stop, shards=shards, wisher=wisher)
    assert found == [[False, False, True, False]] * 4


LOOP = {"model": "mnist-cnn", "data": "synthetic:1x22x22,train=112,test=9", "batch_size": 12, "epochs": 1, "lr": 0.05,
        "optimizer": "sgd", "dropout": 0.0, "dtype": "float64", "scale_lr": False, "timeout": 20.0}  # fmt: skip


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("whole")
    assert ThreadWorld(1).run(train_here, folder=str(folder), values=LOOP) == [10]
    return load_file(folder / "model.safetensors"), read_summary(folder)


@pytest.mark.parametrize(
    ("transport", "workers", "shards"),
    [("threads", 2, 2), ("gloo", 2, 2), ("mpi", 2, 2), ("threads", 4, 4), ("gloo", 4, 4), ("mpi", 4, 4),
     ("threads", 4, 2), ("gloo", 4, 2), ("mpi", 4, 2)],
)  # fmt: skip
def test_the_training_loop_starts_trains_and_saves_the_parts_of_what_one_process_does(
    worlds: Worlds, one_process: Any, tmp_path: Path, transport: str, workers: int, shards: int
) -> None:
    values = LOOP | {"batch_size": 12 // (workers // shards), "strategy": "tensor", "workers": workers}
    values |= {"tensor": shards, "averaging": "ring", "check_replicas": 5}
    ranks = worlds.get(transport, workers).run(train_here, folder=str(tmp_path), values=values)
    assert ranks == [10] * workers
    weights, summary = one_process
    assert distance(load_file(tmp_path / "model.safetensors"), weights) <= 1e-10
    found = read_summary(tmp_path)
    assert found is not None
    assert found.parameters == summary.parameters
    assert found.test_loss == pytest.approx(summary.test_loss, abs=1e-9)


def test_shards_start_from_a_file(worlds: Worlds, one_process: Any, tmp_path: Path) -> None:
    weights, _ = one_process
    save(weights, tmp_path / "start.safetensors")
    values = LOOP | {"weights": str(tmp_path / "start.safetensors"), "steps": 2, "seed": 3}
    assert ThreadWorld(1).run(train_here, folder=str(tmp_path / "1"), values=values) == [2]
    parts = values | {"strategy": "tensor", "workers": 2}
    assert worlds.get("gloo", 2).run(train_here, folder=str(tmp_path / "2"), values=parts) == [2] * 2
    one, two = (load_file(tmp_path / n / "model.safetensors") for n in ("1", "2"))
    assert distance(one, two) <= 1e-10

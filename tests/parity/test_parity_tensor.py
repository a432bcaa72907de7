"""A model whose wide layers are split trains what the plain loop trains; replicas of it too, with every averaging."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tensor_cases as cases
from parity_cases import check_trains
from worlds import ThreadWorld, Worlds

# 29 samples in batches of 14: the last one has a single sample, which one replica gets.
DATA = "synthetic:3x9x9,classes=5,train=29,test=9"
SMALL = {"model": "tensor_cases:Small", "data": DATA, "epochs": 3, "dtype": "float64", "timeout": 20.0,
         "strategy": "tensor", "check_replicas": 4}  # fmt: skip
ADAM = {"optimizer": "adam", "lr": 0.002}
ADAMW = {"optimizer": "adamw", "lr": 0.002, "weight_decay": 0.1}
SGD = {"optimizer": "sgd", "lr": 0.02, "weight_decay": 0.001}


@pytest.mark.parametrize(
    ("transport", "shards", "optimizer"),
    [("threads", 2, ADAM), ("threads", 3, SGD), ("threads", 4, ADAM), ("threads", 2, ADAMW), ("gloo", 2, SGD),
     ("gloo", 4, ADAM), ("mpi", 2, ADAM), ("mpi", 4, SGD)],
)  # fmt: skip
def test_shards_train_the_model_of_the_plain_loop(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, shards: int, optimizer: dict[str, Any]
) -> None:
    values = SMALL | optimizer | {"workers": shards, "batch_size": 14}
    check_trains(worlds.get(transport, shards), tmp_path, values, expected(values), 1e-10)


@pytest.mark.parametrize(
    ("transport", "averaging", "overlap"),
    [("threads", "allreduce", "off"), ("threads", "ring", "on"), ("threads", "reduce-bcast", "off"),
     ("threads", "gather", "auto"), ("gloo", "ring", "on"), ("mpi", "gather", "auto")],
)  # fmt: skip
def test_two_replicas_of_two_shards_train_it_too(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, averaging: str, overlap: str
) -> None:
    values = SMALL | SGD | {"workers": 4, "tensor": 2, "batch_size": 7}
    values |= {"averaging": averaging, "overlap": overlap, "bucket_mb": 0.1}
    check_trains(worlds.get(transport, 4), tmp_path / "29", values, expected(values), 1e-10)
    values |= {"data": DATA.replace("29", "31")}  # of the last 3 samples, the replicas have 1 and 2
    check_trains(worlds.get(transport, 4), tmp_path / "31", values, expected(values), 1e-10)


@pytest.mark.parametrize("seed_or_file", ["seed", "file"])
def test_shards_of_one_of_our_models_start_as_the_whole_one_does(
    worlds: Worlds, expected: Any, tmp_path: Path, seed_or_file: str
) -> None:
    values = SMALL | SGD | {"model": "mnist-cnn", "data": "synthetic:1x22x22,train=25,test=9", "dropout": 0.0}
    values |= {"workers": 2, "batch_size": 12, "epochs": 1}
    if seed_or_file == "file":
        values |= {"weights": str(expected.start(values | {"seed": 1}))}
    summary = check_trains(worlds.get("gloo", 2), tmp_path, values, expected(values), 1e-10)
    assert summary.parameters == sum(tensor.numel() for tensor in expected(values).weights.values())


@pytest.mark.parametrize(("shards", "wisher"), [(2, 3), (4, 1), (2, 0)])
def test_the_wish_of_any_one_rank_to_stop_reaches_all_in_the_same_step(shards: int, wisher: int) -> None:
    found = ThreadWorld(4).run(cases.one_wishes_to_stop, shards=shards, wisher=wisher)
    assert found == [[False, False, True, False]] * 4

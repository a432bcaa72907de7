"""One process, and workers with every averaging, train the model that the plain loop trains."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import parity_cases as cases
import pytest
import torch
from parity_cases import SETTINGS, check_trains, distance, values_for
from PIL import Image
from safetensors.torch import load_file
from worlds import TRANSPORTS, ThreadWorld, Worlds

from paceline.strategies.table import TABLE

AVERAGINGS = [name for name, info in TABLE.items() if info.averaging]


@pytest.mark.parametrize("setting", SETTINGS)
def test_one_process_trains_the_model_of_the_plain_loop(expected: Any, tmp_path: Path, setting: str) -> None:
    seeded = values_for(setting, 1, sync_batchnorm=False)
    from_a_file = seeded | {"weights": str(expected.start(seeded | {"seed": 1}))}
    for number, values in enumerate((seeded, from_a_file, seeded | {"microbatches": 3, "decay": "none"})):
        check_trains(ThreadWorld(1), tmp_path / str(number), values, expected(values), SETTINGS[setting][1])


@pytest.mark.parametrize(("transport", "workers"), list(product(TRANSPORTS, (2, 3, 4))))
@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_workers_train_the_model_of_the_plain_loop(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, workers: int, averaging: str
) -> None:
    # On each transport each averaging has every setting with one number of workers; on threads, batch-norm with all.
    settings = list(SETTINGS)[workers % 3 :: 3]
    for setting in {*settings, "norm-sgd"} if transport == "threads" else settings:
        values = values_for(setting, workers, strategy=averaging)
        world, tolerance = worlds.get(transport, workers), SETTINGS[setting][1]
        check_trains(world, tmp_path / setting, values, expected(values), tolerance)


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_a_rank_that_updates_late_reads_the_sums_that_the_others_have_clipped(
    worlds: Worlds, expected: Any, tmp_path: Path, overlap: str
) -> None:
    """The sums lie in memory that all ranks read: nobody may write to them, in this step or in the next."""
    for workers, late in ((2, 0), (3, 1)):
        values = values_for("cnn-adam", workers, strategy="allreduce", clip_norm=0.3, bucket_mb=0.1, overlap=overlap)
        summary = check_trains(worlds.get("shm", workers), tmp_path / str(workers), values, expected(values),
                               case=cases.train_with_late_updates, late=late)  # fmt: skip
        assert summary.wire == "exact"


@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_one_worker_that_averages_with_nobody_trains_it_too(expected: Any, tmp_path: Path, averaging: str) -> None:
    values = values_for("norm-sgd", 1, strategy=averaging)
    check_trains(ThreadWorld(1), tmp_path, values, expected(values))


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_a_parameter_without_a_gradient_is_left_alone(
    expected: Any, tmp_path: Path, averaging: str, workers: int
) -> None:
    """Neither decay nor what the optimizer kept moves it; a frozen one never moves."""
    for number, more in enumerate(({}, {"overlap": "on", "bucket_mb": 0.001})):
        model = {"model": "parity_cases:SometimesUsed", "optimizer": "adamw", "weight_decay": 0.1, "scale_lr": False}
        values = values_for("norm-sgd", workers, strategy=averaging, **(model | more))
        wanted = expected(values)
        check_trains(ThreadWorld(workers), tmp_path / str(number), values, wanted)
        start = cases.model_of(values).state_dict()
        assert torch.equal(start["frozen"].double(), wanted.weights["frozen"])
        assert not torch.equal(start["sometimes"].double(), wanted.weights["sometimes"])


@pytest.mark.parametrize("workers", [2, 4])
def test_ranks_without_a_value_to_update_take_part(expected: Any, tmp_path: Path, workers: int) -> None:
    """In buckets of one parameter most slices of a few values are empty."""
    values = values_for("norm-sgd", workers, strategy="sharded", model="parity_cases:OneNumber")
    check_trains(ThreadWorld(workers), tmp_path, values, expected(values))


def test_the_learning_rate_is_scaled_warmed_up_and_let_fall_as_asked(expected: Any, tmp_path: Path) -> None:
    asked: list[dict[str, Any]] = [
        {"scale_lr": False},
        {"warmup_epochs": 0.5},
        {"warmup_epochs": 0.0, "decay": "none"},
        {"scale_lr": False, "warmup_steps": 5, "decay": "linear"},
        {"warmup_steps": 5, "decay": "step", "decay_every": 1.0, "decay_factor": 0.5},
    ]
    for number, more in enumerate(asked):
        values = values_for("mlp-sgd", 2, strategy="ring", **more)
        check_trains(ThreadWorld(2), tmp_path / str(number), values, expected(values))


@pytest.mark.parametrize(
    "more",
    [
        {"overlap": "on", "bucket_mb": 0.01, "read": "scatter"},
        {"overlap": "auto", "bucket_mb": 0.05, "check_replicas": 3},
    ],
    ids=["on", "auto"],
)
@pytest.mark.parametrize("strategy", ["ring", "sharded"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_options_that_must_not_change_the_result_do_not(
    worlds: Worlds, expected: Any, tmp_path: Path, transport: str, strategy: str, more: dict[str, Any]
) -> None:
    for setting in ("cnn-adam", "sync-norm-adam"):
        values = values_for(setting, 3, strategy=strategy, **more)
        check_trains(worlds.get(transport, 3), tmp_path / setting, values, expected(values))


def test_workers_hold_out_the_samples_and_keep_the_epoch_that_one_process_does(tmp_path: Path) -> None:
    more = {"validation": 0.25, "lr": 0.02, "scale_lr": False}
    for workers in (1, 3):
        values = values_for("sync-norm-adam", workers, **more) | {"sync_batchnorm": workers > 1}
        ThreadWorld(workers).run(cases.train_here, folder=str(tmp_path / str(workers)), values=values)
    one, three = (load_file(tmp_path / n / "model.safetensors") for n in ("1", "3"))
    assert distance(three, one) <= 1e-12


def test_however_a_folder_of_images_is_read_the_same_model_is_trained(worlds: Worlds, tmp_path: Path) -> None:
    """By every rank, by rank 0 alone, or by all together."""
    for number in range(24):
        place = tmp_path / "pictures" / f"kind-{number % 3}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((8, 8), 80 * (number % 3) + number, np.uint8)).save(place / f"{number}.png")
    values = {"model": "mlp", "data": f"images:{tmp_path / 'pictures'}", "workers": 3, "batch_size": 2, "epochs": 1}
    values |= {"validation": 0.2, "augment": "crop-flip", "transport": "mpi"}
    models = []
    for read in ("own", "scatter", "mpi-io"):
        more = {"folder": str(tmp_path / read), "values": values | {"read": read}, "cache": str(tmp_path / "cache")}
        assert worlds.get("mpi", 3).run(cases.train_from_pictures, **more) == [3] * 3
        models.append((tmp_path / read / "model.safetensors").read_bytes())
    assert models[0] == models[1] == models[2]

"""ResNet-18 on CIFAR-10 with augmentation: workers with synchronised batch-norm train what one process trains."""

from __future__ import annotations

from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import parity_cases as cases
import pytest
from parity_cases import distance
from safetensors.torch import load_file
from worlds import ThreadWorld, Worlds

from paceline.data import cache as data_cache
from paceline.data.origins import ORIGINS

STEPS = 3
# 13 samples in batches of 6: the last step has one, and some ranks have none.
MADE_UP = "synthetic:3x32x32,train=13,test=12"
# Tests fetch nothing: the real images are used where they are in the cache already.
CACHED = data_cache.has(data_cache.file_of("cifar10"), ORIGINS["cifar10"].size)
DATA = [MADE_UP, "cifar10"] if CACHED else [MADE_UP]


def values_for(data: str, workers: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "resnet18", "data": data, "augment": "crop-flip", "dtype": "float64", "optimizer": "sgd", "lr": 0.05,
        "weight_decay": 5e-4, "scale_lr": False, "workers": workers, "batch_size": 6 // workers, "steps": STEPS,
        "timeout": 60.0, "test": False, "overlap": "off", **more,
    }  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of one process, trained once for each data set."""

    @cache
    def weights(data: str) -> Any:
        folder = tmp_path_factory.mktemp("alone")
        assert ThreadWorld(1).run(cases.train_here, folder=str(folder), values=values_for(data, 1)) == [STEPS]
        return load_file(folder / "model.safetensors")

    return weights


@pytest.mark.parametrize("strategy", ["ring", "sharded"])
@pytest.mark.parametrize("data", DATA)
def test_workers_train_the_resnet_of_one_process(
    worlds: Worlds, alone: Any, tmp_path: Path, data: str, strategy: str
) -> None:
    values = values_for(data, 3, strategy=strategy, sync_batchnorm=True)
    assert worlds.get("gloo", 3).run(cases.train_here, folder=str(tmp_path), values=values) == [STEPS] * 3
    assert distance(load_file(tmp_path / "model.safetensors"), alone(data)) <= 1e-10


def test_without_the_same_augmentation_it_is_another_model(tmp_path: Path) -> None:
    found = []
    for augment in ("crop-flip", "crop", "none"):
        values = values_for(MADE_UP, 1, model="parity_cases:TinyNorm") | {"augment": augment}
        assert ThreadWorld(1).run(cases.train_here, folder=str(tmp_path / augment), values=values) == [STEPS]
        found.append(load_file(tmp_path / augment / "model.safetensors"))
    assert min(distance(a, b) for a, b in combinations(found, 2)) > 1e-4

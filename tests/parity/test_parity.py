"""Every synchronous strategy trains the model that one process with the global batch trains."""

from __future__ import annotations

from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import parity_cases as cases
import pytest
import torch
from safetensors.torch import load_file
from worlds import TRANSPORTS, ThreadWorld, Worlds

from paceline.strategies.table import TABLE

AVERAGINGS = [name for name, info in TABLE.items() if info.averaging]
STEPS = 21
# What is trained, to how close its weights must come, in which precision.
EXACT = {"dtype": "float64"}
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    f"{model}-{optimizer}": ({"model": model, "optimizer": optimizer, **EXACT}, 1e-12)
    for model in ("shallow-cnn", "mlp")
    for optimizer in ("adam", "sgd")
} | {
    "tiny-norm-adam": ({"model": "tiny-norm", "optimizer": "adam", "sync_batchnorm": True, **EXACT}, 1e-12),
    "tiny-norm-sgd": ({"model": "tiny-norm", "optimizer": "sgd", "sync_batchnorm": True, **EXACT}, 1e-12),
    "shallow-cnn-float32": ({"model": "shallow-cnn", "optimizer": "sgd", "momentum": 0.0}, 1e-5),
    "mlp-float32": ({"model": "mlp", "optimizer": "sgd", "momentum": 0.0}, 1e-5),
}


def values_for(setting: str, workers: int, **more: Any) -> dict[str, Any]:
    """24 samples a step whatever the workers (12 for 1 and 2 of 3 …), and a last batch of 1: some ranks get none."""
    data = f"synthetic:1x16x16,train={24 * (STEPS - 1) + 1},test=30"
    return {
        "data": data, "workers": workers, "batch_size": 24 // workers, "epochs": 1, "dropout": 0.0, "lr": 0.05
        if "sgd" in setting or "32" in setting else 0.01, "scale_lr": False, "overlap": "off", "timeout": 20.0,
        **SETTINGS[setting][0], **more,
    }  # fmt: skip


@pytest.fixture(scope="session")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of one process, trained once per setting."""

    @cache
    def weights(setting: str, seed: int = 0) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("sequential")
        values = values_for(setting, 1, strategy="sequential", seed=seed) | {"sync_batchnorm": False}
        assert ThreadWorld(1).run(cases.train_here, folder=str(folder), values=values) == [STEPS]
        return load_file(folder / "model.safetensors")

    return weights


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


# A world of one has no transport: it is the same on all.
@pytest.mark.parametrize(("transport", "workers"), [("single", 1), *product(TRANSPORTS, (2, 3, 4))])
@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_workers_train_the_sequential_model(
    worlds: Worlds, sequential: Any, tmp_path: Path, transport: str, workers: int, averaging: str
) -> None:
    world = worlds.get(transport, workers)
    for setting, (_, tolerance) in SETTINGS.items():
        folder = tmp_path / setting
        values = values_for(setting, workers, strategy=averaging)
        assert world.run(cases.train_here, folder=str(folder), values=values) == [STEPS] * workers
        assert distance(load_file(folder / "model.safetensors"), sequential(setting)) <= tolerance, setting


def test_another_seed_trains_another_model(sequential: Any) -> None:
    for setting, (_, tolerance) in SETTINGS.items():
        assert distance(sequential(setting), sequential(setting, seed=1)) > 1000 * tolerance, setting


@pytest.mark.parametrize(
    "more",
    [
        {"overlap": "on", "bucket_mb": 0.01},
        {"overlap": "auto", "bucket_mb": 0.05},
        {"read": "scatter"},
        {"check_replicas": 3},
        {"validation": 0.25},
    ],
    ids=lambda more: "-".join(f"{k}={v}" for k, v in more.items()),
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_options_that_must_not_change_the_result_do_not(
    worlds: Worlds, tmp_path: Path, transport: str, more: dict[str, Any]
) -> None:
    world = worlds.get(transport, 3)
    for setting in ("shallow-cnn-adam", "tiny-norm-sgd"):
        alone = values_for(setting, 1, strategy="sequential") | {"sync_batchnorm": False}
        alone |= {k: v for k, v in more.items() if k == "validation"}
        (steps,) = ThreadWorld(1).run(cases.train_here, folder=str(tmp_path / setting / "1"), values=alone)
        together = values_for(setting, 3, strategy="ring", **more)
        assert world.run(cases.train_here, folder=str(tmp_path / setting / "3"), values=together) == [steps] * 3
        one, three = (load_file(tmp_path / setting / n / "model.safetensors") for n in ("1", "3"))
        assert distance(one, three) <= 1e-12

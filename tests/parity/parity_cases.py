"""What is trained to compare it with the plain loop: by the real training loop, as a case that runs on each rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fitting import fitting
from plain_loop import Data, Recipe, Trained
from safetensors.torch import load_file
from torch import Tensor, nn
from worlds import Case, World

import paceline
from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.data.load import load
from paceline.errors import UsageError
from paceline.launch.folder import begin_summary
from paceline.models.build import build
from paceline.run.folder import read_summary
from paceline.run.recorder import Recorder
from paceline.run.records import Summary
from paceline.spec import Resolved, RunSpec, resolve
from paceline.strategies.engine import Lockstep
from paceline.strategies.setup import choose_place
from paceline.training.console import Console
from paceline.training.driver import Job, train

STEPS = 21
OURS = {"data": "synthetic:1x16x16,train=145,test=30", "dropout": 0.0}
OWN = {"data": "parity_cases:tinted", "model": "parity_cases:TinyNorm"}
EXACT = {"dtype": "float64"}
# What is trained, and how close to the plain loop all weights and buffers must come.
SETTINGS: dict[str, tuple[dict[str, Any], float]] = {
    "cnn-adam": ({**OURS, "model": "shallow-cnn", "lr": 0.002, "weight_decay": 0.01, **EXACT}, 1e-12),
    "mlp-sgd": ({**OURS, "model": "mlp", "optimizer": "sgd", "lr": 0.05, "weight_decay": 0.01, **EXACT}, 1e-12),
    "norm-sgd": ({**OWN, "optimizer": "sgd", "lr": 0.02, **EXACT}, 1e-12),
    "sync-norm-adam": ({**OWN, "lr": 0.002, "sync_batchnorm": True, **EXACT}, 1e-12),
    "cnn-adamw": (
        {**OURS, "model": "shallow-cnn", "optimizer": "adamw", "lr": 0.002, "weight_decay": 0.1, **EXACT},
        1e-12,
    ),
    "mlp-float32": ({**OURS, "model": "mlp", "optimizer": "sgd", "lr": 0.05, "momentum": 0.0}, 1e-5),
}


def values_for(setting: str, workers: int, **more: Any) -> dict[str, Any]:
    """24 samples a step whatever the workers, and a smaller last batch in each epoch.

    Of our data that has one sample, so that all workers but one get none; of our own, 5: workers' parts differ in size.
    The learning rate is scaled by the workers, warms up for one of three epochs, and falls along a cosine.
    """
    same = {"workers": workers, "batch_size": 24 // workers, "epochs": 3, "overlap": "off", "timeout": 20.0}
    return {**same, **SETTINGS[setting][0], **more}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of any value, relative to the largest value of its tensor."""
    assert a.keys() == b.keys()
    pairs = [(a[name].double(), b[name].double()) for name in b]
    return max(((x - y).abs().max() / y.abs().max().clamp(min=1e-3)).item() for x, y in pairs)


class TinyNorm(nn.Module):
    """Two convolutions, each with batch-norm, one of them without scale and shift.

    No bias before batch-norm: its true gradient is zero, and Adam would blow up what rounding makes of that.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(channels, 6, 3, stride=2, bias=False), nn.BatchNorm2d(6)
        self.conv2, self.norm2 = nn.Conv2d(6, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8, affine=False)
        self.dense = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.conv1(x)).relu()
        x = self.norm2(self.conv2(x)).relu()
        out: Tensor = self.dense(x.mean((2, 3)))
        return out


class SometimesUsed(nn.Module):
    """A frozen parameter, and one that gets a gradient in about half of the steps: the weights decide, so that all
    workers agree. Parameters are laid out in memory in three ways.
    """

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, 6, 3, stride=2)
        self.conv.weight.data = self.conv.weight.data.contiguous(memory_format=torch.channels_last)
        self.across = nn.Parameter(torch.randn(8, 6).t())
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.sometimes = nn.Parameter(torch.randn(8))
        self.dense = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu().mean((2, 3)) @ self.across + self.frozen
        if int(self.dense.bias.detach()[0].abs() * 1e4) % 2:
            x = x + self.sometimes
        out: Tensor = self.dense(x)
        return out


class OneNumber(nn.Module):
    """Has a single trained value."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        return self.slope * x.mean((1, 2, 3))[:, None] * torch.arange(self.classes) / self.classes


def tinted() -> Any:
    """149 training and 30 test images of 3 channels that differ in mean and deviation."""
    rng = np.random.default_rng(5)
    sets = []
    for count in (149, 30):
        labels = np.arange(count) % 10
        noise = rng.integers(0, 60, (count, 3, 16, 16)) * np.array([1, 2, 3]).reshape(1, 3, 1, 1)
        sets.append(((noise + 7 * labels.reshape(-1, 1, 1, 1)).astype(np.uint8), labels))
    return tuple(sets)


# Options that say how a result is computed, and must not change it.
_HOW = {
    *("strategy", "workers", "stages", "tensor", "servers", "staleness", "averaging", "overlap", "bucket_mb", "read"),
    *("check_replicas", "cut", "schedule", "recompute", "timeout", "worker_timeout", "log_every", "dtype"),
}


def recipe_of(values: dict[str, Any]) -> Recipe:
    """The same run for the plain loop."""
    known = {field.name for field in fields(Recipe)}
    assert values.keys() - known - _HOW <= {"model", "data", "weights", "dropout"}, "the plain loop does not know all"
    assert not values.get("dropout"), "dropout is random"
    parts = {"pipeline": "stages", "tensor": "tensor"}.get(values.get("strategy", ""), "")
    workers: int = values.get("workers", 1)
    replicas = workers // values.get(parts, workers) if parts else workers
    options = {"lr": 0.01 if values.get("optimizer") == "sgd" else 0.001, "normalize": values["data"] in OWN.values()}
    return Recipe(**options | {name: value for name, value in values.items() if name in known}, replicas=replicas)


def data_of(values: dict[str, Any]) -> Data:
    found = load(values["data"])
    train, test = found.train, found.test
    return Data(train.inputs.numpy(), train.targets.numpy(), test.inputs.numpy(), test.targets.numpy())


def model_of(values: dict[str, Any]) -> nn.Module:
    """The model with the weights that a seed gives it."""
    info = load(values["data"]).info
    model = build(values["model"], info.shape, info.classes, values.get("dropout"))
    known = {name: values[name] for name in ("model", "data", "dropout", "seed") if name in values}
    model.load_state_dict(paceline.initial_weights(RunSpec(**known)))
    return model


def check_trains(
    world: World,
    folder: Path,
    values: dict[str, Any],
    wanted: Trained,
    tolerance: float = 1e-12,
    case: Case | None = None,
    **more: Any,
) -> Summary:
    """Train in this world, and compare steps, weights, buffers, losses and accuracy with the plain loop's."""
    assert world.run(case or train_here, folder=str(folder), values=values, **more) == [wanted.steps] * world.size
    summary = read_summary(folder)
    assert summary is not None
    check_trained(summary, load_file(folder / "model.safetensors"), wanted, tolerance)
    return summary


def check_trained(summary: Summary, weights: dict[str, Tensor], wanted: Trained, tolerance: float = 1e-12) -> None:
    assert distance(weights, wanted.weights) <= tolerance
    assert summary.train_loss == pytest.approx(wanted.train_loss, rel=tolerance)
    assert summary.test_loss == pytest.approx(wanted.test_loss, rel=tolerance)
    assert summary.test_accuracy == wanted.test_accuracy
    assert summary.model_properties == ["batch-norm"] * any("running_mean" in name for name in weights)


def refused_here(comm: Comm, folder: str, values: dict[str, Any]) -> str:
    """Why it is not trained."""
    try:
        train_here(comm, folder, values)
    except UsageError as error:
        return str(error)
    return ""


def train_here(comm: Comm, folder: str, values: dict[str, Any], stop: Callable[[], bool] = lambda: False) -> int:
    """Train as `values` say on this communicator; rank 0 leaves the run folder's files. Returns the steps."""
    resolved: Resolved = resolve(("test", fitting(values)))
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    metered = MeteredComm(comm)
    torch.set_num_threads(1)
    summary = begin_summary(resolved.spec)
    place = choose_place(resolved.spec, 0)
    with closing(Recorder(path, comm.rank)) as recorder:
        train(Job(resolved.spec, metered, place, Console(None), stop, summary).opened(path, recorder))
    return summary.steps


def train_from_pictures(comm: Comm, folder: str, values: dict[str, Any], cache: str) -> int:
    """Train on a folder of images; a rank's process packs it into a cache of the test's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PACELINE_CACHE", cache)
        return train_here(comm, folder, values)


def train_with_late_updates(comm: Comm, folder: str, values: dict[str, Any], late: int) -> int:
    """Train; one rank waits between the sum of gradients and its update, while the others go on to the next step."""
    update = Lockstep.update

    def wait_first(self: Lockstep, *arguments: Any) -> None:
        time.sleep(0.01)
        update(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        if comm.rank == late:
            patch.setattr(Lockstep, "update", wait_first)
        return train_here(comm, folder, values)

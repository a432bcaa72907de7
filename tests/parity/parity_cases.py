"""Training by the real loop, as a case that runs on each rank."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.launch.folder import begin_summary
from paceline.models import table as models
from paceline.spec import Resolved, resolve
from paceline.training.console import Console
from paceline.training.loop import Job, train
from paceline.training.setup import choose_place
from paceline.training.trace import Trace

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


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


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


def _build(shape: tuple[int, ...], classes: int, dropout: float) -> nn.Module:
    return TinyNorm(shape[0], classes)


def register_tiny_norm() -> None:
    """Make the test's model known by name, as any model is."""
    home = types.ModuleType("paceline.models.tiny_norm")
    home.build = _build  # type: ignore[attr-defined]
    sys.modules[home.__name__] = home
    models.TABLE["tiny-norm"] = models.ModelInfo("tiny-norm", "tiny_norm:build", 0, 0.0, 8, "a test's model")


def train_here(comm: Comm, folder: str, values: dict[str, Any]) -> int:
    """Train as `values` say on this communicator; rank 0 leaves the run folder's files. Returns the steps."""
    register_tiny_norm()
    resolved: Resolved = resolve(("test", values))
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    metered = MeteredComm(comm)
    trace = Trace(path / f"rank_{comm.rank}.jsonl", comm.rank)
    torch.set_num_threads(1)
    summary = begin_summary(resolved.spec)
    place = choose_place(resolved.spec, 0)
    train(Job(resolved.spec, metered, place, path, Console(None), trace, lambda: False, summary))
    trace.close()
    return summary.steps

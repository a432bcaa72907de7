"""From a spec to the parts of a training: data, model, optimizer, strategy."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from paceline.comm.base import Comm
from paceline.data.load import load
from paceline.data.table import describe
from paceline.errors import UsageError
from paceline.models.build import build
from paceline.spec import RunSpec
from paceline.strategies.base import Strategy
from paceline.strategies.make import make_strategy
from paceline.strategies.synchronous import Options
from paceline.training.input import Held, Input, OwnInput, Prepare, ScatteredInput
from paceline.training.sampler import hold_out
from paceline.training.weights import start_from

# Ranks that are threads share torch's random state.
_RANDOM = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where a rank computes."""

    device: torch.device
    dtype: torch.dtype


def choose_place(spec: RunSpec, local_rank: int) -> Place:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no GPU here; use --device cpu or auto")
    # Without being asked, several workers go to GPUs only where their transport can follow.
    fits = spec.workers == 1 or spec.transport == "nccl"
    cuda = spec.device == "cuda" or (spec.device == "auto" and fits and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dtype = {"float32": torch.float32, "float64": torch.float64}[spec.dtype]
    return Place(torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"), dtype)


def make_input(spec: RunSpec, comm: Comm, place: Place) -> Input:
    """Read the data set, or learn that rank 0 will send it."""
    info = describe(spec.data)
    prepare = Prepare(place.dtype, place.device)
    held = None
    if spec.read == "own" or comm.rank == 0:
        data = load(spec.data, Path(spec.data_dir) if spec.data_dir else None)
        held = Held(data, *hold_out(info.train, spec.validation_samples, spec.seed))
    if spec.read == "scatter":
        return ScatteredInput(held, info.shape, comm, prepare)
    assert held is not None
    return OwnInput(held, comm, prepare)


def make_model(spec: RunSpec, place: Place) -> tuple[nn.Module, list[str]]:
    """The model with its first weights, the same on every rank, and the names of weights that a file did not have."""
    info = describe(spec.data)
    with _RANDOM:
        torch.manual_seed(spec.seed)
        model = build(spec.model, info.shape, info.classes, spec.dropout, spec.hidden)
    fresh = start_from(model, spec.weights) if spec.weights else []
    return model.to(place.device, place.dtype, memory_format=torch.channels_last), fresh  # type: ignore[call-overload]


def make_optimizer(spec: RunSpec, model: nn.Module) -> torch.optim.Optimizer:
    assert spec.lr is not None
    if spec.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), spec.lr, weight_decay=spec.weight_decay, fused=True)
    return torch.optim.SGD(
        model.parameters(), spec.lr, momentum=spec.momentum, weight_decay=spec.weight_decay, fused=True
    )


def prepare_strategy(spec: RunSpec, comm: Comm, model: nn.Module) -> Strategy:
    """The strategy, set up: all ranks hold the same weights, and each draws its own dropout from here on."""
    assert spec.strategy is not None
    options = Options(
        bucket_mb=spec.bucket_mb,
        overlap=spec.overlap,
        sync_batchnorm=spec.sync_batchnorm,
        check_replicas=spec.check_replicas,
    )
    strategy = make_strategy(spec.strategy, comm, model, make_optimizer(spec, model), options)
    strategy.setup()
    with _RANDOM:
        torch.manual_seed(spec.seed + 1_000_003 * (comm.rank + 1))
    return strategy

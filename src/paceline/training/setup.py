"""From a spec to the parts of a training: data, model, optimizer, strategy."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline import own_code
from paceline.comm.base import Comm
from paceline.comm.words import all_or_none, share_text
from paceline.data import table as datasets
from paceline.data.load import Dataset, load
from paceline.data.prepare import prepare
from paceline.data.table import DataInfo
from paceline.emulation import table as emulation
from paceline.emulation.device import EmulatedDevice
from paceline.emulation.standin import StandIn
from paceline.emulation.timing import measure
from paceline.errors import AgreedError, UsageError
from paceline.models import table as models
from paceline.models.build import build
from paceline.models.draws import RANDOM
from paceline.spec import RunSpec, check_data
from paceline.strategies.base import Strategy
from paceline.strategies.make import make_strategy
from paceline.strategies.synchronous import Options
from paceline.training.images import NoPixels, Prepare
from paceline.training.input import CountedInput, Input, LabelsInput, OwnInput, ScatteredInput, TogetherInput
from paceline.training.weights import start_from


@dataclass(frozen=True)
class Place:
    """Where a rank computes, and whether it is the one that sees to its machine's data."""

    device: torch.device
    dtype: torch.dtype
    first: bool
    speed: float = 1.0  # of this node, where compute is emulated: 0.5 takes twice as long


def choose_place(spec: RunSpec, local_rank: int, *, first: bool = True, speed: float = 1.0) -> Place:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no GPU here; use --device cpu or auto")
    # Without being asked, several workers go to GPUs only where their transport can follow.
    fits = spec.ranks == 1 or spec.carrier.moves_gpu_tensors
    wanted = spec.device == "auto" and fits and not spec.emulated and not spec.divided
    cuda = spec.device == "cuda" or (wanted and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dtype = {"float32": torch.float32, "float64": torch.float64}[spec.dtype]
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Place(device, dtype, first, speed)


def make_input(spec: RunSpec, comm: Comm, place: Place) -> Input:
    """Open the data set, or learn from rank 0 what it will send; what is wrong with it, every rank says."""
    if not spec.reads:
        info = datasets.describe(spec.data)
        assert info is not None
        return CountedInput(info, 0, spec.seed, comm, NoPixels(place.dtype, place.device))
    folder = Path(spec.data_dir) if spec.data_dir else None
    reads = spec.read != "scatter" or comm.rank == 0
    all_or_none(lambda: prepare(spec.data, folder) if reads and place.first else None, comm)
    data = all_or_none(lambda: load(spec.data, folder, prepared=True) if reads else None, comm)
    info, stored = _agree_on_data(spec.data, data, comm)
    all_or_none(lambda: check_data(spec, info), comm)
    if spec.emulated:
        return CountedInput(info, 0, spec.seed, comm, NoPixels(place.dtype, place.device))
    ready = Prepare(
        place.dtype,
        place.device,
        layout=memory_layout(spec),
        size=spec.image_shape(info)[1:],
        normal=(info.mean, info.std) if spec.normalize and info.mean and info.std else None,
        augment=spec.augment,
        seed=spec.seed,
    )
    validation = spec.validation_samples(info)
    if spec.divided:
        return _replica_input(spec, data, validation, comm, ready)
    if spec.read == "scatter":
        return ScatteredInput(data, info, stored, validation, spec.seed, comm, ready)
    assert data is not None
    kind = OwnInput if spec.read == "own" else TogetherInput
    return kind(data, validation, spec.seed, comm, ready)


def _replica_input(spec: RunSpec, data: Dataset | None, validation: int, comm: Comm, ready: Prepare) -> Input:
    """All ranks of a replica have the same samples; those behind the first stage need no pixels."""
    assert data is not None
    spot, source = spec.grid.spot(comm.rank), OwnInput(data, validation, spec.seed, comm, ready)
    if spot.stage:
        no_pixels = NoPixels(ready.dtype, ready.device, size=ready.size)
        source = LabelsInput(data, validation, spec.seed, comm, no_pixels)
    source.reader, source.readers = spot.replica, spec.grid.replicas
    return source


def _agree_on_data(name: str, data: Dataset | None, comm: Comm) -> tuple[DataInfo, torch.dtype]:
    """What rank 0's data set is, and the type of its images; ranks that have another are refused."""
    mine = ""
    if data:
        facts = {**asdict(data.info), "stored": str(data.train.images.dtype).split(".")[1]}
        facts["digest"] = _digest(data) if comm.size > 1 else ""
        mine = json.dumps({key: value for key, value in facts.items() if key not in ("name", "about")})
    answers = share_text(mine, comm)
    different = [rank for rank, answer in enumerate(answers) if answer and answer != answers[0]]
    if different:
        raise AgreedError(
            f"rank {different[0]} has other data than rank 0 under the name {name}: give all ranks the same, and seed "
            f"what a function of yours draws at random"
        )
    values: dict[str, Any] = json.loads(answers[0])
    del values["digest"]
    stored: torch.dtype = getattr(torch, values.pop("stored"))
    values |= {key: tuple(value) for key, value in values.items() if isinstance(value, list)}
    return DataInfo(name, about="", **values), stored


def _digest(data: Dataset) -> str:
    """Of what a user's function made: it may have made another on another rank. Files are known by what is in them."""
    if data.train.where or not own_code.is_own(data.info.name):
        return ""
    digest = hashlib.sha256()
    for split in (data.train, data.test):
        digest.update(split.labels.numpy().tobytes())
        for images in split.images.split(1024):
            digest.update(images.contiguous().numpy().data)
    return digest.hexdigest()


def make_model(spec: RunSpec, data: DataInfo, place: Place) -> tuple[nn.Module, list[str]]:
    """The model with its first weights, the same on every rank, and the names of weights that a file did not have.

    One of ours whose compute is emulated has sizes alone, no weights.
    """
    if spec.emulated and models.describe(spec.model):
        with torch.device("meta"):
            return build(spec.model, spec.image_shape(data), data.classes, spec.dropout, spec.hidden).to(
                place.dtype
            ), []
    with RANDOM:
        torch.manual_seed(spec.seed)
        model = build(spec.model, spec.image_shape(data), data.classes, spec.dropout, spec.hidden)
    model = model.to(place.device, place.dtype, memory_format=memory_layout(spec))  # type: ignore[call-overload]
    return model, start_from(model, spec.weights) if spec.weights else []


def memory_layout(spec: RunSpec) -> torch.memory_format:
    """A user's own model may count on the usual layout, as with `x.view(len(x), -1)`."""
    info = models.describe(spec.model)
    return torch.channels_last if info and info.channels_last else torch.contiguous_format


def make_optimizer(spec: RunSpec, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    assert spec.lr is not None
    kind, own = (torch.optim.Adam, {}) if spec.optimizer == "adam" else (torch.optim.SGD, {"momentum": spec.momentum})
    made: torch.optim.Optimizer = _eager(kind)(parameters, spec.lr, weight_decay=spec.weight_decay, fused=True, **own)
    return made


@cache
def _eager(kind: Any) -> Any:
    """The optimizer without its wrappers for torch.compile.

    They import the compiler on the first call, although nothing is compiled here: that takes more than a second of
    processor time in each rank and leaves a folder in the temporary directory.
    """
    wrapped = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(kind.__name__, (kind,), methods | {"step": step})


@dataclass(frozen=True)
class Emulation:
    """What takes a rank's time instead of computing, and the model's place; a whole batch's time, and a line on it."""

    device: EmulatedDevice
    model: StandIn
    batch_seconds: float
    about: str


def make_emulation(spec: RunSpec, data: DataInfo, model: nn.Module, place: Place) -> Emulation | None:
    """None where ranks compute for real."""
    asked = emulation.read(spec.compute)
    if asked is None:
        return None
    try:
        timing = measure(model, spec.image_shape(data))
    except Exception as error:
        raise UsageError(
            f"--compute {spec.compute}: what model {spec.model} computes cannot be counted without computing it "
            f"(on torch's meta device): {own_code.reason(error)}"
        ) from error
    if asked.device:
        if not timing.macs:
            raise UsageError(
                f"--compute {spec.compute}: model {spec.model} has no convolution or matrix product whose cost is "
                f"known; give the time of a batch, as in --compute emulated:0.5"
            )
        found = emulation.estimate(asked.device, spec.model, timing.macs)
        seconds, how = found.seconds * spec.batch_size, f", as {asked.device.about} ({found.how})"
    else:
        assert asked.seconds is not None, "a run folder has become seconds when the spec was resolved"
        seconds, how = asked.seconds, ""
    smaller = f"; gradients are {spec.shrink} times smaller than the model's" if spec.shrink > 1 else ""
    time = f"{seconds:.4g} s for each batch of {spec.batch_size}{how}"
    about = f"Emulated compute: {time}; nothing is trained or saved{smaller}"
    device = EmulatedDevice(seconds / spec.batch_size / place.speed, timing)
    return Emulation(device, StandIn(model, spec.shrink), seconds, about)


def prepare_strategy(spec: RunSpec, comm: Comm, model: nn.Module, device: EmulatedDevice | None = None) -> Strategy:
    """The strategy, set up: all ranks hold the same weights, and each draws its own dropout from here on."""
    assert spec.strategy is not None
    options = Options(
        bucket_mb=spec.bucket_mb / spec.shrink,
        overlap=spec.overlap,
        sync_batchnorm=spec.sync_batchnorm,
        check_replicas=spec.check_replicas,
        micros=spec.microbatches or 1,
        batch_size=spec.batch_size,
    )
    # Where nothing is updated none is made: torch's optimizers import its compiler, which takes a second of every rank.
    optimizer = None if device else make_optimizer(spec, model.parameters())
    strategy = make_strategy(spec.strategy, comm, model, optimizer, options, device)
    strategy.setup()
    seed_dropout(spec, comm.rank)
    return strategy


def seed_dropout(spec: RunSpec, stream: int) -> None:
    """What is drawn from here on differs from stream to stream."""
    with RANDOM:
        torch.manual_seed(spec.seed + 1_000_003 * (stream + 1))

"""Creates the parts of a rank's engine from the spec: device, model, optimizer, emulated device."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline import own_code
from paceline.comm.words import all_or_none
from paceline.data import table as datasets
from paceline.data.batch import each, empty
from paceline.data.load import load
from paceline.data.table import DataInfo
from paceline.emulation import table as emulation
from paceline.emulation.device import DeviceInTurns, EmulatedDevice
from paceline.emulation.standin import StandIn
from paceline.emulation.timing import Timing, measure
from paceline.errors import UsageError
from paceline.models import table as models
from paceline.models.build import check, construct
from paceline.models.deferred import RANDOM, Check, Make, build_whole
from paceline.pipeline.tracing import without_compiler
from paceline.spec import RunSpec
from paceline.strategies.weights import start_from
from paceline.tasks.scoring import Scorer
from paceline.tasks.table import CLASSIFICATION, LANGUAGE_MODEL, MOST_CLASSES

if TYPE_CHECKING:
    from paceline.training.driver import Job


@dataclass(frozen=True)
class Place:
    """Where a rank computes, and whether it prepares the data of its machine.

    `speed` and `noise` are those of its node's emulated device: with speed 0.5 it takes twice as long.
    """

    device: torch.device
    dtype: torch.dtype
    first: bool
    speed: float = 1.0
    noise: float = 0.0


def choose_place(
    spec: RunSpec, local_rank: int, *, first: bool = True, speed: float = 1.0, noise: float = 0.0
) -> Place:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device cuda: this PyTorch sees no GPU here; use --device cpu or auto")
    # By default, several workers use GPUs only if their transport can move GPU tensors.
    fits = spec.ranks == 1 or spec.carrier.moves_gpu_tensors
    wanted = spec.device == "auto" and fits and not spec.emulated and spec.method.on_gpu
    cuda = spec.device == "cuda" or (wanted and torch.cuda.is_available())
    if cuda:
        torch.cuda.set_device(local_rank % torch.cuda.device_count())
    dtype = {"float32": torch.float32, "float64": torch.float64}[spec.dtype]
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Place(device, dtype, first, speed, noise)


def make_model(spec: RunSpec, data: DataInfo, place: Place) -> tuple[nn.Module, list[str]]:
    """The model with its initial weights, the same on every rank, and the names of weights that are not in --weights.

    With emulated compute, Paceline's own models have shapes only, no values.
    """
    make, check = how_to_build(spec, data)
    if spec.emulated and models.describe(spec.model):
        with without_compiler(), torch.device("meta"):
            return make().to(place.dtype), []
    model = build_whole(make, spec.seed, check)
    model = model.to(place.device, place.dtype, memory_format=memory_layout(spec))  # type: ignore[call-overload]
    return model, start_from(model, spec.weights) if spec.weights else []


def how_to_build(spec: RunSpec, data: DataInfo) -> tuple[Make, Check]:
    """What constructs the model, and what refuses it where it does not fit the data."""
    outputs = data.classes or math.prod(data.target_shape)  # of the last layer
    expected = None
    if spec.objective in (CLASSIFICATION, LANGUAGE_MODEL):
        expected = (*data.target_shape, outputs)
    return partial(construct, spec.model, spec.input_shape(data), outputs, spec.dropout, spec.hidden), partial(
        check, spec.model, example(spec, data, 2), expected, fitting=data.kind != "arrays"
    )


def example(spec: RunSpec, data: DataInfo, count: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Any:
    """Inputs of zeros for this many samples, of the form that the model is given; `dtype` is that of its weights."""

    def zeros(like: Tensor) -> Tensor:
        return torch.zeros_like(like, dtype=dtype if like.is_floating_point() else like.dtype, device=device)

    shape = "x".join(map(str, spec.input_shape(data)))
    return each(zeros, empty(data.inputs or f"{data.input_dtype} {shape}", count))


def initial_weights(spec: RunSpec) -> dict[str, Tensor]:
    """The state dict, on the CPU, that every strategy starts from with this spec's model, data set and seed."""
    folder = Path(spec.data_dir) if spec.data_dir else None
    make, check = how_to_build(spec, datasets.describe(spec.data) or load(spec.data, folder).info)
    return build_whole(make, spec.seed, check).state_dict()


def memory_layout(spec: RunSpec) -> torch.memory_format:
    """A user's own model gets the default layout, because it may rely on it, as with `x.view(len(x), -1)`."""
    info = models.describe(spec.model)
    return torch.channels_last if info and info.channels_last else torch.contiguous_format


def make_optimizer(spec: RunSpec, parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
    assert spec.lr is not None
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[spec.optimizer]
    own = {"momentum": spec.momentum} if kind is torch.optim.SGD else {}
    made: torch.optim.Optimizer = _eager(kind)(parameters, spec.lr, weight_decay=spec.weight_decay, fused=True, **own)
    return made


def make_scorer(spec: RunSpec) -> Scorer:
    return Scorer(spec.objective, bf16=spec.precision == "bf16")


def no_confusion(spec: RunSpec, data: DataInfo) -> Tensor | None:
    """Zeros to count predictions in, by class and predicted class; None if the task has no classes, or too many."""
    if spec.objective != CLASSIFICATION or data.classes > MOST_CLASSES:
        return None
    return torch.zeros(data.classes, data.classes, dtype=torch.float64)


def confusion_of(counts: Tensor | None, samples: int) -> list[list[int]] | None:
    """The counts of the test set, each sample once; None if they are not complete. Shards all count the same ones."""
    if counts is None or not (total := round(counts.sum().item())) or total % samples:
        return None
    rows: list[list[int]] = (counts / (total // samples)).long().tolist()
    return rows


@cache
def _eager(kind: Any) -> Any:
    """The optimizer without its wrappers for torch.compile, and without copies of gradients.

    The wrappers import the compiler on the first call, although nothing is compiled: that takes more than a second of
    CPU time on each rank and leaves a folder in the temporary directory.
    """
    wrapped = ("add_param_group", "load_state_dict", "state_dict", "zero_grad")
    methods = {name: inspect.unwrap(getattr(kind, name)) for name in wrapped}
    step, collect = torch.no_grad()(inspect.unwrap(kind.step)), kind._init_group

    def collect_flat(self: Any, group: Any, parameters: list[Tensor], gradients: list[Tensor], *state: Any) -> Any:
        """Torch's fused kernels update values in the order of memory, but first make a contiguous copy of every
        gradient, which they do not use: with channels_last that takes as long as the update. Flat ones are contiguous.
        """
        found = collect(self, group, parameters, gradients, *state)
        if all(value is not None for value in chain.from_iterable(state)):  # SGD makes momentum like the gradient
            gradients[:] = map(_in_memory_order, gradients, parameters)
        return found

    return type(kind.__name__, (kind,), methods | {"step": step, "_init_group": collect_flat})


def _in_memory_order(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The values of a gradient in the order in which its parameter's are in memory."""
    if parameter.is_contiguous() or parameter.device.type != "cpu":
        return gradient
    if gradient.stride() != parameter.stride():
        gradient = torch.empty_like(parameter).copy_(gradient)
    return gradient.as_strided((gradient.numel(),), (1,))


@dataclass(frozen=True)
class Emulation:
    """The emulated device of a rank, the model for it, the time of a whole batch, and a line about it."""

    device: EmulatedDevice
    model: StandIn
    batch_seconds: float
    about: str


def count_operations(spec: RunSpec, data: DataInfo, model: nn.Module) -> Timing:
    """When in a step each gradient is ready; raises UsageError if the model does not run without values."""
    dtype = example(spec, data, 1).dtype if data.inputs is None else None
    try:
        with without_compiler():
            return measure(model, spec.input_shape(data), dtype)
    except Exception as error:
        what = f"--compute {spec.compute}: " if spec.emulated else ""
        raise UsageError(
            f"{what}the operations of model {spec.model} cannot be counted without computing them (on torch's meta "
            f"device): {own_code.reason(error)}"
        ) from error


def make_emulation(
    spec: RunSpec, data: DataInfo, model: nn.Module, place: Place, rank: int, timing: Timing | None = None
) -> Emulation | None:
    """The emulation of a rank; None if compute is real. `timing` is given if another rank has counted operations."""
    asked = emulation.read(spec.compute)
    if asked is None:
        return None
    timing = timing or count_operations(spec, data, model)
    seconds, about = emulated_time(spec, asked, timing.macs)
    device = EmulatedDevice(seconds / spec.batch_size / place.speed, timing, place.noise, f"{spec.seed} {rank}")
    return Emulation(device, StandIn(model, spec.shrink), seconds, about)


def emulated_time(spec: RunSpec, asked: emulation.Asked, macs: float, sent: str = "gradients are") -> tuple[float, str]:
    """The seconds of a whole batch of a model with so many multiply-adds, and a line about it."""
    if asked.device:
        if not macs:
            raise UsageError(
                f"--compute {spec.compute}: model {spec.model} has no convolution or matrix product to count; give the "
                f"time of a batch, as in --compute emulated:0.5"
            )
        found = emulation.estimate(asked.device, spec.model, macs)
        seconds, how = found.seconds * spec.batch_size, f", as {asked.device.about} ({found.how})"
    else:
        assert asked.seconds is not None, "resolving the spec has replaced a run folder by seconds"
        seconds, how = asked.seconds, ""
    smaller = f"; {sent} {spec.shrink} times smaller than the model's" if spec.shrink > 1 else ""
    time = f"{seconds:.4g} s for each batch of {spec.batch_size}{how}"
    return seconds, f"Emulated compute: {time}; nothing is trained or saved{smaller}"


def emulate_in_turns(job: Job, macs: float) -> DeviceInTurns:
    """The emulated device of a rank with a part of a model; says and records how long a batch takes."""
    spec, place, asked = job.spec, job.place, emulation.read(job.spec.compute)
    assert asked is not None
    seconds, about = all_or_none(lambda: emulated_time(spec, asked, macs, "gradients and activations are"), job.comm)
    job.summary.compute_seconds = seconds
    job.console.line(about)
    return DeviceInTurns(seconds / spec.batch_size / place.speed, place.noise, f"{spec.seed} {job.comm.rank}")


def seed_dropout(spec: RunSpec, stream: int, step: int = 0) -> None:
    """Seed torch's generator, differently for each stream; and for the step at which a run is continued."""
    with RANDOM:
        torch.manual_seed(spec.seed + 1_000_003 * (stream + 1) + 1_000_000_007 * step)

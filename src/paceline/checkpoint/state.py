"""The state of a training under names that do not depend on how it is divided: model, optimizer, random numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.checkpoint.load import Checkpoint, shaped
from paceline.checkpoint.save import Held

MODEL, OPTIMIZER, BEST, TRANSIENT, RANDOM = "model.", "optimizer.", "best.", "transient.", "random."
CHANNELS_LAST = (0, 2, 3, 1)


@dataclass(frozen=True)
class Cut:
    """The part of a tensor that a rank has: from `start` along one dimension of the whole."""

    shape: tuple[int, ...]
    dim: int
    start: int
    stop: int

    @property
    def order(self) -> tuple[int, ...]:
        """Its dimension first: the part is then one span of the flat values."""
        return (self.dim, *(dim for dim in range(len(self.shape)) if dim != self.dim))

    @property
    def row(self) -> int:
        """Values of the whole for each position along the dimension."""
        return math.prod(self.shape) // self.shape[self.dim]


# The ranks that have the same values of a parameter or buffer, by its name, or of the cut of it.
Holders = Callable[[str, Cut | None], tuple[int, ...]]


def hold(
    name: str, tensor: Tensor, cut: Cut | None = None, holders: tuple[int, ...] = (), *, own: bool = False
) -> Held:
    """A tensor as a rank has it, in the order of its memory if that is cheaper to copy."""
    if cut:
        return Held(name, tensor, cut.shape, cut.start * cut.row, cut.order, holders, own)
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return Held(name, tensor, tuple(tensor.shape), 0, CHANNELS_LAST if last else (), holders, own)


def hold_model(
    model: nn.Module,
    holders: Holders,
    cuts: Mapping[str, Cut] | None = None,
    *,
    own_buffers: bool = False,
    own: bool = False,
) -> Iterator[Held]:
    """A model's parameters and buffers; `own`: those of other ranks differ, or only their buffers do."""
    stored, cuts = model.state_dict(keep_vars=True), cuts or {}
    buffers = dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in stored.items():
        if not tensor.is_meta:
            cut = cuts.get(name)
            yield hold(MODEL + name, tensor, cut, holders(name, cut), own=own or (own_buffers and name in buffers))
    for name, tensor in buffers.items():
        if name not in stored and not tensor.is_meta:
            yield hold(TRANSIENT + name, tensor, None, holders(name, None), own=own_buffers)


def hold_optimizer(
    model: nn.Module,
    optimizer: Optimizer,
    holders: Holders,
    cuts: Mapping[str, Cut] | None = None,
    *,
    own: bool = False,
) -> Iterator[Held]:
    """What an optimizer keeps for each parameter of the model."""
    for name, parameter in model.named_parameters():
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                cut = (cuts or {}).get(name) if value.shape == parameter.shape else None
                yield hold(f"{OPTIMIZER}{name}.{key}", value, cut, holders(name, cut), own=own)


def load_model(model: nn.Module, checkpoint: Checkpoint, cuts: Mapping[str, Cut], rank: int | None) -> None:
    """Copy the checkpoint's values into the parameters and buffers that this rank has. Raises Damaged."""
    named = {MODEL + name: tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    named |= {TRANSIENT + name: tensor for name, tensor in model.named_buffers() if MODEL + name not in named}
    with torch.no_grad():
        for name, tensor in named.items():
            if not tensor.is_meta and (name in checkpoint or name.startswith(MODEL)):
                tensor.copy_(_value(checkpoint, name, cuts.get(name.removeprefix(MODEL)), rank))


def load_optimizer(
    model: nn.Module, optimizer: Optimizer, checkpoint: Checkpoint, cuts: Mapping[str, Cut], rank: int | None
) -> None:
    """Restore what the optimizer kept, in the memory layout of its parameters."""
    keys = optimizer_keys(checkpoint)
    names = {id(parameter): name for name, parameter in model.named_parameters()}

    def kept(parameter: Tensor) -> dict[str, Tensor]:
        name = names[id(parameter)]
        mine: dict[str, Tensor] = {}
        for key in keys.get(name, []):
            full = f"{OPTIMIZER}{name}.{key}"
            shape = checkpoint.manifest.tensors[full][0][1].shape
            cut = cuts.get(name)
            like = tuple(shape) == (cut.shape if cut else tuple(parameter.shape))
            value = _value(checkpoint, full, cut if like else None, rank)
            mine[key] = torch.empty_like(parameter).copy_(value) if like else value
        return mine

    set_state(optimizer, kept)


@dataclass(frozen=True)
class Span:
    """Values of a parameter, in the order of its memory, for which an optimizer has state."""

    name: str
    parameter: Tensor
    start: int
    stop: int

    @property
    def order(self) -> tuple[int, ...]:
        """The parameter's dimensions as they are in its memory; empty if that is their own order."""
        p, strides = self.parameter, self.parameter.stride()
        return () if p.is_contiguous() else tuple(sorted(range(p.dim()), key=lambda dim: -strides[dim]))

    def hold(self, state: Mapping[str, Tensor]) -> Iterator[Held]:
        """What an optimizer keeps for it; what it has once for a parameter is saved with the first value."""
        for key, value in sorted(state.items()):
            name = f"{OPTIMIZER}{self.name}.{key}"
            if value.dim():
                yield Held(name, value, tuple(self.parameter.shape), self.start, self.order)
            elif self.start == 0:
                yield Held(name, value, ())

    def load(self, checkpoint: Checkpoint, keys: Iterable[str]) -> dict[str, Tensor]:
        found = {}
        for key in keys:
            name = f"{OPTIMIZER}{self.name}.{key}"
            once = key == "step" or checkpoint.manifest.tensors[name][0][1].shape != tuple(self.parameter.shape)
            found[key] = checkpoint.tensor(name) if once else checkpoint.read(name, self.start, self.stop, self.order)
        return found


def set_state(optimizer: Optimizer, kept: Callable[[Tensor], dict[str, Tensor]]) -> None:
    """Give the optimizer what it kept for each of its parameters, if anything."""
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {number: mine for number, parameter in enumerate(listed) if (mine := kept(parameter))}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": state})


def _value(checkpoint: Checkpoint, name: str, cut: Cut | None, rank: int | None) -> Tensor:
    if cut is None:
        return checkpoint.tensor(name, rank)
    flat = checkpoint.read(name, cut.start * cut.row, cut.stop * cut.row, cut.order)
    part = tuple(cut.stop - cut.start if dim == cut.dim else size for dim, size in enumerate(cut.shape))
    return shaped(flat, part, cut.order)


def optimizer_keys(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """What the optimizer kept for each parameter, by name."""
    keys: dict[str, list[str]] = {}
    for name in checkpoint.under(OPTIMIZER):
        parameter, _, key = name.rpartition(".")
        keys.setdefault(parameter, []).append(key)
    return keys


def own_moments(checkpoint: Checkpoint) -> bool:
    """Whether every rank's optimizer had its own state."""
    tensors = checkpoint.manifest.tensors
    return any(piece.own for name in checkpoint.under(OPTIMIZER) for _, piece in tensors[OPTIMIZER + name])


def load_best(model: nn.Module, checkpoint: Checkpoint, cuts: Mapping[str, Cut]) -> dict[str, Tensor]:
    """The weights of the best epoch so far, of the part that this rank has; empty if there was none."""
    names = [name for name, tensor in model.state_dict().items() if not tensor.is_meta and BEST + name in checkpoint]
    return {name: _value(checkpoint, BEST + name, cuts.get(name), None) for name in names}


def random_state(device: torch.device) -> Iterator[Held]:
    """The states of this process's random number generators: torch's, Python's and NumPy's."""
    version, numbers, gauss = random.getstate()
    name, keys, place, has_gauss, cached = np.random.get_state(legacy=True)
    assert (version, name) == (3, "MT19937"), "the generators of Python and NumPy are Mersenne Twisters"
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([*numbers, 0 if gauss is None else 1]),
        "python-normal": torch.tensor([gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, keys), place, has_gauss]),
        "numpy-normal": torch.tensor([cached], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    for each, state in states.items():
        yield Held(RANDOM + each, state, tuple(state.shape), own=True)


def set_random_state(checkpoint: Checkpoint, rank: int, device: torch.device) -> None:
    states = {name: checkpoint.tensor(RANDOM + name, rank) for name in checkpoint.under(RANDOM)}
    torch.set_rng_state(states["torch"])
    *numbers, has = states["python"].tolist()
    random.setstate((3, tuple(numbers), states["python-normal"].item() if has else None))
    *keys, place, has_gauss = states["numpy"].tolist()
    cached = states["numpy-normal"].item()
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), place, has_gauss, cached))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)

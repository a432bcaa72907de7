"""What was done to tensors without storage, and doing again as much of it as some tensors' values need."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._pytree import tree_leaves, tree_map_only

from paceline.errors import UsageError
from paceline.models.draws import RANDOM


@dataclass(frozen=True)
class Ref:
    """A tensor as it was at some time: a view of the storage with this number."""

    key: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def view(ref: Ref, storage: UntypedStorage) -> Tensor:
    blank: Any = torch.empty(0, dtype=ref.dtype, device=storage.device)
    out: Tensor = blank.set_(storage, ref.offset, ref.size, ref.stride)
    return out


@dataclass(frozen=True)
class Op:
    """An operation that gave storages values. Tensors in its arguments are Refs.

    `made` are those of the storages it `wrote` in which it left nothing of what was there. `results` are the tensors
    it returned, None where it is in an argument's storage. `state` is the generator's, from before it drew.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: tuple[Ref | None, ...]
    read: frozenset[int]
    wrote: frozenset[int]
    made: frozenset[int]
    state: Tensor | None


@dataclass
class Tape:
    """All operations in their order, and their storages: nobody has written to `blank` ones, `constants` are real."""

    ops: list[Op] = field(default_factory=list)
    storages: dict[int, UntypedStorage] = field(default_factory=dict)  # alive, so that no number is given twice
    blank: set[int] = field(default_factory=set)
    constants: dict[int, UntypedStorage] = field(default_factory=dict)

    def values(self, wanted: Mapping[str, Ref]) -> Iterator[tuple[str, Tensor]]:
        """The wanted tensors with their last values, each as soon as nothing more is done with it."""
        needed = self._needed(wanted)
        last = {key: number for number, op in enumerate(needed) for key in op.read | op.wrote}
        done: dict[int, list[str]] = defaultdict(list)
        for name, ref in wanted.items():
            done[last.get(ref.key, -1)].append(name)
        real: dict[int, UntypedStorage] = {}
        for number, op in enumerate((None, *needed), -1):
            if op:
                self._do(op, real)
            for name in done[number]:
                yield name, _alone(self._view(wanted[name], real))
            keys = {wanted[name].key for name in done[number]} if op is None else op.read | op.wrote
            for key in keys:
                if last.get(key, -1) == number:
                    real.pop(key, None)

    def value(self, ref: Ref) -> Tensor:
        """What one tensor has been made by now."""
        return dict(self.values({"": ref}))[""]

    def _needed(self, wanted: Mapping[str, Ref]) -> list[Op]:
        """The operations that the wanted tensors' values come from: found backwards from the last."""
        found, live = [], {ref.key for ref in wanted.values()}
        for op in reversed(self.ops):
            if not live.isdisjoint(op.wrote):
                found.append(op)
                live = (live - op.made) | op.read
        unknown = live - self.blank - self.constants.keys()
        if unknown:
            names = [name for name, ref in wanted.items() if ref.key in unknown] or list(wanted)
            raise UsageError(
                f"the first values of {', '.join(names[:3])} cannot be followed: the model's constructor does not "
                f"make them by torch's operations"
            )
        return found[::-1]

    @torch.no_grad()
    def _do(self, op: Op, real: dict[int, UntypedStorage]) -> None:
        args, kwargs = tree_map_only(Ref, lambda ref: self._view(ref, real), (op.args, op.kwargs))
        with _drawing(op.state, kwargs):
            out = op.func(*args, **kwargs)
        got = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for ref, tensor in zip(op.results, got, strict=True):
            if ref and (tensor.stride(), tensor.storage_offset()) == (ref.stride, ref.offset):
                real[ref.key] = tensor.untyped_storage()
            elif ref:
                self._view(ref, real).copy_(tensor)

    def _view(self, ref: Ref, real: dict[int, UntypedStorage]) -> Tensor:
        if ref.key not in real:
            constant, size = self.constants.get(ref.key), self.storages[ref.key].nbytes()
            blank = torch.empty(0 if constant else size, dtype=torch.uint8)
            real[ref.key] = constant.clone() if constant else blank.untyped_storage()
        return view(ref, real[ref.key])


@contextlib.contextmanager
def _drawing(state: Tensor | None, kwargs: dict[str, Any]) -> Iterator[None]:
    """Let a random operation draw what it drew, and leave torch's own generator as it was."""
    if state is None:
        yield
    elif kwargs.get("generator"):
        kwargs["generator"] = torch.Generator()
        kwargs["generator"].set_state(state)
        yield
    else:
        with RANDOM, torch.random.fork_rng(devices=[]):
            torch.default_generator.set_state(state)
            yield


def _alone(tensor: Tensor) -> Tensor:
    """The tensor without what else its storage has."""
    return tensor if tensor.nbytes == tensor.untyped_storage().nbytes() else tensor.clone()

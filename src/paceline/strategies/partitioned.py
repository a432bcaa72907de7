"""Model parallelism: each rank gets only the values of its own layers, or of its slices of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from paceline.comm.words import all_or_none
from paceline.data.table import DataInfo
from paceline.errors import UsageError
from paceline.models.deferred import Deferred, defer
from paceline.models.properties import properties_of
from paceline.pipeline.tracing import without_compiler
from paceline.spec import RunSpec
from paceline.strategies.engine import Lockstep
from paceline.strategies.setup import how_to_build, memory_layout
from paceline.strategies.weights import Piece, head_of, save_parts, start_values

if TYPE_CHECKING:
    from paceline.training.driver import Job

Cut = Callable[[str, Tensor], Tensor]  # a rank's part of a tensor, by its name


class Parts:
    """The whole model without storage; fills a rank's part with initial values, and prepares saving it."""

    def __init__(self, job: Job) -> None:
        self.job, spec, data = job, job.spec, job.source.info
        self.deferred: Deferred = all_or_none(lambda: build_without_storage(spec, data), job.comm)
        model = self.deferred.model
        self.parameters, self.properties = sum(p.numel() for p in model.parameters()), properties_of(model)
        dtype = job.place.dtype
        self.whole = {
            name: torch.empty_like(
                tensor,
                dtype=dtype if tensor.is_floating_point() else tensor.dtype,
                memory_format=torch.contiguous_format,
            )
            for name, tensor in model.state_dict().items()
        }
        self.head, self.fresh = head_of(model), list[str]()
        all_or_none(lambda: self._check_initial_values(spec.weights), job.comm)

    def _check_initial_values(self, path: str | None) -> None:
        """They come from a file, or the model must be one that can be initialised in parts."""
        if path:
            _, self.fresh = start_values(path, self.whole, self.head, ())
        self.deferred.check(self.whole.keys() - set(self.fresh) if path else ())

    def fill(self, model: nn.Module, names: Collection[str], cut: Cut = lambda name, tensor: tensor) -> None:
        """Give these parameters and buffers of a model without storage their initial values in the whole model.

        The tensors of the whole model are computed one by one, and each is freed before the next.
        """
        put, problems = TensorFiller(model, memory_layout(self.job.spec)), list[UsageError]()
        try:  # in this thread, which can use again what memory is freed
            for name, value in self._values(set(names)):
                put(name, cut(name, value))
        except UsageError as error:
            problems.append(error)

        def refuse() -> None:
            for problem in problems:
                raise problem

        all_or_none(refuse, self.job.comm)

    def _values(self, missing: set[str]) -> Iterator[tuple[str, Tensor]]:
        path = self.job.spec.weights
        if path:
            saved, _ = start_values(path, self.whole, self.head, missing & self.whole.keys())
            for name, value in saved:
                yield name, value
                missing.remove(name)
        yield from self.deferred.values(missing)

    def ready(self, engine: PartEngine, model: nn.Module, pieces: Mapping[str, list[Piece]]) -> PartEngine:
        """Set up the engine, and record which rank has which pieces of the model, for saving."""
        first = self.job.spec.grid.spot(self.job.comm.rank).replica == 0
        engine.whole = Whole(self.whole, pieces, model, first)
        engine.parameters, engine.properties, engine.fresh = self.parameters, self.properties, self.fresh
        engine.learns(self.job.spec)
        engine.setup()
        return engine


@dataclass(frozen=True)
class Whole:
    """A model in parts on many ranks: its tensors without storage, which rank has which pieces, and this rank's."""

    tensors: Mapping[str, Tensor]
    pieces: Mapping[str, list[Piece]]
    model: nn.Module
    saves: bool  # of several replicas, the first saves the model


class PartEngine(Lockstep):
    """Trains a part of the model."""

    whole: Whole | None = None
    replicated = True

    def squares(self) -> float:
        """The squares of the gradients that this rank is the first to have: summed over ranks, each counts once."""
        if not self.clip:
            return 0.0
        cuts, rank = self.cuts(), self.comm.rank
        own = [g for name, g in self.gradients().items() if self.holders(name, cuts.get(name))[0] == rank]
        return float(get_total_norm(own)) ** 2

    def state_dict(self) -> dict[str, Tensor]:
        state = self.whole.model.state_dict() if self.whole else self.model.state_dict()
        return {name: tensor.detach() for name, tensor in state.items() if not tensor.is_meta}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(state[name])

    def save(self, path: Path) -> None:
        assert self.whole is not None
        state = self.whole.model.state_dict() if self.whole.saves else {}
        own = {name: tensor for name, tensor in state.items() if not tensor.is_meta}
        save_parts(path, self.whole.tensors, self.whole.pieces, own, self.comm)


class TensorFiller:
    """Replaces tensors without storage in a model by values, converted to their precision.

    Tensors that several layers share stay shared.
    """

    def __init__(self, model: nn.Module, layout: torch.memory_format) -> None:
        self.model, self.layout = model, layout
        self._made: dict[Tensor, Tensor] = {}

    def __call__(self, name: str, value: Tensor) -> None:
        path, _, last = name.rpartition(".")
        module = self.model.get_submodule(path)
        old = getattr(module, last)
        if old not in self._made:
            ready = self._ready(value, old)
            self._made[old] = nn.Parameter(ready, old.requires_grad) if isinstance(old, nn.Parameter) else ready
        setattr(module, last, self._made[old])

    def _ready(self, value: Tensor, old: Tensor) -> Tensor:
        """A copy, because a view would keep the whole tensor alive."""
        value = value.to(old.dtype)
        value = value.contiguous(memory_format=self.layout if value.dim() == 4 else torch.contiguous_format)
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def build_without_storage(spec: RunSpec, data: DataInfo) -> Deferred:
    make, check = how_to_build(spec, data)
    with without_compiler():
        return defer(make, spec.seed, check)


def rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1

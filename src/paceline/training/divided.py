"""A model in parts: each rank gets the values of its own layers, or of its shares of them, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from paceline.comm.words import all_or_none, tell
from paceline.data.table import DataInfo
from paceline.errors import AgreedError, UsageError
from paceline.layout import share
from paceline.models.deferred import Deferred
from paceline.pipeline.devices import stage_devices
from paceline.pipeline.executor import Executor, Neighbours
from paceline.pipeline.graph import Graph
from paceline.pipeline.plan import Plan
from paceline.pipeline.schedule import in_flight
from paceline.pipeline.showing import lines
from paceline.records import write_whole
from paceline.strategies.base import Strategy, score
from paceline.strategies.pipeline import Pipeline, PipelineOptions
from paceline.strategies.synchronous import Options
from paceline.strategies.tensor import TensorParallel
from paceline.strict_json import dump
from paceline.tensor.apply import split_wide
from paceline.training.planning import build_without_storage, make_plan, measure_link, trace_model
from paceline.training.prepared import Prepared
from paceline.training.setup import make_optimizer, memory_layout, seed_dropout
from paceline.training.weights import Piece, head_of, save_parts, start_values

if TYPE_CHECKING:
    from paceline.training.loop import Job

Cut = Callable[[str, Tensor], Tensor]  # a rank's part of a tensor, by its name


class Parts:
    """The whole model without storage: what it is, the values of a rank's part, and how all ranks save it."""

    def __init__(self, job: Job, data: DataInfo) -> None:
        self.job, spec = job, job.spec
        self.deferred: Deferred = all_or_none(lambda: build_without_storage(spec, data), job.comm)
        model = self.deferred.model
        self.parameters = sum(p.numel() for p in model.parameters())
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

    def fill(self, model: nn.Module, names: Collection[str], cut: Cut = lambda name, tensor: tensor) -> None:
        """Give these parameters and buffers of a model without storage the values that the whole would start with.

        The tensors of the whole come one by one, and each is let go before the next.
        """
        path, missing = self.job.spec.weights, set(names)
        put = Putting(model, memory_layout(self.job.spec))
        if path:
            saved, self.fresh = all_or_none(
                lambda: start_values(path, self.whole, self.head, missing & self.whole.keys()), self.job.comm
            )
            for name, value in saved:
                put(name, cut(name, value))
                missing.remove(name)
        for name, value in self.deferred.values(missing):
            put(name, cut(name, value))
        self.job.comm.barrier()  # ranks that are threads share the random state that first values are drawn from

    def prepared(self, strategy: Strategy, model: nn.Module, pieces: Mapping[str, list[Piece]]) -> Prepared:
        strategy.setup()
        comm, whole = self.job.comm, self.whole  # not self: what the constructor did is needed no more
        first = self.job.spec.grid.spot(comm.rank).replica == 0

        def save(path: Path) -> None:
            own = {name: tensor for name, tensor in model.state_dict().items() if not tensor.is_meta} if first else {}
            save_parts(path, whole, pieces, own, comm)

        return Prepared(strategy, self.parameters, self.fresh, save)


class Putting:
    """Puts values in the places of a model's tensors without storage, in their precision.

    What several layers share stays one.
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
        """Not a view of the whole, which would keep that alive."""
        value = value.to(old.dtype)
        value = value.contiguous(memory_format=self.layout if value.dim() == 4 else torch.contiguous_format)
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value


def prepare_divided(job: Job, data: DataInfo) -> Prepared:
    """Of ranks that each have a part of the model."""
    return _prepare_pipeline(job, data) if job.spec.strategy == "pipeline" else _prepare_tensor(job, data)


def _prepare_pipeline(job: Job, data: DataInfo) -> Prepared:
    spec, comm, grid = job.spec, job.comm, job.spec.grid
    assert spec.schedule is not None
    assert spec.microbatches is not None
    assert spec.averaging is not None
    spot, parts = grid.spot(comm.rank), Parts(job, data)
    graph = all_or_none(lambda: trace_model(spec, data, parts.deferred.model, job.place), comm)
    edges = _agree_on_cuts(job, graph)
    owned = _by_stage(graph, edges)
    parts.fill(graph.model, owned[spot.stage])
    # A stage that holds one micro-batch at a time has nothing to save by computing it again.
    again = spec.recompute and in_flight(spec.schedule, grid.stages, spec.microbatches, spot.stage) > 1
    executor = Executor(
        graph,
        edges[spot.stage],
        edges[spot.stage + 1],
        comm.dup() if comm.size > 1 else comm,
        Neighbours(
            grid.rank(spot.replica, spot.stage - 1, 0) if spot.stage else None,
            grid.rank(spot.replica, spot.stage + 1, 0) if spot.stage < grid.stages - 1 else None,
        ),
        score,
        recompute=again,
    )
    trained = [p for p in executor.training.parameters() if p.requires_grad]
    options = PipelineOptions(
        grid,
        spec.schedule,
        spec.microbatches,
        spec.batch_size,
        spec.averaging,
        spec.bucket_mb,
        spec.check_replicas,
    )
    strategy = Pipeline(comm, executor, make_optimizer(spec, trained) if trained else None, options)
    pieces = {name: [Piece(grid.rank(0, stage, 0), 0, 0, _rows(parts.whole[name]))]
              for stage, names in enumerate(owned) for name in names if name in parts.whole}  # fmt: skip
    seed_dropout(spec, comm.rank)
    return parts.prepared(strategy, graph.model, pieces)


def _by_stage(graph: Graph, edges: list[int]) -> list[list[str]]:
    """The names of every stage's tensors: all names of what its layers use. What no layer uses is the last one's."""
    owned = [graph.owned(a, b) for a, b in pairwise(edges)]
    tensors = graph.model.state_dict(keep_vars=True)
    stage_of = {id(tensors[name]): stage for stage, names in enumerate(owned) for name in names if name in tensors}
    for name, tensor in tensors.items():
        stage = stage_of.get(id(tensor), len(owned) - 1)
        if name not in owned[stage]:
            owned[stage].append(name)
    return owned


def _agree_on_cuts(job: Job, graph: Graph) -> list[int]:
    """The edges of all stages. One rank measures, plans, and tells the others.

    It runs each layer, and so needs the memory of the largest: it is the one that has most, or the last, whose layers
    usually are the largest.
    """
    spec, comm = job.spec, job.comm
    link = measure_link(spec, comm)
    devices = stage_devices(spec.grid.stages, spec.memory, spec.speed)
    planner = spec.grid.rank(0, max(range(len(devices)), key=lambda stage: (devices[stage].memory or 0, stage)), 0)
    if spec.cut == "measured":
        job.console.line("Running each layer, to find the best cut ...")

    def make() -> dict[str, Any]:
        try:
            speed = devices[spec.grid.spot(planner).stage].speed
            made = make_plan(spec, graph, link, speed=speed) if comm.rank == planner else None
            return {"plan": made.as_dict()} if made else {}
        except UsageError as error:
            return {"error": str(error)}

    found = json.loads(tell(json.dumps(all_or_none(make, comm)), comm, planner))
    if "error" in found:
        raise AgreedError(found["error"])
    plan = Plan.from_dict(found["plan"])
    if comm.rank == 0:
        for line in lines(plan):
            job.console.line(line)
        write_whole(job.folder / "plan.json", dump(found["plan"], indent=1) + "\n")
    return [0, *plan.positions(), len(graph.nodes)]


def _prepare_tensor(job: Job, data: DataInfo) -> Prepared:
    spec, comm, grid = job.spec, job.comm, job.spec.grid
    assert spec.averaging is not None
    parts = Parts(job, data)
    shards = comm.group(grid.shards_of(comm.rank))
    replicas = comm.group(grid.replicas_of(comm.rank))
    model = parts.deferred.model.to(job.place.dtype)
    try:
        split = split_wide(model, shards, spec.model, job.console.line)
    except UsageError as error:  # the same on every rank
        raise AgreedError(str(error)) from error

    def own_part(name: str, tensor: Tensor) -> Tensor:
        if name not in split:
            return tensor
        part = share(tensor.shape[split[name]], shards.size, shards.rank)
        return tensor.narrow(split[name], part.start, len(part))

    parts.fill(model, parts.deferred.names, own_part)
    options = Options(spec.averaging, spec.bucket_mb, spec.overlap, check_replicas=spec.check_replicas)
    optimizer = make_optimizer(spec, model.parameters())
    strategy = TensorParallel(comm, model, optimizer, options, shards, replicas, split)
    pieces = {}
    for name, tensor in parts.whole.items():
        dim = split.get(name)
        spans = [share(tensor.shape[dim], grid.shards, i) for i in range(grid.shards)] if dim is not None else []
        pieces[name] = [Piece(rank, dim or 0, span.start, span.stop) for rank, span in enumerate(spans)]
        pieces[name] = pieces[name] or [Piece(0, 0, 0, _rows(tensor))]
    # Shards of a replica drop the same activations.
    seed_dropout(spec, grid.spot(comm.rank).replica)
    return parts.prepared(strategy, model, pieces)


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.dim() else 1

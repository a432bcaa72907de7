"""Plans where to cut a model into stages: builds it without storage, measures its layers, and searches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from paceline.comm.base import Comm
from paceline.data import table as datasets
from paceline.data.load import load
from paceline.data.table import DataInfo
from paceline.layout import threads_per_rank
from paceline.pipeline.devices import stage_devices
from paceline.pipeline.graph import Graph, trace
from paceline.pipeline.link import bandwidths, local_bandwidth
from paceline.pipeline.partition import cut_by
from paceline.pipeline.plan import StagePlan
from paceline.pipeline.profile import count, measure
from paceline.pipeline.resident import give_back_memory, resident_bytes
from paceline.spec import RunSpec, check_data
from paceline.strategies.partitioned import build_without_storage
from paceline.strategies.setup import Place, choose_place, example, make_optimizer, memory_layout

Told = Callable[[int, int], None]


def _silent(done: int, of: int) -> None:
    """Show no progress."""


def trace_model(spec: RunSpec, data: DataInfo, model: nn.Module, place: Place) -> Graph:
    """The graph of a model without storage, in the precision and memory layout of the training."""
    layout = memory_layout(spec)
    model = model.to(place.dtype, memory_format=layout)  # type: ignore[call-overload]
    return trace(model, example(spec, data, 1, place.dtype, "meta"), layout, spec.model)


def micro_size(spec: RunSpec) -> int:
    """Samples of the largest micro-batch."""
    micros: int = spec.microbatches
    return -(-spec.batch_size // micros)


def make_plan(
    spec: RunSpec, graph: Graph, link: float | None, told: Told = _silent, *, run: bool = False, speed: float = 1.0
) -> StagePlan:
    """The plan for the spec. Every node is run if times or memory are needed, or with `run`.

    `speed` is that of this machine; measured times are converted to a machine of speed 1.
    """
    devices = stage_devices(spec.stages, spec.memory, spec.speed)
    if run or spec.cut == "measured" or spec.memory:
        profile = measure(
            graph, micro_size(spec), lambda weights: make_optimizer(spec, weights), resident_bytes(), told
        )
        give_back_memory()
        nodes = [replace(n, forward=n.forward * speed, backward=n.backward * speed, update=n.update * speed)
                 for n in profile.nodes]  # fmt: skip
        batch = spec.batch_size * graph.sample_bytes
        profile = replace(profile, nodes=tuple(nodes), batch_bytes=batch, copies=1.0 if spec.validation else 0.0)
    else:
        profile = count(graph, micro_size(spec))
    return cut_by(spec.cut, profile, devices, spec.schedule, spec.microbatches, link, spec.recompute)


def measure_link(spec: RunSpec, comm: Comm) -> float | None:
    """The speed of the slowest link between two stages of the first replica; all ranks call it."""
    stages = [spec.grid.rank(0, stage, 0) for stage in range(spec.grid.stages)]
    return min(bandwidths(comm, stages), default=None)


def plan_cut(spec: RunSpec, told: Told, link: float | None = None) -> StagePlan:
    """A plan made by this process alone, without training, as if all stages were on its machine.

    Without `link`, the speed of messages between two processes here is measured.
    """
    torch.set_num_threads(spec.threads or threads_per_rank(spec.stages))
    folder = Path(spec.data_dir) if spec.data_dir else None
    info = datasets.describe(spec.data) or load(spec.data, folder).info
    check_data(spec, info)
    graph = trace_model(spec, info, build_without_storage(spec, info).model, choose_place(spec, 0))
    link = link or (local_bandwidth() if spec.stages > 1 else None)
    return make_plan(spec, graph, link, told, run=True)

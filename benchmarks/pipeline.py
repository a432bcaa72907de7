"""The pipeline's executor beside torch.distributed.pipelining: same layers, cut, schedule, micro-batches, optimizer.

    torchrun --standalone --nproc-per-node 2 benchmarks/pipeline.py [--rounds 9] [--steps 3] [--model resnet50 …]

Both run in the same processes over gloo on the loopback interface, one thread each, in turn: every round runs one, then
the other, and the next round the other way round. A ratio compares the two within a round; shown are its median and its
interval (95 %, by the bootstrap). Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable, Collection

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from paceline.comm.base import Comm
from paceline.comm.process_group import process_group_world
from paceline.data.batch import Batch
from paceline.launch.memory import keep_freed_memory
from paceline.models.build import build
from paceline.models.deferred import Deferred, defer
from paceline.pipeline.executor import Executor, Neighbours
from paceline.pipeline.graph import Graph, trace
from paceline.pipeline.link import bandwidth
from paceline.pipeline.partition import find
from paceline.pipeline.plan import Device
from paceline.pipeline.profile import measure
from paceline.pipeline.schedule import instructions
from paceline.tasks.scoring import Scorer
from paceline.tasks.table import CLASSIFICATION

THEIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
MICROS = 8


def sgd(weights: list[Tensor] | object) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.001, momentum=0.9, fused=True)  # type: ignore[arg-type]


def edges_of(graph: Graph, comm: Comm, micro: int) -> list[int]:
    """The cut, as rank 0 finds it."""
    positions = torch.zeros(comm.size - 1, dtype=torch.int64)
    link = bandwidth(comm, 0, 1)
    if comm.rank == 0:
        plan = find(measure(graph, micro, sgd, 0), [Device()] * comm.size, "1f1b", MICROS, link, False)
        positions.copy_(torch.tensor(plan.positions()))
        print(f"{'':<12}cut at {[stage.layers[-1] for stage in plan.stages[:-1]]}, predicted "
              f"{[round(1000 * stage.total_seconds) for stage in plan.stages]} ms a micro-batch")  # fmt: skip
    comm.broadcast(positions)
    return [0, *positions.tolist(), len(graph.nodes)]


def fill(model: nn.Module, deferred: Deferred, names: Collection[str]) -> None:
    """Give these tensors of a model without storage their first values."""
    for name, value in deferred.values(names):
        path, _, last = name.rpartition(".")
        layer = model.get_submodule(path)
        setattr(layer, last, nn.Parameter(value) if isinstance(getattr(layer, last), nn.Parameter) else value)


class Only(nn.Module):
    """A stage whose single output is a tensor, as torch's pipelining wants it from the last one."""

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        self.stage = stage

    def forward(self, *inputs: Tensor) -> Tensor:
        (output,) = self.stage(*inputs)
        result: Tensor = output
        return result


def contenders(
    model: str, size: int, batch: int, schedule: str, comm: Comm
) -> tuple[Callable[[], None], Callable[[], None]]:
    """A step of ours, a step of theirs, on the same weights."""
    shape, rank = (3, size, size), comm.rank
    deferred = defer(lambda: build(model, shape, 10, 0.0), 0)
    graph = trace(deferred.model, torch.empty(1, *shape, device="meta"), torch.contiguous_format, model)
    edges = edges_of(graph, comm, batch // MICROS)
    fill(graph.model, deferred, graph.owned(edges[rank], edges[rank + 1]))
    first, final = rank == 0, rank == comm.size - 1
    neighbours = Neighbours(None if first else rank - 1, None if final else rank + 1)
    executor = Executor(graph, edges[rank], edges[rank + 1], comm, neighbours, Scorer(CLASSIFICATION), recompute=False)
    optimizer = sgd(executor.training.parameters())
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(batch, *shape, generator=generator)
    labels = torch.randint(10, (batch,), generator=generator)
    program = instructions(schedule, comm.size, MICROS, rank)

    def ours() -> None:
        optimizer.zero_grad(set_to_none=True)
        micros = Batch(images, labels, batch).split([batch // MICROS] * MICROS)
        executor.run(program, micros, 1 / batch, lambda what, micro: None)
        optimizer.step()

    module = Only(executor.training) if final else executor.training
    stage = PipelineStage(module, rank, comm.size, torch.device("cpu"))
    runner = THEIRS[schedule](stage, MICROS, loss_fn=F.cross_entropy)

    def theirs() -> None:
        optimizer.zero_grad(set_to_none=True)
        losses: list[Tensor] = []
        if first:
            runner.step(images, return_outputs=False)
        elif final:
            runner.step(target=labels, losses=losses, return_outputs=False)
            sum(loss.item() for loss in losses)  # as this project does for each micro-batch
        else:
            runner.step(return_outputs=False)
        optimizer.step()

    return ours, theirs


def timed(step: Callable[[], None], steps: int, comm: Comm) -> float:
    comm.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        step()
    comm.barrier()
    return (time.perf_counter() - start) / steps


def interval(values: list[float]) -> tuple[float, float]:
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return medians[50], medians[1949]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--model", nargs="*", default=["resnet50", "vgg16"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + 1, is_master=rank == 0)
    with process_group_world("gloo", store, rank, size, 120.0) as comm:
        for model in args.model:
            for schedule in THEIRS:
                ours, theirs = contenders(model, args.image_size, args.batch, schedule, comm)
                timed(ours, 1, comm)
                timed(theirs, 1, comm)
                pairs = []
                for turn in range(args.rounds):
                    order = (ours, theirs) if turn % 2 else (theirs, ours)
                    seconds = {step: timed(step, args.steps, comm) for step in order}
                    pairs.append((seconds[ours], seconds[theirs]))
                if rank == 0:
                    ratios = [b / a for a, b in pairs]
                    low, high = interval(ratios)
                    rates = [args.batch / statistics.median(side) for side in zip(*pairs, strict=True)]
                    print(
                        f"{model:<12}{schedule:<6} paceline {rates[0]:7.2f} samples/s, torch {rates[1]:7.2f}; ratio "
                        f"{statistics.median(ratios):.3f} ({low:.3f}–{high:.3f})",
                        flush=True,
                    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

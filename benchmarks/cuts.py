"""Is the cut that was found a good one? Beside equal numbers of layers and equal numbers of parameters, in one run.

    torchrun --standalone --nproc-per-node 2 benchmarks/cuts.py [--rounds 9] [--model resnet50 vgg16 lopsided]

Two stages, one thread each, gloo on the loopback interface. All three cuts live in the same processes and take turns:
a round is a step of each, in an order that changes from round to round. A ratio compares two cuts within a round; shown
are its median and its 95 % interval (bootstrap). Beside them, for each stage, the time of computing a micro-batch that
the plan predicts and the one that was measured. Nothing else should run on the machine.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch
import torch.distributed as dist
from pipeline import fill, interval, sgd
from torch import nn

from paceline.comm.base import Comm
from paceline.comm.process_group import process_group_world
from paceline.data.batch import Batch
from paceline.launch.memory import keep_freed_memory
from paceline.models.build import build
from paceline.models.deferred import Deferred, defer
from paceline.pipeline.executor import Executor, Neighbours
from paceline.pipeline.graph import Graph, trace
from paceline.pipeline.link import bandwidth
from paceline.pipeline.partition import equal_layers, equal_parameters, find, plan_at
from paceline.pipeline.plan import Device, StagePlan
from paceline.pipeline.profile import count, measure
from paceline.pipeline.schedule import instructions
from paceline.tasks.scoring import Scorer
from paceline.tasks.table import CLASSIFICATION

MICROS = 8
DEVICES = [Device(), Device()]


def lopsided(channels: int, classes: int) -> nn.Module:
    """Nearly all of the time is in its first layers, nearly all of the parameters in its last, and many do little."""
    first = [nn.Conv2d(channels, 64, 5, padding=2), nn.ReLU(), nn.Conv2d(64, 64, 5, padding=2), nn.ReLU()]
    middle = [layer for _ in range(10) for layer in (nn.Conv2d(64, 64, 1, groups=64), nn.Tanh())]
    last = [nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, classes)]
    return nn.Sequential(*first, nn.MaxPool2d(4), *middle, *last)


def traced(name: str, size: int) -> tuple[Deferred, Graph]:
    shape = (3, size, size)
    deferred = defer(lambda: lopsided(3, 10) if name == "lopsided" else build(name, shape, 10, 0.0), 0)
    return deferred, trace(deferred.model, torch.empty(1, *shape, device="meta"), torch.contiguous_format, name)


class Contender:
    """A cut: this rank's stage of it, with weights of its own, and what its steps took."""

    def __init__(self, name: str, size: int, plan: StagePlan, comm: Comm) -> None:
        deferred, graph = traced(name, size)
        edges = [0, *plan.positions(), len(graph.nodes)]
        rank = comm.rank
        fill(graph.model, deferred, graph.owned(edges[rank], edges[rank + 1]))
        neighbours = Neighbours(None if rank == 0 else 0, None if rank else 1)
        self.executor = Executor(
            graph, edges[rank], edges[rank + 1], comm, neighbours, Scorer(CLASSIFICATION), recompute=False
        )
        self.plan, self.comm, self.optimizer = plan, comm, sgd(self.executor.training.parameters())
        self.program = instructions("1f1b", comm.size, MICROS, rank)
        self.seconds: list[float] = []
        self.busy: list[float] = []

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        size, busy, last = len(labels) // MICROS, 0.0, time.perf_counter()

        def mark(what: str, micro: int) -> None:
            nonlocal busy, last
            now = time.perf_counter()
            busy += now - last if what in ("forward", "backward") else 0.0
            last = now
            del micro

        self.comm.barrier()
        start = last = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        micros = Batch(images, labels, len(labels)).split([size] * MICROS)
        self.executor.run(self.program, micros, 1 / len(labels), mark)
        updating = time.perf_counter()
        self.optimizer.step()
        busy += time.perf_counter() - updating
        self.comm.barrier()
        self.seconds.append(time.perf_counter() - start)
        self.busy.append(busy / MICROS)


def compare(name: str, size: int, batch: int, rounds: int, comm: Comm) -> None:
    shape, (_, graph) = (3, size, size), traced(name, size)
    link = bandwidth(comm, 0, 1)
    profile = measure(graph, batch // MICROS, sgd, 0) if comm.rank == 0 else count(graph, batch // MICROS)
    rest = ("1f1b", MICROS, link, False)
    cuts = {"found": find(profile, DEVICES, *rest).positions(), "equal layers": equal_layers(profile, 2),
            "equal parameters": equal_parameters(profile, 2)}  # fmt: skip
    chosen = torch.tensor(list(cuts.values()))
    comm.broadcast(chosen.view(-1))

    plans = {cut: plan_at(profile, at, DEVICES, *rest, "given") for cut, at in zip(cuts, chosen.tolist(), strict=True)}
    contenders = {cut: Contender(name, size, plan, comm) for cut, plan in plans.items()}
    images, labels = torch.randn(batch, *shape), torch.randint(10, (batch,))
    for turn in range(rounds + 1):
        order = list(contenders)[turn % 3 :] + list(contenders)[: turn % 3]
        for cut in order:
            contenders[cut].step(images, labels)
    busy = torch.zeros(3, 2, dtype=torch.float64)
    busy[:, comm.rank] = torch.tensor([statistics.median(each.busy[1:]) for each in contenders.values()])
    comm.allreduce(busy.view(-1))
    if comm.rank == 0:
        show(name, contenders, busy.tolist(), batch)


def show(name: str, contenders: dict[str, Contender], busy: list[list[float]], batch: int) -> None:
    found = contenders["found"].seconds[1:]
    for (cut, each), measured in zip(contenders.items(), busy, strict=True):
        ratios = [mine / best for mine, best in zip(each.seconds[1:], found, strict=True)]
        low, high = interval(ratios)
        predicted = [stage.seconds for stage in each.plan.stages]
        stages = ", ".join(f"{1000 * p:.1f} → {1000 * m:.1f} ({m / p - 1:+.0%})" for p, m in zip(predicted, measured,
                                                                                            strict=True))  # fmt: skip
        last = each.plan.stages[0].layers[-1]
        rate = batch / statistics.median(each.seconds[1:])
        print(
            f"{name:<10}{cut:<18}after {last:<22}{rate:7.1f} samples/s, time ÷ found "
            f"{statistics.median(ratios):.3f} ({low:.3f}–{high:.3f}); ms a micro-batch: {stages}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--model", nargs="*", default=["resnet50", "vgg16", "lopsided"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]) + 1, is_master=rank == 0)
    with process_group_world("gloo", store, rank, size, 300.0) as comm:
        for name in args.model:
            compare(name, args.image_size, args.batch, args.rounds, comm)


if __name__ == "__main__":
    main()

"""A language model in stages, as a case that runs on each rank; and a plain loop that trains the whole of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tensor_cases import difference
from torch import Tensor, nn

from paceline.checkpoint.save import share_out
from paceline.comm.base import Comm
from paceline.data.batch import Batch
from paceline.layout import Grid, share
from paceline.models.deferred import build_whole, defer
from paceline.models.gpt import Gpt
from paceline.pipeline.executor import Executor, Neighbours
from paceline.pipeline.graph import trace
from paceline.pipeline.partition import after_layers
from paceline.pipeline.profile import count
from paceline.strategies.engine import StepTimer
from paceline.strategies.partitioned import TensorFiller, Whole, rows
from paceline.strategies.pipeline.engine import Pipeline, PipelineOptions, stages_of
from paceline.strategies.replicas import digest
from paceline.strategies.weights import Piece
from paceline.tasks.scoring import Scorer
from paceline.tasks.table import LANGUAGE_MODEL

BLOCK, VOCABULARY, SEED, STEPS, MICROS, SAMPLES = 6, 17, 3, 5, 3, 7


def gpt() -> nn.Module:
    return Gpt(4, 2, 8, BLOCK, VOCABULARY, 0.0)


class TiedLinear(nn.Module):
    """Its output layer is a Linear with a bias, whose weights have two names; a third use of them is in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dense = nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8)
        self.logits, self.norm = nn.Linear(8, VOCABULARY), nn.LayerNorm(8)
        self.logits.weight = self.embed.weight
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.frozen(self.dense(self.embed(x)).tanh())
        x = self.frozen(F.linear(F.linear(x, self.embed.weight).softmax(-1), self.embed.weight.t()) + x)
        out: Tensor = self.logits(self.norm(x))
        return out


MODELS = {"gpt": gpt, "tied": TiedLinear}
CUTS = {
    ("gpt", 2): ["blocks.1"],
    ("gpt", 3): ["dropout", "blocks.2.attention"],
    ("gpt", 4): ["tokens", "blocks.1.norm2", "norm"],
    ("tied", 3): ["tanh", "add"],
}


def start(model: str) -> nn.Module:
    return build_whole(MODELS[model], SEED).double()


def batches(replicas: int) -> list[tuple[Tensor, Tensor]]:
    """The last one has one sample: all replicas but one have none."""
    found = []
    for step in range(STEPS):
        size = SAMPLES * replicas if step < STEPS - 1 else 1
        x = torch.randint(0, VOCABULARY, (size, BLOCK + 1), generator=torch.Generator().manual_seed(step))
        found.append((x[:, :-1], x[:, 1:]))
    return found


def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
    """Not Adam: the true gradient of the bias of keys is zero, and it would blow up what rounding makes of that."""
    return torch.optim.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.01)


def plain_loop(model: str, replicas: int) -> tuple[dict[str, Tensor], list[float]]:
    """The weights and the losses of the whole model in one process, whole batches at a time."""
    whole, losses = start(model), []
    optimizer = make_optimizer(p for p in whole.parameters() if p.requires_grad)
    for inputs, targets in batches(replicas):
        optimizer.zero_grad()
        loss = F.cross_entropy(whole(inputs).flatten(0, 1), targets.flatten(), reduction="sum")
        (loss / targets.numel()).backward()
        optimizer.step()
        losses.append(loss.item())
    return whole.state_dict(), losses


def in_stages(
    comm: Comm, model: str, stages: int, schedule: str, averaging: str, recompute: bool
) -> tuple[Pipeline, Grid]:
    """This rank's stage, which began without storage."""
    grid, deferred = Grid(comm.size // stages, stages=stages), defer(MODELS[model], SEED)
    spot, layout = grid.spot(comm.rank), torch.contiguous_format
    example = torch.empty(1, BLOCK, dtype=torch.int64, device="meta")
    graph = trace(deferred.model.double(), example, layout, model)
    edges = [0, *after_layers(count(graph, 2), CUTS[model, stages]), len(graph.nodes)]
    tensors, having = graph.model.state_dict(), stages_of(graph, edges)
    put = TensorFiller(graph.model, layout)
    for name, value in deferred.values([name for name, having_it in having.items() if spot.stage in having_it]):
        put(name, value)
    comm.barrier()  # of threads, none computes while another traces
    neighbours = Neighbours(comm.rank - 1 if spot.stage else None, comm.rank + 1 if spot.stage < stages - 1 else None)
    executor = Executor(
        graph,
        edges[spot.stage],
        edges[spot.stage + 1],
        comm.dup(),
        neighbours,
        Scorer(LANGUAGE_MODEL),
        recompute=recompute,
    )
    options = PipelineOptions(grid, schedule, MICROS, SAMPLES, averaging, bucket_mb=0.001, check_replicas=1)
    trained = [p for p in executor.training.parameters() if p.requires_grad]
    engine = Pipeline(comm, executor, make_optimizer(trained) if trained else None, options, having)
    pieces = {name: [Piece(grid.rank(0, having[name][0], 0), 0, 0, rows(t))] for name, t in tensors.items()}
    engine.whole = Whole(tensors, pieces, graph.model, spot.replica == 0)
    engine.setup()
    return engine, grid


def train_in_stages(
    comm: Comm,
    folder: str,
    model: str,
    stages: int,
    schedule: str = "1f1b",
    averaging: str = "allreduce",
    recompute: bool = False,
) -> dict[str, Any]:
    """What became of it: on rank 0 the distance from the plain loop, on each rank what it has and what it writes."""
    torch.set_num_threads(1)
    engine, grid = in_stages(comm, model, stages, schedule, averaging, recompute)
    spot, losses = grid.spot(comm.rank), []
    for inputs, targets in batches(grid.replicas):
        own = share(len(inputs), grid.replicas, spot.replica)
        batch = Batch(inputs[own.start : own.stop], targets[own.start : own.stop], len(inputs))
        losses.append(engine.step(batch, 0.1, 0, StepTimer()).sums.loss)
    path = Path(folder) / "model.safetensors"
    engine.save(path)
    found: dict[str, Any] = {
        "holders": {name: list(engine.holders(name, None)) for name in engine.state_dict()},
        "digests": {name: digest([tensor]) for name, tensor in engine.state_dict().items()},
        "writes": [held.name for held in share_out(engine.held({}), comm.rank) if not held.own],
    }
    if comm.rank == 0:
        weights, expected = plain_loop(model, grid.replicas)
        found["weights"] = difference(load_file(path), weights)
        found["losses"] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    engine.close()
    return found

"""Running statistics: an update moves them by the sample-weighted mean of what each worker's samples do to them."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import parity_cases as cases
import pytest
import torch
import torch.nn.functional as F
from parity_cases import distance, values_for
from safetensors.torch import load_file
from served import train_served
from torch import Tensor, nn
from worlds import ThreadWorld

from paceline.comm.single import SingleComm
from paceline.layout import share
from paceline.server.shard import Shard
from paceline.spec import resolve
from paceline.strategies.flat import FlatModel
from paceline.training.input import OwnInput
from paceline.training.sampler import Sampler
from paceline.training.setup import choose_place, make_input, make_model, make_optimizer


def values_of(parts: int, **more: Any) -> dict[str, Any]:
    """Three epochs of 24, 24 and 1 samples: in the last step only the last of several workers has any."""
    values = values_for("tiny-norm-sgd", parts, sync_batchnorm=False, warmup_epochs=0, decay="none")
    return values | {"data": "synthetic:1x16x16,train=49,test=30", "epochs": 3, **more}


@cache
def expected(parts: int) -> dict[str, Tensor]:
    """A plain loop that divides each global batch into `parts`, all of which start from the same statistics."""
    cases.register_tiny_norm()
    spec = resolve(("test", values_of(1, strategy="sequential"))).spec
    place = choose_place(spec, 0)
    source = make_input(spec, SingleComm(), place)
    assert isinstance(source, OwnInput)
    model, _ = make_model(spec, source.info, place)
    optimizer = make_optimizer(spec, model.parameters())
    sampler = Sampler(len(source.numbers["train"]), spec.batch_size, seed=spec.seed)
    for epoch in range(spec.epochs):
        for indices in sampler:
            optimizer.zero_grad()
            old = [b.clone() for b in model.buffers()]
            mean = [torch.zeros_like(b) for b in old]
            for part in range(parts):
                span = share(len(indices), parts, part)
                own = indices[span.start : span.stop]
                if not len(own):
                    continue
                batch = source.pick("train", torch.tensor(own), epoch)
                for buffer, value in zip(model.buffers(), old, strict=True):
                    buffer.copy_(value)
                (F.cross_entropy(model(batch.images), batch.labels, reduction="sum") / len(indices)).backward()
                for total, new in zip(mean, model.buffers(), strict=True):
                    total.add_(new * (len(own) / len(indices)) if new.is_floating_point() else new - total)
            for buffer, value in zip(model.buffers(), mean, strict=True):
                buffer.copy_(value)
            optimizer.step()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize(
    ("replicas", "values"),
    [
        (3, {"strategy": "allreduce"}),
        (2, {"strategy": "pipeline", "stages": 2, "workers": 4, "microbatches": 1, "cut": "layers"}),
    ],
    ids=["allreduce", "pipeline"],
)
def test_replicas_agree_on_the_weighted_mean(tmp_path: Path, replicas: int, values: dict[str, Any]) -> None:
    asked = values_of(replicas, **values)
    ThreadWorld(asked["workers"]).run(cases.train_here, folder=str(tmp_path), values=asked)
    assert distance(load_file(tmp_path / "model.safetensors"), expected(replicas)) <= 1e-12


@pytest.mark.parametrize(
    ("workers", "servers", "strategy"), [(3, 1, "ps-sync"), (3, 2, "ps-sync"), (2, 2, "ps-bounded")]
)
def test_servers_keep_the_weighted_mean(tmp_path: Path, workers: int, servers: int, strategy: str) -> None:
    bound = {"staleness": 0} if strategy == "ps-bounded" else {}
    _, weights = train_served(values_of(workers, strategy=strategy, servers=servers, **bound), tmp_path)
    assert distance(weights, expected(workers)) <= 1e-12


class Noted(nn.Module):
    """Counts, normalises, and has constants, of which one is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.tensor([-torch.inf, 0.0, 0.1]))
        self.register_buffer("places", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out


def test_asynchronous_statistics_are_those_of_the_batches_one_after_another() -> None:
    """However old the values that a worker started from: with 30 workers, adding up changes would swing without end."""
    torch.manual_seed(0)
    alone, flat = Noted().double(), FlatModel(Noted().double())
    kept = {0: flat.kept}
    shard = Shard(
        {0: (flat.weights, flat.trainable)}, lambda p: torch.optim.SGD(p, 0.0), lambda _: 0.0, None, kept=kept
    )
    sent = []
    for _ in range(30):  # all from the first values
        images = torch.randn(4, 3, dtype=torch.float64) + 5
        alone(images)
        loss, _ = flat.forward(images, torch.tensor([0, 1, 2, 0]))
        flat.backward(loss, 4, 4, last=True)
        sent.append(flat.gradient.clone())
    for update, gradient in enumerate(sent):
        shard.add(0, update, 0, 1, 0, gradient)
    flat.weights.copy_(shard.chunks[0].values)
    flat.arrived()
    for name, wanted in alone.state_dict().items():
        torch.testing.assert_close(flat.model.state_dict()[name], wanted, rtol=1e-12, atol=1e-12)

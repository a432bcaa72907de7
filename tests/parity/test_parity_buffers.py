"""Asynchronous servers' running statistics; those of the other strategies are compared with the plain loop's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.server.shard import Shard
from paceline.strategies.parameter_server.flat import FlatModel


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
        (F.cross_entropy(flat.model(images), torch.tensor([0, 1, 2, 0]))).backward()
        flat.collect(4, 4, last=True)
        sent.append(flat.gradient.clone())
    for update, gradient in enumerate(sent):
        shard.add(0, update, 0, 1, 0, gradient)
    flat.weights.copy_(shard.chunks[0].values)
    flat.arrived()
    for name, wanted in alone.state_dict().items():
        torch.testing.assert_close(flat.model.state_dict()[name], wanted, rtol=1e-12, atol=1e-12)

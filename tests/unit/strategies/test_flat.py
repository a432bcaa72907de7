"""Gradients of a model in one vector, moved there as backward makes them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from paceline.strategies.parameter_server.flat import FlatModel


def model() -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 2))
    layers.register_parameter("unused", nn.Parameter(torch.ones(4)))
    return layers.double()


def loss(of: nn.Module, seed: int) -> Tensor:
    inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(seed)).double()
    outputs: Tensor = of(inputs)
    return outputs.square().mean()


def test_gradients_are_those_of_autograd_and_add_up() -> None:
    plain, flat = model(), FlatModel(model())
    flat.gradient.fill_(9)
    for seed in (0, 1):
        loss(plain, seed).backward()
        loss(flat.model, seed).backward()
        assert all(p.grad is None for p in flat.model.parameters())
    flat.collect(6, 6, last=True)
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in plain.parameters()]
    assert torch.equal(flat.gradient[: flat.trainable], torch.cat([g.flatten() for g in expected]))

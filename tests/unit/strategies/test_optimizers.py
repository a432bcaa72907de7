"""Fused optimizers of channels_last parameters: they update what PyTorch's own do, and copy no gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import profile

from paceline.spec import resolve
from paceline.strategies.setup import make_optimizer

KINDS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}


def weights(layout: torch.memory_format) -> list[nn.Parameter]:
    dice = torch.Generator().manual_seed(3)
    convolution = torch.randn(16, 8, 3, 3, generator=dice, dtype=torch.float64)
    bias = torch.randn(16, generator=dice, dtype=torch.float64)
    return [nn.Parameter(convolution.contiguous(memory_format=layout)), nn.Parameter(bias)]


def give_gradients(parameters: list[nn.Parameter], step: int, layout: torch.memory_format) -> None:
    dice = torch.Generator().manual_seed(step)
    for p in parameters:
        gradient: Tensor = torch.randn(p.shape, generator=dice, dtype=p.dtype)
        p.grad = gradient.contiguous(memory_format=layout) if p.dim() == 4 else gradient


def made(kind: str, parameters: list[nn.Parameter], momentum: float) -> torch.optim.Optimizer:
    given: dict[str, Any] = {"optimizer": kind, "lr": 0.1, "weight_decay": 0.01}
    return make_optimizer(resolve(("test", given | ({"momentum": momentum} if kind == "sgd" else {}))).spec, parameters)


@pytest.mark.parametrize("gradients", [torch.channels_last, torch.contiguous_format], ids=["alike", "otherwise"])
@pytest.mark.parametrize(("kind", "momentum"), [("adam", 0.0), ("adamw", 0.0), ("sgd", 0.0), ("sgd", 0.9)])
def test_channels_last_parameters_are_updated_as_by_pytorchs_plain_optimizer(
    kind: str, momentum: float, gradients: torch.memory_format
) -> None:
    ours, plain = weights(torch.channels_last), weights(torch.contiguous_format)
    own = {"momentum": momentum} if kind == "sgd" else {}
    expected = KINDS[kind](plain, lr=0.1, weight_decay=0.01, fused=False, foreach=False, **own)
    optimizer = made(kind, ours, momentum)
    for step in range(4):
        give_gradients(ours, step, gradients if step else torch.channels_last)
        give_gradients(plain, step, torch.contiguous_format)
        optimizer.step()
        expected.step()
    for mine, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
        for key, value in expected.state[other].items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(optimizer.state[mine][key], value, rtol=0, atol=1e-12, check_dtype=False)


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_copies_no_gradient(kind: str) -> None:
    """Without `collect_flat` there is a clone of the convolution's; torch may stop making it one day."""
    parameters = weights(torch.channels_last)
    optimizer = made(kind, parameters, 0.9)
    give_gradients(parameters, 0, torch.channels_last)
    optimizer.step()
    with profile() as found:
        optimizer.step()
    assert "aten::clone" not in {event.key for event in found.key_averages()}

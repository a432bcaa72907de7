"""Random numbers that nobody keeps: torch's generator goes past them, in little memory."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils._pytree import tree_map_only

# Ranks that are threads share torch's random state.
RANDOM = threading.RLock()
CHUNK = 1 << 18  # numbers
_FLOATS = (torch.float32, torch.float64)
_aten = torch.ops.aten
_UNIFORM = (_aten.uniform_, _aten.rand, _aten.rand_like)
_NORMAL = (_aten.normal_, _aten.randn, _aten.randn_like)
# How much these draw is a matter of their arguments' values.
BY_VALUE = (_aten.multinomial, _aten.poisson, _aten.binomial, _aten._standard_gamma, _aten._sample_dirichlet)


def go_past(func: Any, args: Any, kwargs: Any, drawn: Tensor) -> None:
    """Leave the generator as an operation leaves it that draws `drawn`; tensors are on the meta device.

    None of BY_VALUE. What is not of the usual kinds is drawn in its full size.
    """
    packet, count, generator = func.overloadpacket, drawn.numel(), kwargs.get("generator")
    if packet in _UNIFORM and drawn.dtype in _FLOATS:
        _uniform(count, drawn.dtype, generator)
    elif packet in _NORMAL and drawn.dtype in _FLOATS and count >= 16 and drawn.is_contiguous():
        # ATen's normal_fill draws a uniform number for each, and makes them normal sixteen at a time; where that does
        # not come out even, it draws the last sixteen again.
        _uniform(count + (16 if count % 16 else 0), drawn.dtype, generator)
    else:
        args, kwargs = tree_map_only(Tensor, _zeros, (args, kwargs))
        func(*args, **kwargs)


def _uniform(count: int, dtype: torch.dtype, generator: Generator | None) -> None:
    scratch = torch.empty(min(count, CHUNK), dtype=dtype)
    for start in range(0, count, CHUNK):
        scratch[: count - start].uniform_(generator=generator)


def _zeros(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype).zero_()

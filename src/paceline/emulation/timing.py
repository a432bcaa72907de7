"""Computes when in a step each gradient is ready, from the operations before it, on torch's meta device."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

# The counter sets global module hooks, which ranks that are threads would share.
_COUNTING = threading.Lock()
_SAMPLES = 2  # batch-norm cannot train on one value per channel


@dataclass(frozen=True)
class Timing:
    """The points of a step, as fractions of its time: the end of forward, and when each parameter's gradient is ready.

    `ready` is in the order of the model's trainable parameters; `order` has their numbers in the order of backward,
    without parameters that have no gradient, which count as ready at the end.
    """

    macs: float  # multiply-adds of the forward pass of one sample
    forward: float
    ready: tuple[float, ...]
    order: tuple[int, ...]

    @classmethod
    def from_json(cls, text: str) -> Timing:
        macs, forward, ready, order = json.loads(text)
        return cls(macs, forward, tuple(ready), tuple(order))

    def to_json(self) -> str:
        """Numbers are the same, to the last bit, when they are read again."""
        return json.dumps(astuple(self))


def measure(model: nn.Module, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> Timing:
    """Run forward and backward on torch's meta device, where tensors have shapes and no values, and count operations.

    `shape` and `dtype` are those of an input; by default the dtype is the model's. Only convolutions and matrix
    products are counted; other operations are assumed to take no time.
    """
    weights = {name: _meta(p) for name, p in model.named_parameters()}
    trainable = [weights[name] for name, p in model.named_parameters() if p.requires_grad]
    inputs = torch.empty(_SAMPLES, *shape, device="meta", dtype=dtype or trainable[0].dtype)
    counter, done = FlopCounterMode(display=False), dict[int, int]()

    def note(number: int) -> Callable[[Tensor], None]:
        return lambda _: done.__setitem__(number, counter.get_total_flops())

    for number, weight in enumerate(trainable):
        weight.register_post_accumulate_grad_hook(note(number))
    with _COUNTING, counter:
        state = weights | {name: torch.empty_like(b, device="meta") for name, b in model.named_buffers()}
        output = functional_call(model, state, (inputs,))
        forward = counter.get_total_flops()
        output.sum().backward()
    total = counter.get_total_flops()
    ready = tuple(done.get(number, total) / total if total else 1.0 for number in range(len(trainable)))
    return Timing(forward / 2 / _SAMPLES, forward / total if total else 1 / 3, ready, tuple(done))


def _meta(p: nn.Parameter) -> Tensor:
    return torch.empty_like(p, device="meta").requires_grad_(p.requires_grad)

"""A model whose parameters and buffers are views of one flat vector, and whose gradients are views of another."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from paceline.checkpoint.state import CHANNELS_LAST
from paceline.models.properties import NORMS
from paceline.strategies.finite import is_finite


@dataclass(frozen=True)
class Place:
    """Where a tensor lies in the vector: from `start`, with its dimensions in this order."""

    names: tuple[str, ...]  # more than one, if several layers share it
    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def stop(self) -> int:
        return self.start + math.prod(self.shape)


class FlatModel:
    """Computes gradients at `weights` into `gradient`, in memory that can be exchanged.

    After the parameters, `weights` has the values of all buffers, such as batch-norm statistics; after the gradients,
    `gradient` has their changes. An update sets each buffer to `kept` × its value + the sum of all workers' changes.
    Changes are weighted by samples, so that with the same old values the result is the weighted mean of the workers'
    new values. For a running statistic, `kept` is 1 - momentum: then a change does not depend on the old values.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._buffers = sorted(model.buffers(), key=lambda b: not b.is_floating_point())
        self.trainable = sum(p.numel() for p in self._parameters)
        self.length = self.trainable + sum(b.numel() for b in self._buffers)
        dtype = self._parameters[0].dtype
        self.weights = torch.empty(self.length, dtype=dtype)
        names: dict[int, tuple[str, ...]] = {}
        for name, tensor in (
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ):
            names[id(tensor)] = (*names.get(id(tensor), ()), name)
        self.places: list[Place] = []
        start = 0
        for p in self._parameters:
            dense = p.is_contiguous() or (p.dim() == 4 and p.is_contiguous(memory_format=torch.channels_last))
            stride = p.stride() if dense else p.contiguous().stride()
            view = self.weights[start : start + p.numel()].as_strided(p.shape, stride, start)
            view.copy_(p.detach())
            p.data = view
            order = () if p.is_contiguous() else CHANNELS_LAST
            self.places.append(Place(names[id(p)], start, tuple(p.shape), p.dtype, order))
            start += p.numel()
        for b in self._buffers:
            self.places.append(Place(names[id(b)], start, tuple(b.shape), b.dtype))
            start += b.numel()
        self._stored = self._split(self.weights)
        if self._buffers:
            torch._foreach_copy_(self._stored, self._buffers)
        self._counts = self.trainable + sum(b.numel() for b in self._buffers if b.is_floating_point())
        self.kept = _kept(model, self._buffers, dtype)
        self.compute_in(torch.zeros(self.length, dtype=dtype))
        self._made = [False] * len(self._parameters)  # those whose gradients of this update have been moved
        for i, p in enumerate(self._parameters):
            p.register_post_accumulate_grad_hook(partial(self._move, i))

    def _move(self, i: int, p: Tensor) -> None:
        """Move a gradient to its place as soon as it is made: it is still in the cache, and its memory is used again.

        That is cheaper than letting autograd add to zeros in place.
        """
        assert p.grad is not None
        if self._made[i]:
            self._gradients[i].add_(p.grad)
        else:
            self._gradients[i].copy_(p.grad)
            self._made[i] = True
        p.grad = None

    def _split(self, flat: Tensor) -> list[Tensor]:
        """The buffers in a vector."""
        parts = flat[self.trainable :].split([b.numel() for b in self._buffers])
        return [part.view(b.shape) for part, b in zip(parts, self._buffers, strict=True)]

    def compute_in(self, gradient: Tensor) -> None:
        """Compute gradients into this memory."""
        self.gradient, self._change = gradient, self._split(gradient)
        self._gradients = [
            gradient[place.start : place.stop].as_strided(p.shape, p.stride(), gradient.storage_offset() + place.start)
            for p, place in zip(self._parameters, self.places, strict=False)
        ]

    def arrived(self) -> None:
        """New values have been written to `weights`."""
        if self._buffers:
            torch._foreach_copy_(self._buffers, self._stored)

    def collect(self, count: int, total: int, *, last: bool) -> None:
        """Complete `gradient`, that of `count` of an update's `total` samples, with the changes of buffers.

        Only the `last` part of an update changes integer buffers, such as the number of batches.
        """
        for gradient, made in zip(self._gradients, self._made, strict=True):
            if not made:
                gradient.zero_()
        self._made = [False] * len(self._parameters)
        if self._buffers:
            torch._foreach_copy_(self._change, self._buffers)
            change, old = self.gradient[self.trainable :], self.weights[self.trainable :]
            constant = (change == old) & (self.kept == 1)  # such as a mask, which may hold infinities
            change.sub_(self.kept * old).masked_fill_(constant, 0.0)
            self.gradient[self.trainable : self._counts] *= count / total
            self.gradient[self._counts :] *= last
            torch._foreach_copy_(self._buffers, self._stored)

    def first_nonfinite(self) -> int:
        """The position, from 1, of the first value of the gradient that is not finite, or 0 if all are."""
        if is_finite(self.gradient):
            return 0
        return 1 + int(self.gradient.isfinite().logical_not().nonzero()[0])

    def name(self, place: int) -> str | None:
        """The name of the tensor at this position, from 1, of the vector."""
        names = {id(tensor): name for name, tensor in self.model.state_dict(keep_vars=True).items()}
        for tensor in (*self._parameters, *self._buffers):
            if 0 < place <= tensor.numel():
                return names.get(id(tensor))
            place -= tensor.numel()
        return None

    def digest(self) -> str:
        """A digest of names and shapes, to check that ranks have the same model."""
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in self.model.state_dict().items()]
        return hashlib.sha256(repr(shapes).encode()).hexdigest()[:16]


def _kept(model: nn.Module, buffers: list[Tensor], dtype: torch.dtype) -> Tensor:
    """The factor by which an update multiplies each buffer value: 1, and 1 - momentum for running statistics."""
    parts = dict.fromkeys(map(id, buffers), 1.0)
    for module in model.modules():
        if isinstance(module, NORMS) and module.momentum is not None:
            parts |= dict.fromkeys(map(id, (module.running_mean, module.running_var)), 1 - module.momentum)
    return torch.cat(
        [torch.empty(0, dtype=dtype), *(b.new_full((b.numel(),), parts[id(b)], dtype=dtype) for b in buffers)]
    )

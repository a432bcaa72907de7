"""Counts the most bytes of tensors that a training step or an evaluation has at once, on torch's meta device.

Tensors on that device have shapes and no values: a batch of any size costs no memory, and hardly any time.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from paceline.data.batch import tensors
from paceline.data.input import AHEAD, evaluation_batch
from paceline.predict.anatomy import build_model
from paceline.spec import RunSpec
from paceline.strategies.setup import example, make_optimizer

_FEW = 1024  # values of a parameter whose optimizer state is counted


class ModelTensors:
    """The tensors of a model in training, in bytes; those of a step depend on the batch."""

    def __init__(self, spec: RunSpec) -> None:
        self._data, self._model = build_model(spec)
        self.dtype = torch.float64 if spec.dtype == "float64" else torch.float32
        self._model.to(self.dtype)
        self.trained = sum(p.nbytes for p in self._model.parameters() if p.requires_grad)
        self.weights = sum(t.nbytes for t in (*self._model.parameters(), *self._model.buffers()))
        self._found: dict[tuple[str, int], int] = {}

    def optimizer(self, spec: RunSpec) -> float:
        """Its state as a multiple of the trained parameters: 0 for plain SGD, 2 for Adam."""
        weight = torch.zeros(_FEW, requires_grad=True)
        weight.grad = torch.zeros_like(weight)
        optimizer = make_optimizer(spec, [weight])
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values() if torch.is_tensor(value)]
        return round(sum(value.numel() for value in state) / _FEW)

    def step(self, spec: RunSpec, *, keep_gradients: bool) -> int:
        """Besides the weights: inputs, also those that are prepared ahead, activations and gradients."""
        batch = spec.batch_size
        found = self._remember(
            f"step {keep_gradients}",
            batch,
            lambda: step_bytes(self._model, self._examples(spec, batch), keep_gradients=keep_gradients),
        )
        return found + AHEAD * sum(t.nbytes for t in tensors(self._examples(spec, batch)("meta")))

    def evaluation(self, spec: RunSpec) -> int:
        """Besides the weights, for a batch of the test set."""
        most = evaluation_batch(self._data, spec.input_shape(self._data))
        batch = max(1, min(most, -(-self._data.test // (spec.workers or 1))))
        return self._remember("evaluation", batch, lambda: evaluation_bytes(self._model, self._examples(spec, batch)))

    def _remember(self, name: str, batch: int, count: Callable[[], int]) -> int:
        if (name, batch) not in self._found:
            self._found[name, batch] = count()
        return self._found[name, batch]

    def _examples(self, spec: RunSpec, batch: int) -> Callable[[str], Any]:
        return lambda device: example(spec, self._data, batch, self.dtype, device)


class _Live(TorchFunctionMode):
    """Counts the storages of what functions return, of what autograd keeps, and of gradients, until they are freed."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self.now = self.most = 0
        self._sizes = {id(tensor.untyped_storage()): 0 for tensor in known}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in out if isinstance(out, tuple | list) else (out,):
            if isinstance(made, Tensor):
                self.add(made)
                if made.requires_grad and not made.is_leaf:
                    made.register_hook(self.add)  # its gradient
        return out

    def add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self._sizes:
            return
        self._sizes[id(storage)] = storage.nbytes()
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._free, id(storage)).atexit = False

    def keep(self, tensor: Tensor) -> Tensor:
        self.add(tensor)
        return tensor.detach()  # the tensor itself would be a reference cycle

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def step_bytes(model: nn.Module, example: Callable[[str], Any], *, keep_gradients: bool) -> int:
    """Besides the weights: inputs, activations and gradients in forward and backward.

    `example` creates a batch on a device. Without `keep_gradients`, the gradient of a weight is freed as soon as it is
    complete, because it is copied to a bucket.
    """
    weights = {name: _meta(p, trained=p.requires_grad) for name, p in model.named_parameters()}
    state = weights | {name: torch.empty_like(b, device="meta") for name, b in model.named_buffers()}

    live = _Live(state.values())

    def accumulated(weight: Tensor) -> None:
        assert weight.grad is not None
        live.add(weight.grad)
        if not keep_gradients:
            weight.grad = None

    for weight in weights.values():
        if weight.requires_grad:
            weight.register_post_accumulate_grad_hook(accumulated)
    with live, saved_tensors_hooks(live.keep, lambda tensor: tensor):
        output = functional_call(model, state, (example("meta"),))
        torch.log_softmax(output, -1).sum().backward()  # what a loss keeps of its input
    return live.most


def evaluation_bytes(model: nn.Module, example: Callable[[str], Any]) -> int:
    """Besides the weights: inputs and activations of a forward pass without backward."""
    state = {name: _meta(tensor) for name, tensor in [*model.named_parameters(), *model.named_buffers()]}
    live = _Live(state.values())
    with evaluating(model), torch.no_grad(), live:
        functional_call(model, state, (example("meta"),))
    return live.most


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    was = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was)


def _meta(tensor: Tensor, *, trained: bool = False) -> Tensor:
    return torch.empty_like(tensor, device="meta").requires_grad_(trained)

"""Synchronous data parallelism for a user's own training loop."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.errors import UsageError
from paceline.loop.nested import change_each, tensors_in
from paceline.loop.shares import latest, share_of
from paceline.loop.spans import queue_callback
from paceline.loop.world import world
from paceline.models.properties import NORMS
from paceline.strategies.averager import Averager
from paceline.strategies.finite import Watch, is_finite


class DataParallel(nn.Module):
    """Makes a model's training data-parallel: after backward, every rank has the gradients of the whole batch.

        model = paceline.DataParallel(model)
        ...
        loss = F.cross_entropy(model(inputs), targets)     # the mean over this rank's samples
        loss.backward()                                    # averages while it computes
        optimizer.step()

    All ranks start with rank 0's weights. Gradients are weighted by each rank's number of samples if the batch came
    from `paceline.shard`; otherwise ranks count equally. The running statistics of batch-norm layers are averaged with
    the gradients; `sync_batchnorm=True` normalises over the samples of all ranks. Parameters may be shared, unused, of
    several dtypes, and frozen and unfrozen at any time, on all ranks in the same step. Gradients in half precision are
    summed in float32. The state_dict has the model's own names, and so do named_parameters and the like.

    With `check_finite`, all ranks raise DivergedError, which names the rank, if a gradient is not finite; turn it off
    if a torch.amp.GradScaler skips such steps. With one rank, all of this does nothing.
    """

    def __init__(
        self,
        module: nn.Module,
        comm: Comm | None = None,
        averaging: str = "allreduce",
        *,
        bucket_mb: float = 4.0,
        overlap: str = "auto",
        sync_batchnorm: bool = False,
        check_finite: bool = True,
    ) -> None:
        super().__init__()
        self.module = module
        self.comm = comm = comm or world()
        self._sync, self._open, self._rounds, self._check_finite = True, False, 0, check_finite
        self._share = latest()  # of the last call of the model
        self._called = False  # since gradients were averaged last
        layers = () if sync_batchnorm else module.modules()
        self._statistics = [tensor for layer in layers for tensor in _running(layer)]
        self.averager = Averager(
            module,
            comm,
            averaging,
            bucket_mb=bucket_mb,
            overlap=overlap,
            sync_batchnorm=sync_batchnorm,
            extras=sum(tensor.numel() for tensor in self._statistics),
            on_backward=self._begin if comm.size > 1 else None,
        )
        self._before = self._flat_statistics()
        if comm.size > 1:
            self._watch = Watch(module, most=1)
            module.register_forward_pre_hook(_Hook(self._on_forward), with_kwargs=True)
            module.register_forward_hook(_Hook(self._on_output))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self, enabled: bool = True) -> Iterator[None]:
        """Let backward only add to this rank's gradients; the next backward outside of this averages them all.

        With `enabled` False, it does nothing: `with model.no_sync(micro < last):` accumulates over micro-batches.
        """
        before, self._sync = self._sync, self._sync and not enabled
        try:
            yield
        finally:
            self._sync = before

    def backward(self, loss: Tensor | None, share: float | None = None, **options: bool) -> None:
        """Like `loss.backward()`, for a rank whose part of the global batch is not what `paceline.shard` gave it.

        `loss` is the mean over this rank's samples, and `share` their part of the samples of all ranks, 1/N by default.
        A rank without samples passes share 0, or None as its loss. A loss that cannot be used is refused on all ranks.
        """
        size = self.comm.size
        share = (0.0 if loss is None else 1 / size) if share is None else share
        if share == 0 and not self.averager.needs_everyone:
            loss = None
        weighted = None if loss is None else loss if share * size == 1 else loss * (share * size)
        create_graph = options.pop("create_graph", False)
        if size == 1 or not self._sync:
            if weighted is not None:
                weighted.backward(create_graph=create_graph, **options)
            return
        self._open = True
        self.averager.compute(weighted, 1 / size, share, **options)
        if create_graph:
            self.averager.buckets.refuse(
                "create_graph=True: averaged gradients have no graph; compute a gradient penalty with "
                "torch.autograd.grad, and add it to the loss"
            )
        if share == 0 and any(layer.counted for layer in self.averager.synchronised):
            self.averager.buckets.refuse(
                "this rank has share 0, but its samples were counted in the statistics of synchronised batch-norm: "
                "cut its batch to inputs[:sampler.count(step)]"
            )
        self._average(share)

    def check_replicas(self, step: int) -> None:
        """Raise ReplicaError, naming a rank, unless all ranks have exactly the same weights."""
        self.averager.check_replicas(step)

    def close(self) -> None:
        self.averager.close()

    def __deepcopy__(self, memory: Any) -> nn.Module:
        """A copy is a plain model: of an average of the weights, for example."""
        return copy.deepcopy(self.module, memory)

    # The names of the model itself

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_modules(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
            return getattr(self.module, name)

    # What happens in forward and backward

    def _on_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return None
        if self._open:
            raise UsageError(
                "an earlier backward was ended by an error before its gradients were averaged; the other ranks may "
                "still wait for them: end this training"
            )
        self._share, self._called = share_of((args, kwargs)), True
        self.averager.buckets.expect_new()
        for layer in self.averager.synchronised:
            layer.idle = self._share is not None and not self._share.count
        if self._weight in (0, 1):
            return None
        if not any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
            return None
        # What goes through the model twice, or comes from another one, must be weighted once.
        return _weighted((args, kwargs), 1 / self._weight)

    @property
    def _weight(self) -> float:
        return self._share.weight(self.comm.size) if self._share else 1.0

    def _on_output(self, _module: nn.Module, _inputs: Any, output: Any) -> Any:
        """Weight what backward will bring by this rank's part of the global batch, before it reaches any layer."""
        if not torch.is_grad_enabled() or self._weight == 1:
            return None
        return _weighted(output, self._weight)

    def _begin(self) -> None:
        """A backward has reached a parameter."""
        if self._open or not self._sync:
            return
        self._open = True
        self.averager.begin(1 / self.comm.size)
        share = latest()
        if not self._called and share is not self._share and share and share.weight(self.comm.size) != 1:
            self.averager.buckets.refuse(
                "the loss was not computed by calling the model, so that it is not weighted by this rank's number of "
                "samples: call model(...), not one of its methods"
            )
        queue_callback(self._end)

    def _end(self) -> None:
        self.averager.end()
        self._average(self._share.count / self._share.total if self._share else 1 / self.comm.size)

    @torch.no_grad()
    def _average(self, share: float) -> None:
        """Wait for the sums. Statistics are sums of changes, so that those that did not change stay exactly equal."""
        self._rounds, self._called = self._rounds + 1, False
        extras = self.averager.buckets.extras
        if self._statistics:
            extras.copy_((self._flat_statistics() - self._before) * share)
        try:
            self.averager.average()
        finally:
            self._open = False
        if self._statistics:
            self._before += extras
            for tensor, values in zip(
                self._statistics, self._before.split([t.numel() for t in self._statistics]), strict=True
            ):
                tensor.copy_(values.view(tensor.shape))
        self._watch.end(self._rounds)
        if self._check_finite and not all(map(is_finite, self.averager.buckets.sums())):
            self._watch.check({}, self.comm, self._rounds, "a gradient is not finite")
        self._watch.begin(everything=False)

    def _flat_statistics(self) -> Tensor:
        like = self.averager.buckets.tail
        return torch.cat([like[:0], *(tensor.detach().reshape(-1).to(like) for tensor in self._statistics)])


def _running(layer: nn.Module) -> list[Tensor]:
    if not isinstance(layer, NORMS) or layer.running_mean is None or layer.running_var is None:
        return []
    return [layer.running_mean, layer.running_var]


class _Weigh(torch.autograd.Function):
    """Nothing in forward; in backward, a gradient is multiplied by the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: float) -> Tensor:
        ctx.weight = weight
        return x.clone()  # not a view, which could not be changed in place

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        # What a sample without a weight brings may be anything, even infinite.
        return gradient * ctx.weight if ctx.weight else torch.zeros_like(gradient), None


def _weighted(values: Any, weight: float) -> Any:
    """The same with every tensor that has a gradient weighted."""

    def weigh(value: Any) -> Any:
        if isinstance(value, Tensor):
            return _Weigh.apply(value, weight) if value.requires_grad else value  # type: ignore[no-untyped-call]
        hidden = [each for each in getattr(value, "__dict__", {}).values() if isinstance(each, Tensor)]
        if any(tensor.requires_grad for tensor in hidden) and not isinstance(value, nn.Module):
            raise UsageError(
                f"a {type(value).__name__} has tensors that cannot be weighted by the number of samples: let the model "
                f"take and return tensors, or lists, tuples, dicts or dataclasses of them"
            )
        return value

    return change_each(weigh, values)


class _Hook:
    """A hook on the user's model that its copies do not have."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, _memory: Any) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _no_hook, ()


def _nothing(*_: Any) -> None:
    """The hook of a copy."""


def _no_hook() -> Callable[..., None]:
    return _nothing

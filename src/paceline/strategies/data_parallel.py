"""Synchronous data parallelism for a user's own training loop: averages gradients over ranks."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.errors import unknown
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.overlap import OverlapChoice
from paceline.strategies.replicas import average_buffers, broadcast_state, check_equal, check_same_model
from paceline.strategies.sync_batchnorm import synchronise_batchnorm, synchronised_layers


class DataParallel:
    """Makes a model's training data-parallel.

        parallel = DataParallel(model, comm)
        ...
        parallel.backward(loss)      # instead of loss.backward(); gradients are then the same on all ranks
        optimizer.step()

    The constructor broadcasts rank 0's weights. A plain `loss.backward()` before `parallel.backward(loss)` adds
    to this rank's gradients without communication, which is how gradients are accumulated over several batches.
    Parameters may be frozen and unfrozen at any time, on all ranks in the same step.

    An error on one rank raises the same UsageError on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        averaging: str = "allreduce",
        *,
        bucket_mb: float = 4.0,
        overlap: str = "auto",
        sync_batchnorm: bool = False,
        extras: int = 0,
    ) -> None:
        if averaging not in AVERAGINGS:
            raise unknown("averaging", averaging, AVERAGINGS)
        self.comm, self.model = comm, model
        self.overlap = OverlapChoice(overlap, comm)
        settings = f"averaging={averaging!r}, {bucket_mb=}, {overlap=}, {sync_batchnorm=}"
        check_same_model(model, comm, settings)
        if sync_batchnorm:
            synchronise_batchnorm(model, comm)
        self._synchronised = synchronised_layers(model)
        self.needs_everyone = bool(self._synchronised)
        broadcast_state(model, comm)
        self.buckets = GradientBuckets(model, comm, AVERAGINGS[averaging], int(bucket_mb * 2**20), extras)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output; calling the model itself does the same."""
        return self.model(*args, **kwargs)

    def backward(
        self, loss: Tensor | None, share: float | None = None, *, retain_graph: bool = False, create_graph: bool = False
    ) -> None:
        """Compute the gradient of the sum of share × loss over all ranks, and leave it in every .grad.

        `loss` is the mean over this rank's samples, and `share` this rank's part of the global batch (`Sampler.share`);
        by default each of N ranks has 1/N. A rank without samples passes share 0, or None as its loss (then the default
        share is 0). `retain_graph` is autograd's; `create_graph` is refused, because averaged gradients have no graph.
        """
        if share is None:
            share = 0.0 if loss is None else 1 / self.comm.size
        self._compute(loss, share, share, retain_graph)
        if create_graph:
            self.buckets.refuse(
                "create_graph=True: averaged gradients have no graph; compute a gradient penalty with "
                "torch.autograd.grad, and add it to the loss"
            )
        if share == 0 and any(layer.counted for layer in self._synchronised):
            self.buckets.refuse(
                "this rank has share 0, but its samples were counted in the statistics of synchronised batch-norm: "
                "cut its batch to inputs[:sampler.count(step)]"
            )
        self.average()

    def compute(self, loss: Tensor | None, weight: float) -> None:
        """The first half of a step: backward of weight × loss; with overlap, sends buckets as they become ready.

        If every rank's loss is the sum over its samples, the weight is 1 / global batch.
        """
        self._compute(loss, weight, None, False)

    def _compute(self, loss: Tensor | None, weight: float, share: float | None, retain_graph: bool) -> None:
        start = time.perf_counter()
        if weight == 0 and not self.needs_everyone:
            loss = None
        self.buckets.backward(loss, weight, overlap=self.overlap.now(), share=share, retain_graph=retain_graph)
        self._computing = time.perf_counter() - start

    def average(self) -> None:
        """The second half of a step: wait for the sums."""
        start = time.perf_counter()
        self.buckets.finish()
        self.overlap.took(self._computing + time.perf_counter() - start)

    def average_buffers(self) -> None:
        """Make batch-norm statistics equal on all ranks; do this before evaluating or saving."""
        average_buffers(self.model, self.comm)

    def check_replicas(self, step: int) -> None:
        """Raise ReplicaError, naming a rank, unless all ranks have exactly the same weights."""
        check_equal(self.model, self.comm, step)

    def close(self) -> None:
        self.buckets.close()

"""Synchronous data parallelism for any model: replicas, each with a part of the batch, and averaged gradients."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor, nn

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.errors import unknown
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.overlap import OverlapChoice
from paceline.strategies.replicas import average_buffers, broadcast_state, check_equal
from paceline.strategies.sync_batchnorm import has_synchronised_batchnorm, synchronise_batchnorm


class DataParallel:
    """Makes a model's training data-parallel.

        parallel = DataParallel(model, comm)
        ...
        parallel.backward(loss)      # instead of loss.backward(); gradients are then the same on all ranks
        optimizer.step()

    The constructor gives every rank rank 0's weights. A plain `loss.backward()` before `parallel.backward(loss)` adds
    to this rank's gradients without communication, which is how gradients are accumulated over several batches.
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
        riders: int = 0,
    ) -> None:
        if averaging not in AVERAGINGS:
            raise unknown("averaging", averaging, AVERAGINGS)
        self.comm = comm
        self.model = synchronise_batchnorm(model, comm) if sync_batchnorm else model
        self.needs_everyone = has_synchronised_batchnorm(self.model)
        broadcast_state(self.model, comm)
        self.overlap = OverlapChoice(overlap, comm)
        self.buckets = GradientBuckets(
            self.model.parameters(), comm, AVERAGINGS[averaging], int(bucket_mb * 2**20), riders
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output. Calling the model itself does the same."""
        return self.model(*args, **kwargs)

    def backward(self, loss: Tensor | None, share: float | None = None) -> None:
        """Leave in every .grad the gradient of the sum of all ranks' share × loss.

        `share` is this rank's part of the global batch when the ranks' parts differ in size (`Sampler.share`); by
        default each of N ranks has 1/N. A rank without samples passes None, or a share of 0.
        """
        self.compute(loss, share)
        self.average()

    def compute(self, loss: Tensor | None, share: float | None = None) -> None:
        """The first half of `backward`: computes, and sends off what is ready where that overlaps."""
        start = time.perf_counter()
        share = 1 / self.comm.size if share is None else share
        if share == 0 and not self.needs_everyone:
            loss = None
        self.buckets.backward(loss, share, overlap=self.overlap.now())
        self._computing = time.perf_counter() - start

    def average(self) -> None:
        """The second half of `backward`: waits for the sums."""
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

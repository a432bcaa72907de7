"""Keeps replicas equal: sums their gradients while backward computes, or after it."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor, nn

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.errors import unknown
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.overlap import OverlapChoice
from paceline.strategies.replicas import broadcast_state, check_equal, check_same_model
from paceline.strategies.sync_batchnorm import synchronise_batchnorm, synchronised_layers


class Averager:
    """Gives all ranks rank 0's weights, and in every step the same gradients.

    A step is `compute` and `average`. Or a caller that runs backward itself calls `begin` when it starts (see
    `on_backward` of GradientBuckets), and `end` and `average` after it. An error on one rank raises the same UsageError
    on all ranks.
    """

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        averaging: str,
        *,
        bucket_mb: float,
        overlap: str,
        sync_batchnorm: bool,
        extras: int = 0,
        on_backward: Callable[[], None] | None = None,
        in_place: bool = False,
        kind: type[GradientBuckets] = GradientBuckets,
    ) -> None:
        if averaging not in AVERAGINGS:
            raise unknown("averaging", averaging, AVERAGINGS)
        self.comm, self.model = comm, model
        self.overlap = OverlapChoice(overlap, comm)
        settings = f"averaging={averaging!r}, {bucket_mb=}, {overlap=}, {sync_batchnorm=}"
        check_same_model(model, comm, settings)
        if sync_batchnorm:
            synchronise_batchnorm(model, comm)
        self.synchronised = synchronised_layers(model)
        broadcast_state(model, comm)
        size = int(bucket_mb * 2**20)
        self.buckets = kind(model, comm, AVERAGINGS[averaging], size, extras, on_backward, in_place=in_place)
        if self.buckets.shared and overlap == "auto":
            self.overlap.chosen = True

    @property
    def needs_everyone(self) -> bool:
        """Whether ranks without samples must run the model, too."""
        return bool(self.synchronised)

    def compute(
        self, loss: Tensor | None, scale: float, share: float | None = None, *, retain_graph: bool = False
    ) -> None:
        """The first half of a step: backward; with overlap, sends buckets as they become ready.

        Gradients are multiplied by `scale`: if every rank's loss is the sum over its samples, by 1 / global batch.
        """
        self._start = time.perf_counter()
        self.buckets.backward(loss, scale, overlap=self.overlap.now(), share=share, retain_graph=retain_graph)
        self._computing = time.perf_counter() - self._start

    def begin(self, scale: float) -> None:
        self._start = time.perf_counter()
        self.buckets.begin(scale, overlap=self.overlap.now())

    def end(self) -> None:
        self.buckets.end()
        self._computing = time.perf_counter() - self._start

    def average(self) -> None:
        """The second half of a step: wait for the sums."""
        start = time.perf_counter()
        self.buckets.finish()
        self.overlap.took(self._computing + time.perf_counter() - start)

    def check_replicas(self, step: int) -> None:
        """Raise ReplicaError, naming a rank, unless all ranks have exactly the same weights."""
        check_equal(self.model.parameters(), self.comm, step)

    def close(self) -> None:
        self.buckets.close()

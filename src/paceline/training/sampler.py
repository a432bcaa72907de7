"""Which samples each rank sees in each step: one global shuffle an epoch, the same for every number of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from paceline.errors import UsageError
from paceline.layout import share

_SHUFFLE, _HOLD_OUT = 0, 1


class Sampler:
    """Yields this rank's indices of each global batch; every sample comes exactly once an epoch.

    The last batch of an epoch is divided as evenly as the others, so some ranks may get none of it: they get an empty
    tensor, and `share` says what part of the global batch a rank has in a step.
    """

    def __init__(self, samples: int, batch_size: int, rank: int = 0, size: int = 1, seed: int = 0) -> None:
        if samples < 1 or batch_size < 1:
            raise UsageError(f"{samples} samples in batches of {batch_size}: both must be at least 1")
        self.samples, self.global_batch = samples, batch_size * size
        self.rank, self.size, self.seed, self.epoch = rank, size, seed, 0

    def __len__(self) -> int:
        """Steps in an epoch."""
        return math.ceil(self.samples / self.global_batch)

    def global_count(self, step: int) -> int:
        """Samples of all ranks together in a step."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def share(self, step: int) -> float:
        """This rank's part of the global batch."""
        count = self.global_count(step)
        return len(share(count, self.size, self.rank)) / count

    def order(self) -> Tensor:
        """The epoch's shuffle of all samples."""
        return shuffle(self.samples, self.seed, self.epoch)

    def __iter__(self) -> Iterator[Tensor]:
        """This rank's indices, step by step; then the next epoch's turn has come."""
        order = self.order()
        self.epoch += 1
        for step in range(len(self)):
            yield self.of_rank(order, step, self.rank)

    def of_rank(self, order: Tensor, step: int, rank: int) -> Tensor:
        start = step * self.global_batch
        part = share(self.global_count(step), self.size, rank)
        return order[start + part.start : start + part.stop]


def shuffle(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of all samples in an epoch."""
    return torch.from_numpy(np.random.default_rng([seed, _SHUFFLE, epoch]).permutation(samples))


def hold_out(samples: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide sample numbers into those to train on and `count` to validate with, both in rising order."""
    order = torch.from_numpy(np.random.default_rng([seed, _HOLD_OUT]).permutation(samples))
    return order[count:].sort().values, order[:count].sort().values

"""Which samples each rank has in each step: one global shuffle per epoch, the same for every number of ranks."""

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
    """Yields the indices of this rank's part of each global batch, for a DataLoader or a plain loop.

        sampler = Sampler(len(dataset), 64, comm.rank, comm.size)
        for step, (images, labels) in enumerate(DataLoader(dataset, batch_sampler=sampler)):
            ...
            parallel.backward(loss, sampler.share(step))

    The order of samples is part of the interface. Epoch e visits them in the order
    `np.random.default_rng([seed, 0, e]).permutation(samples)`, for any number of ranks. Step s has the positions
    [s·B, (s+1)·B) of that order, where B is the global batch; the last step of an epoch may have fewer. Of the c
    samples of a step, rank r of N has the positions [⌊c·r/N⌋, ⌊c·(r+1)/N⌋).

    If the last step has fewer samples than there are ranks, some ranks have share 0. They get the step's first sample,
    because models need at least one, and `DataParallel.backward` ignores their loss.
    """

    def __init__(self, samples: int, global_batch: int, rank: int = 0, size: int = 1, seed: int = 0) -> None:
        if samples < 1 or global_batch < 1:
            raise UsageError(f"{samples} samples in global batches of {global_batch}: both must be at least 1")
        if not 0 <= rank < size:
            raise UsageError(f"rank {rank} of {size}: ranks are numbered from 0 to size - 1")
        self.samples, self.global_batch = samples, global_batch
        self.rank, self.size, self.seed, self.epoch = rank, size, seed, 0
        self.first = 0  # the step at which the next epoch is entered, of a training that continues in the middle of one

    def __len__(self) -> int:
        """The number of steps in an epoch."""
        return math.ceil(self.samples / self.global_batch)

    def global_count(self, step: int) -> int:
        """Samples of all ranks together in a step."""
        return min(self.global_batch, self.samples - step * self.global_batch)

    def count(self, step: int) -> int:
        """Samples of this rank in a step."""
        return len(share(self.global_count(step), self.size, self.rank))

    def share(self, step: int) -> float:
        """This rank's part of the global batch; 0 if it has no samples in this step."""
        return self.count(step) / self.global_count(step)

    def order(self) -> Tensor:
        """The epoch's shuffle of all samples."""
        return shuffle(self.samples, self.seed, self.epoch)

    def __iter__(self) -> Iterator[list[int]]:
        """This rank's indices, step by step. The next iteration is the next epoch; assign to `epoch` to choose one."""
        order, first = self.order(), self.first
        self.epoch, self.first = self.epoch + 1, 0
        for step in range(first, len(self)):
            own = self.of_rank(order, step, self.rank)
            yield own.tolist() or [int(order[step * self.global_batch])]

    def of_rank(self, order: Tensor, step: int, rank: int) -> Tensor:
        """The samples of one rank in a step; none if its share is 0."""
        start = step * self.global_batch
        return part_of(order, range(start, start + self.global_count(step)), self.size, rank)


def part_of(order: Tensor, span: range, size: int, rank: int) -> Tensor:
    """One rank's samples of those at these positions of an epoch's order."""
    part = share(len(span), size, rank)
    return order[span.start + part.start : span.start + part.stop]


def shuffle(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of all samples in an epoch."""
    return torch.from_numpy(np.random.default_rng([seed, _SHUFFLE, epoch]).permutation(samples))


def hold_out(samples: int, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Divide sample numbers into a training set and a validation set of `count`, both in ascending order."""
    order = torch.from_numpy(np.random.default_rng([seed, _HOLD_OUT]).permutation(samples))
    return order[count:].sort().values, order[:count].sort().values

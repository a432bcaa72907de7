"""From data set to batches: every rank reads its own part, or rank 0 reads and scatters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.comm.base import Comm
from paceline.data.load import Dataset, Split
from paceline.layout import share
from paceline.strategies.base import Batch
from paceline.training.sampler import Sampler

EVALUATION_BATCH = 512


class Prepare:
    """Turns stored bytes into what the model eats: floats from 0 to 1, in the model's dtype, layout and place."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device

    def __call__(self, images: Tensor, labels: Tensor, global_count: int) -> Batch:
        floats = images.to(self.device).to(self.dtype, memory_format=torch.channels_last).mul_(1 / 255)
        return Batch(floats, labels.to(self.device), global_count)


class Input(Protocol):
    """Where a rank's batches come from."""

    def epoch(self, sampler: Sampler) -> Iterator[Batch]:
        """This rank's batches of the sampler's next epoch."""

    def evaluation(self, name: str) -> Iterator[Batch]:
        """This rank's part of the whole `validation` or `test` set, in order."""


@dataclass(frozen=True)
class Held:
    """A data set in memory or mapped, with the numbers of the samples to train on and to validate with."""

    data: Dataset
    train: Tensor
    validation: Tensor

    def chosen(self, name: str) -> tuple[Split, Tensor]:
        if name == "validation":
            return self.data.train, self.validation
        return self.data.test, torch.arange(len(self.data.test))


class OwnInput:
    """Every rank has the data set at hand and reads the samples it needs."""

    def __init__(self, held: Held, comm: Comm, prepare: Prepare) -> None:
        self.held, self.comm, self.prepare = held, comm, prepare

    def epoch(self, sampler: Sampler) -> Iterator[Batch]:
        split = self.held.data.train
        for step, picked in enumerate(sampler):
            numbers = self.held.train[picked]
            yield self.prepare(split.images[numbers], split.labels[numbers], sampler.global_count(step))

    def evaluation(self, name: str) -> Iterator[Batch]:
        split, chosen = self.held.chosen(name)
        mine = share(len(chosen), self.comm.size, self.comm.rank)
        for numbers in chosen[mine.start : mine.stop].split(EVALUATION_BATCH):
            yield self.prepare(split.images[numbers], split.labels[numbers], len(chosen))


class ScatteredInput:
    """Only rank 0 has the data set; it sends the others their samples: of each epoch, and once to evaluate with."""

    def __init__(self, held: Held | None, shape: tuple[int, ...], comm: Comm, prepare: Prepare) -> None:
        self.held, self.shape, self.comm, self.prepare = held, shape, comm, prepare
        self._kept: dict[str, Split] = {}

    def epoch(self, sampler: Sampler) -> Iterator[Batch]:
        counts = [len(share(sampler.global_count(step), sampler.size, sampler.rank)) for step in range(len(sampler))]
        order = sampler.order()
        sampler.epoch += 1

        def part(held: Held, rank: int) -> tuple[Split, Tensor]:
            picked = [sampler.of_rank(order, step, rank) for step in range(len(sampler))]
            return held.data.train, held.train[torch.cat(picked)]

        mine = self._scatter(part, sum(counts))
        for step, (images, labels) in enumerate(zip(mine.images.split(counts), mine.labels.split(counts), strict=True)):
            yield self.prepare(images, labels, sampler.global_count(step))

    def evaluation(self, name: str) -> Iterator[Batch]:
        if name not in self._kept:
            count = torch.tensor([len(self.held.chosen(name)[1]) if self.held else 0])
            self.comm.broadcast(count)
            total = int(count)

            def part(held: Held, rank: int) -> tuple[Split, Tensor]:
                split, chosen = held.chosen(name)
                theirs = share(total, self.comm.size, rank)
                return split, chosen[theirs.start : theirs.stop]

            self._kept[name] = self._scatter(part, len(share(total, self.comm.size, self.comm.rank)))
        kept = self._kept[name]
        for images, labels in zip(
            kept.images.split(EVALUATION_BATCH), kept.labels.split(EVALUATION_BATCH), strict=True
        ):
            yield self.prepare(images, labels, len(labels))

    def _scatter(self, part: Callable[[Held, int], tuple[Split, Tensor]], count: int) -> Split:
        """Rank 0 sends every other rank its part, one at a time; each returns its own `count` samples."""
        if self.held is None:
            mine = Split(torch.empty((count, *self.shape), dtype=torch.uint8), torch.empty(count, dtype=torch.int64))
            if count:
                self.comm.recv(mine.images.view(-1), 0)
                self.comm.recv(mine.labels, 0)
            return mine
        for rank in range(1, self.comm.size):
            split, numbers = part(self.held, rank)
            if len(numbers):
                self.comm.send(split.images[numbers].view(-1), rank)
                self.comm.send(split.labels[numbers], rank)
        split, numbers = part(self.held, 0)
        return Split(split.images[numbers], split.labels[numbers])

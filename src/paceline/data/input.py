"""Batches of a rank: every rank reads its own part, rank 0 reads and scatters, or all read with MPI-IO."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch
from torch import Tensor

from paceline.comm.base import Comm
from paceline.data.batch import Batch
from paceline.data.course import Course
from paceline.data.load import Dataset, Records, Split
from paceline.data.sampler import hold_out, part_of, shuffle
from paceline.data.table import DataInfo
from paceline.data.transforms import Prepare
from paceline.errors import PacelineError
from paceline.layout import share

T = TypeVar("T")
AHEAD = 2  # batches that are prepared ahead
# Seconds to wait for one batch before the disk counts as lost.
PATIENCE = 600.0
_EVALUATION_BATCH, _EVALUATION_VALUES = 512, 2**22

# The sample numbers in each batch of a rank.
BatchesOf = Callable[[int], list[Tensor]]
Samples = Iterator[tuple[Tensor, Tensor]]


class Input(ABC):
    """A rank's batches; a background thread prepares the next ones."""

    def __init__(self, info: DataInfo, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        self.info, self.seed, self.comm, self.prepare = info, seed, comm, prepare
        self.reader, self.readers = comm.rank, comm.size  # number of this reader, and of all that share the samples
        self.patience = PATIENCE if comm.size == 1 else patience(comm.timeout)
        train, held_out = hold_out(info.train, validation, seed)
        self.numbers = {"train": train, "validation": held_out, "test": torch.arange(info.test)}

    @abstractmethod
    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        """The stored images and labels of each of this rank's batches of `train`, `validation` or `test`.

        All ranks must call it. Samples that must be sent are sent before it returns; others are read on use.
        """

    def epoch(self, course: Course, epoch: int, steps: range) -> Iterator[Batch]:
        """This rank's batches of these steps of an epoch."""
        order = shuffle(course.samples, self.seed, epoch)

        def batches_of(rank: int) -> list[Tensor]:
            spans = [course.span(step) for step in steps]
            return [self.numbers["train"][part_of(order, span, self.readers, rank)] for span in spans]

        def make(samples: Samples) -> Iterator[Batch]:
            for step, numbers, (images, labels) in zip(steps, batches_of(self.reader), samples, strict=True):
                yield self._batch(self.prepare.train(images, epoch, numbers), labels, len(course.span(step)))

        return self._ahead(make(self.samples("train", batches_of)))

    def evaluation(self, name: str) -> tuple[int, Iterator[Batch]]:
        """This rank's part of the whole `validation` or `test` set, in order, and its number of batches."""
        numbers = self.numbers[name]
        channels = self.info.shape[0]
        size = evaluation_batch((channels, *(self.prepare.size or self.info.shape[1:])))

        def batches_of(rank: int) -> list[Tensor]:
            part = share(len(numbers), self.readers, rank)
            return list(numbers[part.start : part.stop].split(size))

        samples = self.samples(name, batches_of)
        batches = (self._batch(self.prepare.test(images), labels, len(numbers)) for images, labels in samples)
        return len(batches_of(self.reader)), self._ahead(batches)

    def _batch(self, images: Tensor, labels: Tensor, global_count: int) -> Batch:
        return Batch(images, labels.to(self.prepare.device).long(), global_count)

    def _ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches; the next ones are prepared while the caller uses one."""
        pool = ThreadPoolExecutor(1, "paceline-input")
        try:
            coming = deque(pool.submit(next, batches, None) for _ in range(AHEAD))
            while True:
                soonest = coming.popleft()
                if (batch := wait_for_batch(soonest, self.comm.rank, self.patience)) is None:
                    return
                coming.append(pool.submit(next, batches, None))
                yield batch
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def wait_for_batch(coming: Future[T], rank: int, seconds: float) -> T:
    if not wait([coming], seconds).done:
        raise PacelineError(
            f"rank {rank} waited {seconds:g} s for its next batch: is its disk still available? A longer "
            f"--timeout gives it more time"
        )
    return coming.result()


def patience(timeout: float) -> float:
    """How long to wait for a batch: less than `timeout`, so that a rank with a slow disk reports it itself."""
    return min(PATIENCE, 0.8 * timeout)


def evaluation_batch(shape: tuple[int, ...]) -> int:
    """A batch size for evaluation that needs a reasonable amount of memory."""
    return max(16, min(_EVALUATION_BATCH, _EVALUATION_VALUES // math.prod(shape)))


class OwnInput(Input):
    """Every rank has the data set and reads its samples on use."""

    def __init__(self, data: Dataset, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        super().__init__(data.info, validation, seed, comm, prepare)
        self.data = data

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        split = _split(self.data, name)
        return ((split.images[numbers], split.labels[numbers]) for numbers in batches_of(self.reader))

    def pick(self, name: str, places: Tensor, epoch: int | None = None) -> Batch:
        """The samples at these positions of `train`, `validation` or `test`; augmented if `epoch` is given."""
        numbers, split = self.numbers[name][places], _split(self.data, name)
        images, labels = split.images[numbers], split.labels[numbers]
        ready = self.prepare.test(images) if epoch is None else self.prepare.train(images, epoch, numbers)
        return self._batch(ready, labels, len(labels))


class LabelsInput(OwnInput):
    """Labels without pixels, for ranks that do not need images."""

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        labels = _split(self.data, name).labels
        return ((torch.empty(len(numbers), 0), labels[numbers]) for numbers in batches_of(self.reader))


class CountedInput(Input):
    """Batches of the right sizes without pixels, for emulated compute; only the size of the data set is used."""

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        return (_blank(len(numbers)) for numbers in batches_of(self.comm.rank))

    def pick(self, name: str, places: Tensor, epoch: int | None = None) -> Batch:
        return self._batch(*_blank(len(places)), len(places))


def _blank(count: int) -> tuple[Tensor, Tensor]:
    return torch.empty(count, 0), torch.zeros(count, dtype=torch.int64)


class PartInput(Input):
    """A rank gets its whole part of an epoch at once; it gets its part of an evaluation set only once."""

    def __init__(self, info: DataInfo, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        super().__init__(info, validation, seed, comm, prepare)
        self._kept: dict[str, tuple[Tensor, Tensor]] = {}

    @abstractmethod
    def part(self, name: str, numbers_of: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        """This rank's images and labels; all ranks must call it."""

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        def numbers_of(rank: int) -> Tensor:
            return torch.cat([torch.empty(0, dtype=torch.int64), *batches_of(rank)])

        images, labels = self._kept.get(name) or self.part(name, numbers_of)
        if name != "train":
            self._kept[name] = images, labels
        sizes = [len(numbers) for numbers in batches_of(self.comm.rank)]
        return zip(images.split(sizes), labels.split(sizes), strict=True)


class ScatteredInput(PartInput):
    """Only rank 0 has the data set; it sends the others their samples."""

    def __init__(
        self,
        data: Dataset | None,
        info: DataInfo,
        stored: torch.dtype,
        validation: int,
        seed: int,
        comm: Comm,
        prepare: Prepare,
    ) -> None:
        super().__init__(info, validation, seed, comm, prepare)
        self.data, self.stored = data, stored

    def part(self, name: str, numbers_of: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        """Rank 0 sends every other rank its part, one at a time."""
        if self.data is None:
            count = len(numbers_of(self.comm.rank))
            images = torch.empty((count, *self.info.shape), dtype=self.stored)
            labels = torch.empty(count, dtype=torch.int64)
            if count:
                self.comm.recv(images.view(-1), 0)
                self.comm.recv(labels, 0)
            return images, labels
        split = _split(self.data, name)
        for rank in range(1, self.comm.size):
            numbers = numbers_of(rank)
            if len(numbers):
                self.comm.send(split.images[numbers].reshape(-1), rank)
                self.comm.send(split.labels[numbers].long(), rank)
        numbers = numbers_of(0)
        return split.images[numbers], split.labels[numbers]


class TogetherInput(PartInput):
    """All ranks read their parts of the data set's file collectively, each through its own file view (MPI-IO)."""

    def __init__(self, data: Dataset, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        super().__init__(data.info, validation, seed, comm, prepare)
        self.data = data

    def part(self, name: str, numbers_of: Callable[[int], Tensor]) -> tuple[Tensor, Tensor]:
        where, numbers = _split(self.data, name).where, numbers_of(self.comm.rank)
        assert where is not None, "the spec has checked that the data set is in a file"
        images, labels = (self._read(records, numbers) for records in where)
        return images, labels

    def _read(self, records: Records, numbers: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, records.dtype)
        length = dtype.itemsize * math.prod(records.shape)
        raw = self.comm.read_records(records.path, records.offset + records.stride * numbers, length)
        return raw.view(dtype).view(-1, *records.shape)


def _split(data: Dataset, name: str) -> Split:
    return data.test if name == "test" else data.train

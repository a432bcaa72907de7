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
from paceline.data.batch import Batch, Form, Values, empty, split, tensors
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
Samples = Iterator[tuple[Values, Values]]


class Input(ABC):
    """A rank's batches; a background thread prepares the next ones."""

    def __init__(self, info: DataInfo, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        self.info, self.seed, self.prepare = info, seed, prepare
        self.share_with(comm)
        train, held_out = hold_out(info.train, validation, seed)
        self.numbers = {"train": train, "validation": held_out, "test": torch.arange(info.test)}

    def share_with(self, comm: Comm) -> None:
        """The ranks that share the samples from now on."""
        self.comm = comm
        self.reader, self.readers = comm.rank, comm.size  # number of this reader, and of all
        self.patience = PATIENCE if comm.size == 1 else patience(comm.timeout)

    @abstractmethod
    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        """The stored inputs and targets of each of this rank's batches of `train`, `validation` or `test`.

        All ranks must call it. Samples that must be sent are sent before it returns; others are read on use.
        """

    def epoch(self, course: Course, epoch: int, steps: range) -> Iterator[Batch]:
        """This rank's batches of these steps of an epoch."""
        order = shuffle(course.samples, self.seed, epoch)

        def batches_of(rank: int) -> list[Tensor]:
            spans = [course.span(step) for step in steps]
            return [self.numbers["train"][part_of(order, span, self.readers, rank)] for span in spans]

        def make(samples: Samples) -> Iterator[Batch]:
            for step, numbers, (inputs, targets) in zip(steps, batches_of(self.reader), samples, strict=True):
                yield self._batch(self.prepare.train(inputs, epoch, numbers), targets, len(course.span(step)))

        return self._ahead(make(self.samples("train", batches_of)))

    def evaluation(self, name: str) -> tuple[int, Iterator[Batch]]:
        """This rank's part of the whole `validation` or `test` set, in order, and its number of batches."""
        numbers = self.numbers[name]
        resized = self.prepare.size
        size = evaluation_batch(self.info, (self.info.shape[0], *resized) if resized else self.info.shape)

        def batches_of(rank: int) -> list[Tensor]:
            part = share(len(numbers), self.readers, rank)
            return list(numbers[part.start : part.stop].split(size))

        samples = self.samples(name, batches_of)
        batches = (self._batch(self.prepare.test(inputs), targets, len(numbers)) for inputs, targets in samples)
        return len(batches_of(self.reader)), self._ahead(batches)

    def _batch(self, inputs: Values, targets: Values, global_count: int) -> Batch:
        """A batch of inputs that are ready and targets as they are stored."""
        return Batch(inputs, self.prepare.targets(targets), global_count)

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


def evaluation_batch(info: DataInfo, shape: tuple[int, ...]) -> int:
    """A batch size for evaluation, of inputs of this shape, that needs a reasonable amount of memory.

    If every element of a sequence has a target, the logits are larger than the inputs.
    """
    values = max(math.prod(shape), math.prod(info.target_shape) * info.classes)
    return max(1 if info.target_shape else 16, min(_EVALUATION_BATCH, _EVALUATION_VALUES // values))


class OwnInput(Input):
    """Every rank has the data set and reads its samples on use."""

    def __init__(self, data: Dataset, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        super().__init__(data.info, validation, seed, comm, prepare)
        self.data = data

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        source = _split(self.data, name)
        return (source.take(numbers) for numbers in batches_of(self.reader))

    def pick(self, name: str, places: Tensor, epoch: int | None = None) -> Batch:
        """The samples at these positions of `train`, `validation` or `test`; augmented if `epoch` is given."""
        numbers = self.numbers[name][places]
        inputs, targets = _split(self.data, name).take(numbers)
        ready = self.prepare.test(inputs) if epoch is None else self.prepare.train(inputs, epoch, numbers)
        return self._batch(ready, targets, len(numbers))


class TargetsInput(OwnInput):
    """Targets without inputs, for ranks that do not need inputs."""

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        source = _split(self.data, name)
        return ((torch.empty(len(numbers), 0), source.take_targets(numbers)) for numbers in batches_of(self.reader))


class CountedInput(Input):
    """Batches of the right sizes without values, for emulated compute; only the description of the data is used."""

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        return (self._blank(len(numbers)) for numbers in batches_of(self.reader))

    def pick(self, name: str, places: Tensor, epoch: int | None = None) -> Batch:
        return self._batch(*self._blank(len(places)), len(places))

    def _blank(self, count: int) -> tuple[Tensor, Tensor]:
        dtype: torch.dtype = getattr(torch, self.info.target_dtype)
        return torch.empty(count, 0), torch.zeros(count, *self.info.target_shape, dtype=dtype)


class PartInput(Input):
    """A rank gets its whole part of an epoch at once; it gets its part of an evaluation set only once."""

    def __init__(self, info: DataInfo, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        super().__init__(info, validation, seed, comm, prepare)
        self._kept: dict[str, tuple[Values, Values]] = {}

    @abstractmethod
    def part(self, name: str, numbers_of: Callable[[int], Tensor]) -> tuple[Values, Values]:
        """This rank's inputs and targets; all ranks must call it."""

    def samples(self, name: str, batches_of: BatchesOf) -> Samples:
        def numbers_of(rank: int) -> Tensor:
            return torch.cat([torch.empty(0, dtype=torch.int64), *batches_of(rank)])

        inputs, targets = self._kept.get(name) or self.part(name, numbers_of)
        if name != "train":
            self._kept[name] = inputs, targets
        sizes = [len(numbers) for numbers in batches_of(self.comm.rank)]
        return zip(split(inputs, sizes), split(targets, sizes), strict=True)


class ScatteredInput(PartInput):
    """Only rank 0 has the data set; it sends the others their samples."""

    def __init__(
        self,
        data: Dataset | None,
        info: DataInfo,
        form: tuple[Form, Form],
        validation: int,
        seed: int,
        comm: Comm,
        prepare: Prepare,
    ) -> None:
        super().__init__(info, validation, seed, comm, prepare)
        self.data, self.form = data, form

    def part(self, name: str, numbers_of: Callable[[int], Tensor]) -> tuple[Values, Values]:
        """Rank 0 sends every other rank its part, one at a time."""
        if self.data is None:
            count = len(numbers_of(self.comm.rank))
            inputs, targets = (empty(form, count) for form in self.form)
            for tensor in tensors(inputs) + tensors(targets) if count else ():
                self.comm.recv(as_bytes(tensor), 0)
            return inputs, targets
        source = _split(self.data, name)
        for rank in range(1, self.comm.size):
            numbers = numbers_of(rank)
            inputs, targets = source.take(numbers)
            for tensor in tensors(inputs) + tensors(targets) if len(numbers) else ():
                self.comm.send(as_bytes(tensor), rank)
        return source.take(numbers_of(0))


def as_bytes(tensor: Tensor) -> Tensor:
    """The content as a row of bytes; a view, if the tensor is contiguous."""
    return tensor.contiguous().view(-1).view(torch.uint8)


class TogetherInput(PartInput):
    """All ranks read their parts of the data set's file collectively, each through its own file view (MPI-IO)."""

    def __init__(self, data: Dataset, validation: int, seed: int, comm: Comm, prepare: Prepare) -> None:
        super().__init__(data.info, validation, seed, comm, prepare)
        self.data = data

    def part(self, name: str, numbers_of: Callable[[int], Tensor]) -> tuple[Values, Values]:
        where, numbers = _split(self.data, name).where, numbers_of(self.comm.rank)
        assert where is not None, "the spec has checked that the data set is in a file"
        inputs, targets = (self._read(records, numbers) for records in where)
        return inputs, targets

    def _read(self, records: Records, numbers: Tensor) -> Tensor:
        dtype: torch.dtype = getattr(torch, records.dtype)
        length = dtype.itemsize * math.prod(records.shape)
        raw = self.comm.read_records(records.path, records.offset + records.stride * numbers, length)
        return raw.view(dtype).view(-1, *records.shape)


def _split(data: Dataset, name: str) -> Split:
    return data.test if name == "test" else data.train

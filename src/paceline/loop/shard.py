"""This rank's part of every batch of a DataLoader: together, ranks see what one process would have seen."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import count, islice
from typing import Any, TypeVar, overload
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from paceline.comm.base import Comm
from paceline.comm.words import all_or_none, share_text
from paceline.errors import UsageError
from paceline.layout import share
from paceline.loop.nested import tensors_in
from paceline.loop.shares import Share, ended, took
from paceline.loop.world import world
from paceline.messages import LOGGER
from paceline.strategies.replicas import digest

CHUNK = 1024  # batches that rank 0 draws at a time
END = object()
_OWN: WeakKeyDictionary[Comm, Comm] = WeakKeyDictionary()
T = TypeVar("T")


@overload
def shard(loader: DataLoader[Any], comm: Comm | None = None) -> ShardedLoader: ...
@overload
def shard(loader: T, comm: Comm | None = None) -> T: ...
def shard(loader: Any, comm: Comm | None = None) -> Any:
    """A loader that gives this rank its part of each batch of `loader`, which is made as for one process.

        loader = paceline.shard(DataLoader(dataset, batch_size=64, shuffle=True))
        inputs, targets = paceline.shard((inputs, targets))    # a batch that all ranks have drawn alike

    `batch_size` is that of all ranks together. Rank 0 draws the order of the samples, with the loader's own sampler,
    and each rank loads only its part; of an iterable data set, every rank reads all, and takes its part. The last batch
    may have fewer samples than there are ranks: a rank without one gets a sample that does not count (its weight in
    DataParallel is 0), or, under torch.no_grad(), ends a batch earlier.

    DataParallel weights a batch by the tensors that `shard` gave; if others were made from them, by the latest batch.
    """
    comm = comm or world()
    if isinstance(loader, Tensor | Mapping | list | tuple):
        part, own = _part(loader, comm)
        if torch.is_grad_enabled():
            took(own, part)
        return part
    return ShardedLoader(loader, comm)


class ShardedLoader:
    """See `shard`. Iterate `for epoch in range(loader.epoch, epochs)`, which also continues a training.

    `epoch` is the pass over the data that is under way, or comes next; `samples` is how many of the latest batch are
    this rank's, 0 if it has got one that does not count. The state_dict says where in the data it is, for
    `paceline.Checkpoints(loader=…)`.
    """

    def __init__(self, loader: DataLoader[Any], comm: Comm) -> None:
        _check(loader, comm)
        self.loader, self._comm = loader, _own_comm(comm)
        self.samples, self._thread = 0, threading.get_ident()
        self.epoch, self._done = 0, 0  # batches of it that were taken
        self._first, self._start = 0, ""  # its first batch, and the random state before its order was drawn
        self._now: Tensor | None = None  # the random state to go on with, once the order of a continued epoch is drawn
        self._sampler = _Parts(self)
        self._iterable, self._whole = isinstance(loader.dataset, IterableDataset), loader.batch_sampler is None
        self._inner = loader if self._iterable else self._loader_of_parts()
        if (self._iterable or self._whole) and comm.size > 1 and comm.rank == 0:
            what = "the data set is iterable" if self._iterable else "the loader has no batch size"
            LOGGER.warning("%s: every rank reads whole batches, and uses its part of them", what)

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        """Samples of all ranks together."""
        return self.loader.batch_size

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        if threading.get_ident() != self._thread:
            raise UsageError("iterate a sharded loader in the thread that made it: DataParallel weights by its batches")
        first, self._first = self._first, 0
        if first:
            self._now = torch.get_rng_state()
            if self._comm.rank == 0 or self._iterable:
                self._set_random(self._start)
        else:
            self._start = self._random()
        self._done = first
        iteration = self._iteration = object()
        try:
            for batch, part in self._slices(first) if self._iterable else self._loaded(first):
                self._done, self.samples = self._done + 1, part.count
                if torch.is_grad_enabled():
                    took(part, batch, iteration)
                    yield batch
                elif part.count:
                    yield batch
        finally:  # also when the loop is left: the batches of another loader are weighted otherwise
            ended(iteration)
            if self._iteration is iteration:
                self.epoch, self._done = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """On rank 0, whose random state decides."""
        return {"epoch": self.epoch, "batches": self._done, "start": self._start, "random": self._random()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration continues after the batches that were taken."""
        self.epoch, self._first, self._start = state["epoch"], state["batches"], state["start"]
        if self._comm.rank == 0:
            self._set_random(state["random"])

    # Samples by number

    def _loader_of_parts(self) -> DataLoader[Any]:
        old, generator = self.loader, self.loader.generator
        if self._comm.rank and old.num_workers:  # workers of different ranks must not draw the same random numbers
            generator = torch.Generator().manual_seed(torch.initial_seed() + self._comm.rank)
        more: dict[str, Any] = {"prefetch_factor": old.prefetch_factor} if old.num_workers else {}
        more |= {"batch_size": None, "sampler": self._sampler} if self._whole else {"batch_sampler": self._sampler}
        return DataLoader(
            old.dataset,
            num_workers=old.num_workers,
            collate_fn=old.collate_fn,
            pin_memory=old.pin_memory,
            timeout=old.timeout,
            worker_init_fn=old.worker_init_fn,
            multiprocessing_context=old.multiprocessing_context,
            generator=generator,
            persistent_workers=old.persistent_workers,
            **more,
        )

    def _loaded(self, first: int) -> Iterator[tuple[Any, Share]]:
        shares: deque[Share] = deque()
        self._sampler.parts = self._draw(first, shares)
        for batch in self._inner:
            yield _part(batch, self._comm) if self._whole else (batch, shares.popleft())

    def _draw(self, first: int, shares: deque[Share]) -> Iterator[Any]:
        """The numbers of this rank's samples, batch by batch, as rank 0 draws them."""
        comm, order = self._comm, self.loader.batch_sampler or ([number] for number in self.loader.sampler)
        batches = iter(order if comm.rank == 0 else ())
        while drawn := self._tell(batches):
            self._go_on()
            for batch in drawn[first:]:
                if self._whole:
                    yield batch[0]
                    continue
                part = share(len(batch), comm.size, comm.rank)
                shares.append(Share(len(part), len(batch)))
                yield batch[part.start : part.stop] or batch[:1]
            first = max(0, first - len(drawn))

    def _tell(self, batches: Iterator[list[int]]) -> list[list[int]]:
        """Rank 0 draws some batches, and tells all ranks; none at the end."""
        comm = self._comm

        def draw() -> list[list[int]]:
            return [_numbers(batch) for batch in islice(batches, CHUNK)]

        if comm.size == 1:
            return draw()
        drawn = all_or_none(draw, comm)
        sizes = torch.zeros(CHUNK, dtype=torch.int64)
        sizes[: len(drawn)] = torch.tensor([len(batch) for batch in drawn], dtype=torch.int64)
        sizes = _broadcast(sizes, comm)
        numbers = torch.tensor([number for batch in drawn for number in batch], dtype=torch.int64)
        total = int(sizes.sum())
        if not total:
            return []
        if comm.rank:
            numbers = torch.zeros(total, dtype=torch.int64)
        return [part.tolist() for part in _broadcast(numbers, comm).split([size for size in sizes.tolist() if size])]

    # Batches as they come

    def _slices(self, first: int) -> Iterator[tuple[Any, Share]]:
        comm, loaded = self._comm, iter(self._inner)
        for number in count(0):
            batch = next(loaded, END)
            _check_same(None if batch is END else batch, number, comm)
            if batch is END:
                self._go_on()
                return
            if number >= first:
                self._go_on()
                yield _part(batch, comm)

    # Random state

    def _go_on(self) -> None:
        """The order of a continued epoch is drawn: use the random state of the checkpoint again."""
        if self._now is not None:
            torch.set_rng_state(self._now)
            self._now = None

    def _random(self) -> str:
        state = self.loader.generator.get_state() if self.loader.generator else torch.get_rng_state()
        return state.numpy().tobytes().hex()

    def _set_random(self, state: str) -> None:
        tensor = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
        if self.loader.generator:
            self.loader.generator.set_state(tensor)
        else:
            torch.set_rng_state(tensor)


class _Parts:
    """The batch sampler of a loader that loads only a rank's part."""

    parts: Iterator[list[int]]  # of the epoch that is under way

    def __init__(self, owner: ShardedLoader) -> None:
        self._owner = owner

    def __iter__(self) -> Iterator[list[int]]:
        return self.parts

    def __len__(self) -> int:
        return len(self._owner)


def _own_comm(comm: Comm) -> Comm:
    """The communicator of all loaders, whose messages do not mix with others."""
    if comm.size == 1:
        return comm
    if comm not in _OWN:
        _OWN[comm] = comm.dup()
    return _OWN[comm]


def _check(loader: DataLoader[Any], comm: Comm) -> None:
    """Refuse, on all ranks, what cannot be divided, and data that is not the same on all of them."""

    def check() -> None:
        if not isinstance(loader, DataLoader):
            raise UsageError(
                f"paceline.shard divides a torch.utils.data.DataLoader or a batch of tensors, not a "
                f"{type(loader).__name__}"
            )
        inner = getattr(loader.batch_sampler, "sampler", loader.sampler)
        if isinstance(inner, DistributedSampler):
            raise UsageError(
                "the loader has a DistributedSampler, which divides the data already: make the loader as for one "
                "process (shuffle=True and the batch size of all ranks together), and shard it"
            )
        if not getattr(loader, "in_order", True):
            raise UsageError("the loader has in_order=False: ranks must take batches in the same order")

    all_or_none(check, comm)
    mine = f"{len(loader.dataset)} samples" if hasattr(loader.dataset, "__len__") else "an unknown number of samples"
    told = share_text(f"{mine} in batches of {loader.batch_size}", comm)
    other = next((rank for rank, text in enumerate(told) if text != told[0]), None)
    if other is not None:
        raise UsageError(
            f"ranks must have the same data: rank {other} has {told[other]}, rank 0 has {told[0]}; make the same "
            f"loader on all ranks"
        )


def _check_same(batch: Any, number: int, comm: Comm) -> None:
    """Compare the batches of all ranks: how many samples they have, and their first one."""
    if comm.size == 1:
        return
    table = torch.zeros(comm.size, 2, dtype=torch.int64, device=comm.device)
    if batch is None:
        table[comm.rank, 0] = -1
    else:
        table[comm.rank] = torch.tensor([_count(batch), digest(tensors_in(_cut(batch, range(1))))])
    comm.allreduce(table.view(-1))
    found = table.tolist()
    other = next((rank for rank, row in enumerate(found) if row != found[0]), None)
    if other is not None:
        has = ["nothing" if count < 0 else f"{count} samples" for count, _ in found]
        has[other] = "other samples" if has[other] == has[0] else has[other]
        raise UsageError(
            f"ranks must read the same data: of batch {number}, rank {other} has {has[other]}, rank 0 has {has[0]}; an "
            f"iterable data set must give every rank the same samples in the same order (the same seed)"
        )


def _numbers(batch: Any) -> list[int]:
    try:
        return [int(number) for number in batch]
    except (TypeError, ValueError):
        raise UsageError(f"the loader's sampler gives {str(batch)[:60]}: numbers of samples are needed") from None


def _broadcast(tensor: Tensor, comm: Comm) -> Tensor:
    tensor = tensor.to(comm.device)
    comm.broadcast(tensor)
    return tensor.cpu()


def _part(batch: Any, comm: Comm) -> tuple[Any, Share]:
    samples = _count(batch)
    part = share(samples, comm.size, comm.rank)
    return _cut(batch, part or range(1)), Share(len(part), samples)


def _count(batch: Any) -> int:
    """The number of samples in a batch, whatever it is made of."""
    lengths = set(_lengths(batch))
    if len(lengths) != 1:
        raise UsageError(
            f"a batch has parts of {' and '.join(map(str, sorted(lengths))) or 'no'} samples: all that is in it must "
            f"have one row for each sample"
        )
    return lengths.pop()


def _lengths(batch: Any) -> Iterator[int]:
    if isinstance(batch, Mapping) or _holds_batches(batch):
        for each in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _lengths(each)
        return
    try:
        yield len(batch)
    except TypeError:
        raise UsageError(
            f"a batch holds a {type(batch).__name__}, which cannot be divided: tensors, and lists, tuples and dicts of "
            f"tensors can"
        ) from None


def _cut(batch: Any, part: range) -> Any:
    """These samples of a batch."""
    if isinstance(batch, Mapping):
        return {name: _cut(each, part) for name, each in batch.items()}
    if _holds_batches(batch):
        cut = [_cut(each, part) for each in batch]
        return type(batch)(*cut) if hasattr(batch, "_fields") else type(batch)(cut)
    return batch[part.start : part.stop]


def _holds_batches(values: Any) -> bool:
    """Whether it holds inputs, targets and the like (tensors, arrays), not one sample after the other."""
    return isinstance(values, list | tuple) and any(
        hasattr(each, "shape") or isinstance(each, Mapping) or _holds_batches(each) for each in values
    )

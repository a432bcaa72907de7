"""A server's part of the parameters, in chunks: adds up gradients and makes updates; no sockets, no clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from weakref import ref

import torch
from torch import Tensor

MakeOptimizer = Callable[[list[Tensor]], torch.optim.Optimizer]
MakeMemory = Callable[[Tensor], Tensor]  # for values like these


class Lent(Enum):
    """How long a gradient that lies in its worker's memory can be read; it is never changed."""

    UNTIL_MADE = 1  # its worker gets no answer before the update is made
    BRIEFLY = 2  # its worker may get an answer at once, and compute the next gradient in this memory


class Refused(Exception):
    """An invalid push, which no worker of this run would send."""


class Applied:
    """The numbers of applied updates, which may arrive in any order: all below `low`, and some above."""

    def __init__(self, low: int = 0) -> None:
        self.low, self.above = low, set[int]()

    def __contains__(self, update: int) -> bool:
        return update < self.low or update in self.above

    def add(self, update: int) -> None:
        self.above.add(update)
        while self.low in self.above:
            self.above.remove(self.low)
            self.low += 1


@dataclass
class Sum:
    """The gradients of one update, added in the order of their slots, in whatever order they arrive."""

    slots: int
    next: int = 0
    total: Tensor | None = None
    own: bool = False  # whether the total may be changed: it does not lie in the memory of a worker
    finite: bool = True  # whether every worker's whole gradient is
    nominal: float = 1.0  # what the gradients were divided by
    weights: dict[int, float] = field(default_factory=dict)  # of the parts, by slot
    early: dict[int, tuple[Tensor, Lent | None]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return self.next == self.slots

    @property
    def factor(self) -> float:
        """What makes the sum the gradient of the mean loss, with the weight of all parts; added in the same order."""
        return correction(self.nominal, sum(self.weights[slot] for slot in range(self.slots)))

    def add(self, slot: int, values: Tensor, lent: Lent | None = None) -> None:
        """Add a gradient; the first one becomes the sum, in its own memory unless that is lent for longer."""
        if lent is Lent.BRIEFLY and (slot != self.next or self.total is None):
            values, lent = values.clone(), None  # it must wait
        self.early[slot] = values, lent
        while self.next in self.early:
            values, lent = self.early.pop(self.next)
            if self.total is None:
                self.total, self.own = values, lent is None
            elif self.own:
                self.total.add_(values)
            else:
                self.total, self.own = self.total + values, True
            self.next += 1

    def has(self, slot: int) -> bool:
        return slot < self.next or slot in self.early


class Place:
    """Memory of a chunk's values, and whether a message has a view of it."""

    def __init__(self, values: Tensor) -> None:
        self.values = values
        self._view: Callable[[], memoryview | None] = lambda: None

    @property
    def free(self) -> bool:
        return self._view() is None

    def view(self) -> memoryview:
        view = self._view()
        if view is None:
            view = self.values.numpy().data.cast("B")
            self._view = ref(view)
        return view


class Chunk:
    """Some of the values, their optimizer, and the number of updates. The initial values are kept.

    After the `trainable` values come buffers. An update multiplies each buffer by `kept` and adds the workers' changes.

    Messages have views of the values, not copies. As long as such a view exists, somebody may be reading it: an update
    is then made in other memory, to which the values are copied first. Otherwise it is made in place.
    """

    def __init__(
        self,
        first: Tensor,
        trainable: int,
        make_optimizer: MakeOptimizer,
        kept: Tensor | None = None,
        memory: MakeMemory = torch.empty_like,
    ) -> None:
        self._memory, self._places = memory, [Place(memory(first).copy_(first))]
        self._place = self._places[0]
        self.first, self.trainable = first, trainable
        self.kept = torch.ones_like(first[trainable:]) if kept is None else kept
        self.parameters = torch.nn.Parameter(self.values[:trainable])
        self.optimizer = make_optimizer([self.parameters]) if trainable else None
        self.version = 0
        self.open: dict[int, Sum] = {}
        self.applied = Applied()

    @property
    def values(self) -> Tensor:
        return self._place.values

    def _make_writable(self) -> None:
        """Move the values to other memory if somebody may still be reading them where they are."""
        if self._place.free:
            return
        place = next((place for place in self._places if place.free), None)
        if place is None:
            place = Place(self._memory(self.values))
            self._places.append(place)
        place.values.copy_(self.values)
        self._place = place
        self.parameters.data = self.values[: self.trainable]

    def apply(self, gradient: Tensor, lr: float) -> None:
        """Make one update: parameters with the optimizer, buffers with the workers' changes."""
        self._make_writable()
        if self.optimizer:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.parameters.grad = gradient[: self.trainable]
            self.optimizer.step()
            self.parameters.grad = None
        if self.trainable < len(gradient):
            self.values[self.trainable :].mul_(self.kept).add_(gradient[self.trainable :])
        self.version += 1

    def skip(self) -> None:
        """Count an update without making it."""
        self.version += 1

    def replace(self, values: Tensor) -> None:
        """Set other weights, under a new version."""
        self._make_writable()
        self.values.copy_(values)
        self.version += 1

    def published(self) -> memoryview:
        """The current weights; they do not change while this view exists, which messages to all workers share."""
        return self._place.view()

    def tensors(self) -> dict[str, Tensor]:
        state = self.optimizer.state_dict()["state"].get(0, {}) if self.optimizer else {}
        return {"values": self.values, **{key: value for key, value in state.items() if isinstance(value, Tensor)}}

    def load(self, tensors: dict[str, Tensor], version: int) -> None:
        self._make_writable()
        self.values.copy_(tensors.pop("values"))
        if self.optimizer:
            whole = self.optimizer.state_dict()
            whole["state"] = {0: tensors} if tensors else {}
            self.optimizer.load_state_dict(whole)
        self.version, self.applied, self.open = version, Applied(version), {}


class Shard:
    """The chunks of one server.

    With a staleness bound, update c is the sum of its parts, applied when all have arrived, in the order of c. Without
    (None), each part is an update, applied on arrival; with `adapt` its learning rate is divided by its staleness
    (Zhang et al. 2016). `kept` has for each chunk the factor by which an update multiplies its buffers; by default 1.
    """

    def __init__(
        self,
        values: dict[int, tuple[Tensor, int]],
        make_optimizer: MakeOptimizer,
        rate: Callable[[int], float],
        staleness: int | None,
        *,
        adapt: bool = False,
        updates: float = math.inf,
        kept: Mapping[int, Tensor] | None = None,
        clip: float = 0.0,
        memory: MakeMemory = torch.empty_like,
    ) -> None:
        self.chunks = {
            number: Chunk(v, trainable, make_optimizer, kept[number] if kept else None, memory)
            for number, (v, trainable) in values.items()
        }
        self.rate, self.staleness, self.adapt, self.updates = rate, staleness, adapt, updates
        self.kept: dict[int, Tensor] = {}
        self.after: Callable[[int], None] = lambda _: None  # called with the number of a chunk that has been updated
        # With clipping: all chunks make an update together, when the norm of the whole gradient is known.
        self.clip = clip
        self.own: tuple[int, float] | None = None  # the next update, if its sums are complete, and their squares
        self.whole: dict[int, float] = {}  # by update: the squares of all servers

    def check(self, number: int, update: int, slot: int, slots: int, version: int, length: int) -> int | None:
        """Check whether a gradient can be accepted; return its staleness, or None if it has already been applied."""
        chunk = self.chunks.get(number)
        if chunk is None or length != len(chunk.values) or not 0 <= slot < slots:
            raise Refused(f"{length} values for slot {slot} of {slots} of chunk {number}")
        if update >= self.updates:
            raise Refused(f"update {update} of {self.updates}")
        if self.staleness is None:
            if slots != 1:
                raise Refused(f"a part of update {update}, which is the whole batch of one worker")
            return None if update in chunk.applied else max(0, chunk.version - version)
        if update < chunk.version:
            return None
        if update > chunk.version + self.staleness or version < update - self.staleness:
            raise Refused(f"update {update} with weights of version {version}; the chunk has version {chunk.version}")
        total = chunk.open.get(update)
        if total is not None and slots != total.slots:
            raise Refused(f"update {update} in {slots} parts instead of {total.slots}")
        return None if total is not None and total.has(slot) else update - min(update, version)

    def add(
        self,
        number: int,
        update: int,
        slot: int,
        slots: int,
        missed: int,
        values: Tensor,
        *,
        finite: bool = True,
        weight: float = 1.0,
        nominal: float = 1.0,
        lent: Lent | None = None,
    ) -> None:
        """Add a gradient that has been checked, and make the updates that are now complete.

        `finite` says whether the worker's loss and its gradient, of all chunks, are finite; `weight` is that of its
        loss, and `nominal` what its gradient was divided by. They come with every chunk, so all servers know without
        asking each other which updates must not be made, and the weight of all parts.
        """
        chunk = self.chunks[number]
        if self.staleness is None:
            chunk.applied.add(update)
            lr = self.rate(chunk.version)
            lr = lr / max(1, missed) if self.adapt else lr
            self._apply(number, values, lr, correction(nominal, weight), finite=finite, own=lent is None)
            return
        mine = chunk.open.setdefault(update, Sum(slots))
        mine.finite, mine.nominal, mine.weights[slot] = mine.finite and finite, nominal, weight
        mine.add(slot, values, lent)
        if self.clip:
            self.make_clipped()
            return
        while (total := chunk.open.get(chunk.version)) and total.complete:
            assert total.total is not None
            del chunk.open[chunk.version]
            self._apply(number, total.total, self.rate(chunk.version), total.factor, finite=total.finite, own=total.own)

    def make_clipped(self) -> None:
        """Make the next updates whose sums are complete and whose norm is known; else set `own`."""
        while True:
            update = next(iter(self.chunks.values())).version
            sums = {number: chunk.open.get(update) for number, chunk in self.chunks.items()}
            complete = {number: total for number, total in sums.items() if total and total.complete}
            if len(complete) < len(sums):
                return
            if self.own is None or self.own[0] != update:
                self.own = update, sum(self._squares(number, total) for number, total in complete.items())
            if update not in self.whole:
                return
            squares, self.own = self.whole.pop(update), None
            for number, total in complete.items():
                assert total.total is not None
                del self.chunks[number].open[update]
                factor = total.factor * min(1.0, self.clip / (total.factor * math.sqrt(squares) + 1e-6))
                self._apply(number, total.total, self.rate(update), factor, finite=total.finite, own=total.own)

    def _squares(self, number: int, total: Sum) -> float:
        assert total.total is not None
        return float(total.total[: self.chunks[number].trainable].norm()) ** 2 if total.finite else 0.0

    def _apply(self, number: int, gradient: Tensor, lr: float, factor: float, *, finite: bool, own: bool) -> None:
        if finite:
            chunk = self.chunks[number]
            if factor != 1.0:
                gradient = gradient if own else gradient.clone()
                gradient[: chunk.trainable].mul_(factor)
            chunk.apply(gradient, lr)
        else:
            self.chunks[number].skip()
        self.after(number)

    # The best weights so far, if there is a validation set.

    def keep(self) -> None:
        self.kept = {number: chunk.values.clone() for number, chunk in self.chunks.items()}

    def recall(self) -> None:
        for number, values in self.kept.items():
            self.chunks[number].replace(values)

    # Checkpoints.

    def tensors(self, number: int) -> dict[str, Tensor]:
        """A chunk's values, its optimizer's state, and its best values so far as `kept`."""
        kept = {"kept": self.kept[number]} if number in self.kept else {}
        return self.chunks[number].tensors() | kept

    def load(self, number: int, tensors: dict[str, Tensor], updates: int) -> None:
        """Restore a chunk as it was after this many updates."""
        self.own, self.whole = None, {}
        kept = tensors.pop("kept", None)
        if kept is not None:
            self.kept[number] = kept
        self.chunks[number].load(tensors, updates)


def correction(nominal: float, weight: float) -> float:
    """What a gradient that was divided by `nominal` must be multiplied by; 0 if nothing in it counts."""
    return nominal / weight if weight else 0.0

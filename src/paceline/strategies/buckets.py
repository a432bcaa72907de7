"""Gradients in flat buckets, which are averaged while backward still computes the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from paceline.collectives.plan import Averaging
from paceline.comm.base import Comm, Part
from paceline.comm.words import all_or_none
from paceline.errors import UsageError
from paceline.layout import share
from paceline.strategies.bucket_layout import assign, tail
from paceline.strategies.comm_thread import CommThread
from paceline.strategies.finite import is_finite
from paceline.strategies.replicas import check_same_model

MANY = 1 << 14  # values of a gradient: so many are not copied if only this rank reads them


@dataclass
class Bucket:
    """Consecutive parameters, last layer first, whose gradients are stored side by side in `flat`.

    Gradients in half precision are summed in float32. `gradients` is `flat` without the tail of the last bucket, and
    `summed` is where their sums will be: the same memory, unless they are summed in place.
    """

    dtype: torch.dtype
    start: int
    stop: int
    parameters: int = 0
    missing: int = 0
    flat: Tensor = field(init=False)
    gradients: Tensor = field(init=False)
    summed: Tensor = field(init=False)
    parts: list[Part] = field(default_factory=list)  # gradients that are not in `flat`, as only this rank reads them


@dataclass
class Slot:
    """A parameter, and the place of its gradient: a view into its bucket with the parameter's own strides."""

    name: str
    parameter: nn.Parameter
    dtype: torch.dtype  # of the parameter
    bucket: Bucket
    start: int
    seen: bool = False
    version: int = 0  # version counter of the parameter when backward began
    own: Tensor | None = None  # an existing gradient tensor, to which the sum must be written
    view: Tensor = field(init=False)
    summed: Tensor = field(init=False)  # the place of the sum
    own_part: slice | None = None  # of the gradient's values, if they are many and only this rank reads them

    def holds(self, gradient: Tensor) -> bool:
        """Whether the gradient is stored in the bucket."""
        return gradient.data_ptr() == self.view.data_ptr()

    def lies_like(self, gradient: Tensor) -> bool:
        """Whether the gradient's values have the same order in memory."""
        strides = zip(gradient.shape, gradient.stride(), self.view.stride(), strict=True)
        return all(own == other for size, own, other in strides if size > 1)


class GradientBuckets:
    """Sums gradients over ranks, bucket by bucket, in the same fixed order on every rank.

    The last bucket has a tail: one flag per parameter (did any rank have a gradient for it?), the `extras`, a few
    numbers that are summed with the gradients instead of in another message, the number of ranks with a problem, and
    the sum of the ranks' shares.

    An error on one rank must be raised on all ranks, or the others would wait for it. So a rank with a problem still
    takes part in the sums and sets a flag in the tail; then all ranks resolve it together. The same holds for a rank
    whose parameters have been frozen or unfrozen: buckets are laid out again once all ranks agree.

    With `in_place`, if the transport shares memory, gradients are written to that memory, and every .grad is a view of
    the sums of all ranks, which nobody may change: see `scale`. Then each rank sums its slice of every bucket. So the
    tail is a bucket of its own, in float64, which is summed when the slices are: it also says what each rank has found
    in its slices. That all ranks have sent it tells that all slices are summed.

    `on_backward` is called when a backward has reached a parameter, and nobody has called `begin`.

    If `own_squares` is a list, the squares of this rank's scaled gradients are appended to it before they are summed
    over ranks. It is None after a step for which buckets were laid out again.
    """

    scattered = False  # whether a rank gets only the sums of its slices
    aligned = 1  # values: where parameters begin in a bucket

    def __init__(
        self,
        model: nn.Module,
        comm: Comm,
        averaging: Averaging,
        bucket_bytes: int,
        extras: int = 0,
        on_backward: Callable[[], None] | None = None,
        *,
        in_place: bool = False,
    ) -> None:
        # Its own communicator: a thread's messages must not mix with the main thread's.
        self.comm = comm.dup() if comm.size > 1 else comm
        self._in_place = in_place and comm.shares_memory and comm.size > 1
        self._sliced = self._in_place or self.scattered
        self.model, self.averaging, self.bucket_bytes, self._on_backward = model, averaging, bucket_bytes, on_backward
        self.known = list(model.parameters())
        self.problem = ""
        self._hooks: list[Any] = []
        self._armed = self._changed = False
        self._next, self._share, self._scale = 0, 1 / comm.size, torch.ones((), dtype=torch.float64)
        self.thread: CommThread | None = None
        self.own_squares: list[Tensor] | None = None
        self._lay_out(extras)
        self.extras = torch.zeros_like(self.tail[:extras])

    def refuse(self, problem: str) -> None:
        """Make every rank raise this error at the end of the step; the first problem counts."""
        self.problem = self.problem or problem

    def backward(
        self,
        loss: Tensor | None,
        scale: float,
        *,
        overlap: bool,
        share: float | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Run backward on the loss; `finish` leaves the sum of scale × gradient over ranks in every parameter's .grad.

        The scaled losses of all ranks must add up to the loss of the global batch. Existing values of .grad are added
        to, as backward does, and scaled, too. If `share` is given, the shares of all ranks are checked to add up to 1.
        """
        self.begin(scale, overlap=overlap, share=share)
        try:
            if loss is not None and (problem := _problem_with(loss)):
                self.refuse(problem)
                loss = loss * 0
            if loss is not None and loss.requires_grad:
                # Not through backward's `gradient` argument: that imports more of torch, for a second.
                loss.sum().backward(retain_graph=retain_graph)
        finally:
            self._armed = False
        self.end()

    def end(self) -> None:
        """Backward has ended: refuse it if parameters were changed meanwhile."""
        self._armed = False
        for slot in self.slots:
            if slot.parameter._version != slot.version:
                self.refuse(
                    f"parameter {slot.name!r} was changed during backward, before its gradient was averaged (by an "
                    f"optimizer in a hook?): call optimizer.step() after backward"
                )
                break

    def replay(self, ready: Callable[[int], None], *, overlap: bool) -> None:
        """Like `backward`, but nothing is computed: bucket n is sent unchanged when `ready(n)` returns."""
        self._open(overlap)
        for number in range(len(self.buckets)):
            ready(number)
            if self._overlap and number < len(self.buckets) - 1:
                self._send_next()

    @torch.no_grad()
    def finish(self) -> None:
        """Send the remaining buckets, wait for all sums, and set every .grad to them."""
        if not self._changed:
            for slot in self.slots:
                if not slot.seen:
                    self._take(slot)
        while self._next < len(self.buckets) - 1:
            self._send_next()
        self._fill_tail()
        self._send_next()
        if self.thread:
            self.thread.wait()
        *flags, troubled, shares = self._tail_sum.tolist()
        if troubled:
            self._resolve()
            return
        self.extras.copy_(self._tail_sum[len(self.slots) : len(self.slots) + len(self.extras)])
        for flag, slot in zip(flags, self.slots, strict=False):
            self._give(slot, any_rank=flag > 0)
        tolerance = max(1e-4, 4 * self.comm.size * torch.finfo(self.tail.dtype).eps)
        if not abs(shares - 1) <= tolerance:
            raise UsageError(
                f"the ranks' shares add up to {shares:g}, not to 1: a share is the rank's number of samples divided "
                f"by that of all ranks (Sampler.share)"
            )

    def _fill_tail(self) -> None:
        """Write what this rank says in the tail; all other buckets have been sent."""
        numbers: list[float] = [*(slot.seen for slot in self.slots), *self.extras.tolist()]
        if self._sliced:
            if self.thread:
                self.thread.wait()
            slices = [bucket.summed[self.slice_of(bucket)] for bucket in self.buckets[:-1]]
            total = self.shared.wait() if self.shared else _sum_of_squares(slices)
            finite = math.isfinite(total) or all(map(is_finite, slices))
            numbers += [not finite, total]
        numbers += [bool(self.problem) or self._changed, self._share]
        self.tail.copy_(torch.tensor(numbers, dtype=self.tail.dtype))

    def slice_of(self, bucket: Bucket) -> slice:
        """The part of a bucket that this rank sums."""
        mine = share(len(bucket.flat), self.comm.size, self.comm.rank)
        return slice(mine.start, mine.stop)

    def sums(self) -> list[Tensor]:
        """The sums of the gradients of all buckets, without the tail."""
        return [bucket.summed for bucket in self.buckets]

    @torch.no_grad()
    def scale(self, factor: float) -> None:
        """Multiply all gradients, after `finish`. What was summed in place is copied to this rank's own memory."""
        for bucket in self.buckets:
            torch.mul(bucket.summed, factor, out=bucket.gradients)
        for slot in self.slots:
            if slot.parameter.grad is not None:
                if slot.view.dtype != slot.dtype:
                    slot.parameter.grad.copy_(slot.view)
                elif self.shared:
                    slot.parameter.grad = slot.view.detach()

    def finite(self) -> bool:
        """Whether all sums are finite; the same on all ranks."""
        return not self._tail_sum[-4] if self._sliced else all(map(is_finite, self.sums()))

    def squares(self) -> float:
        """The sum of the squares of all sums."""
        if self._sliced:
            return float(self._tail_sum[-3])
        return _sum_of_squares(self.sums())

    def gather_weights(self) -> None:
        """After an update: get the weights that other ranks have updated. Each has updated all of them."""
        return

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.thread:
            self.thread.close()
        self.comm.close()

    def _open(self, overlap: bool) -> None:
        # A single bucket is complete when backward ends: there is nothing to overlap.
        # Sums in place are made between two gradients by the thread that computes, and need no other.
        if overlap and self.thread is None and self.comm.size > 1 and len(self.buckets) > 1 and not self.shared:
            self.thread = CommThread(self._sum)
        self._overlap = overlap and bool(self.thread or self.shared) and len(self.buckets) > 1
        self._next = 0

    @torch.no_grad()
    def begin(self, scale: float, *, overlap: bool, share: float | None = None) -> None:
        """Backward begins: its gradients, and what is in .grad already, will be scaled and summed over ranks."""
        self.problem, self._share = "", 1 / self.comm.size if share is None else share
        self._scale.fill_(scale)  # multiplying by a tensor takes a fifth of the time
        self._open(overlap)
        self._changed = not self.as_laid_out()
        self._armed = not self._changed
        for bucket in self.buckets:
            bucket.missing, bucket.parts = bucket.parameters, []
        inside = 0
        for slot in self.slots:
            slot.seen, slot.version, slot.own = False, slot.parameter._version, slot.parameter.grad
            if slot.own is not None and not slot.own.is_sparse and slot.holds(slot.own):
                inside += 1
        if not self.shared and (self._changed or sum(map(_uses, self.storages)) > self._own_uses + inside):
            # A gradient of an earlier step is still referenced, or the sums of this step will be discarded.
            self._allocate()

    def expect_new(self) -> None:
        """Parameters that were unfrozen, or got another dtype, have no hooks: notice a backward that reaches them."""
        begin = self._on_backward
        if begin and not self.as_laid_out():
            self._hook((p, lambda *_: begin()) for p in self.model.parameters() if p.requires_grad)

    def _hook(self, hooks: Iterable[tuple[nn.Parameter, Callable[[Any, Any], None]]]) -> None:
        """Call these when gradients are accumulated.

        They are on the nodes that do that, so that a user's hooks have run, whenever they were registered.
        """
        for parameter, hook in hooks:
            node = get_gradient_edge(parameter).node
            self._hooks.append(node.register_hook(hook))
            self._nodes.append(node)  # parameters do not keep them

    def as_laid_out(self) -> bool:
        """Whether the model still has the parameters that the buckets were laid out for."""
        return (
            all(_content(module) == content for module, content in self._layers)
            and all(p.requires_grad == trained for p, trained in self._laid_out)
            and all(
                slot.parameter.stride() == slot.view.stride() and slot.parameter.dtype == slot.dtype
                for slot in self.slots
            )
        )

    def _make_hook(self, slot: Slot) -> Callable[[Any, Any], None]:
        def hook(_inputs: Any, _outputs: Any) -> None:
            if not self._armed and self._on_backward:
                self._on_backward()
            if not self._armed:
                return
            if slot.seen:
                self.refuse(
                    f"parameter {slot.name!r} got its gradient twice in one backward (re-entrant checkpointing does "
                    f"that): use torch.utils.checkpoint with use_reentrant=False"
                )
                return
            if slot.parameter.grad is None:
                self.refuse(
                    f"the gradient of parameter {slot.name!r} was removed during backward, before it was averaged (by "
                    f"an optimizer in a hook?): call optimizer.step() after backward"
                )
            self._take(slot)
            slot.bucket.missing -= 1
            while self._overlap and self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
                self._send_next()

        return hook

    def _take(self, slot: Slot) -> None:
        """Copy the parameter's gradient into its bucket."""
        gradient = slot.parameter.grad
        slot.seen = gradient is not None
        if gradient is None:
            slot.view.zero_()
        elif gradient.requires_grad or gradient.is_sparse:
            self.refuse(
                f"the gradient of parameter {slot.name!r} "
                + ("is sparse, which cannot be averaged: use dense gradients" if gradient.is_sparse else
                   "has a graph of its own (create_graph=True), which averaging would lose: compute gradient penalties "
                   "with torch.autograd.grad")
            )  # fmt: skip
        elif not slot.holds(gradient):
            if slot.view.dtype != slot.dtype:
                slot.view.copy_(gradient).mul_(self._scale)
                return
            if slot.own_part and self.own_squares is None and slot.own is None and slot.lies_like(gradient):
                self._take_parts(slot, slot.own_part, gradient)
            else:
                torch.mul(gradient, self._scale, out=slot.view)
            if slot.own is None:
                slot.parameter.grad = slot.view.detach()
        else:
            slot.view.mul_(self._scale)

    def _take_parts(self, slot: Slot, own: slice, gradient: Tensor) -> None:
        """Copy what other ranks read; what only this rank reads stays where it is until it is summed."""
        flat = gradient.as_strided((gradient.numel(),), (1,))
        place = slot.bucket.flat[slot.start - slot.bucket.start :]
        for first, last in ((0, own.start), (own.stop, len(flat))):
            if first < last:
                torch.mul(flat[first:last], self._scale, out=place[first:last])
        slot.bucket.parts.append(Part(slot.start + own.start, flat[own], float(self._scale)))

    def _give(self, slot: Slot, *, any_rank: bool) -> None:
        """Leave the sum in the parameter's .grad: in the existing tensor, which a hook may have assigned."""
        parameter = slot.parameter
        slot.own = None
        if not any_rank:
            parameter.grad = None
        elif parameter.grad is None or (self.shared and slot.holds(parameter.grad)):
            parameter.grad = slot.summed.detach().to(slot.dtype)
        elif not slot.holds(parameter.grad):
            parameter.grad.copy_(slot.summed)

    def _send_next(self) -> None:
        bucket = self.buckets[self._next]
        self._next += 1
        if self.own_squares is not None:
            self.own_squares += squares(bucket.gradients)
        if self.shared and bucket is self.buckets[-1]:
            self.comm.allreduce(bucket.flat)
        elif self.shared:
            parts, bucket.parts = sorted(bucket.parts, key=lambda part: part.start), []
            self.shared.give(bucket.dtype, bucket.start, bucket.stop, parts)
        elif self._overlap and self.thread:
            self.thread.put(bucket.flat)
        elif self.comm.size > 1:
            self._sum(bucket.flat)

    def _sum(self, flat: Tensor) -> None:
        """Sum a bucket over ranks, in place."""
        self.averaging.run(self.comm, flat)

    def _resolve(self) -> None:
        """Raise a rank's problem on all ranks; or, if parameters have changed, lay buckets out and average again."""
        new = [name for name, p in self.model.named_parameters() if not any(p is known for known in self.known)]
        if new:
            self.refuse(
                f"parameter {new[0]!r} was added or replaced after DataParallel was created: create a new one, "
                f"which gives all ranks the same values of it"
            )
        problem, self.problem = self.problem, ""

        def raise_problem() -> None:
            if problem:
                raise UsageError(problem)

        all_or_none(raise_problem, self.comm)
        check_same_model(self.model, self.comm)
        self._lay_out(len(self.extras))
        for slot in self.slots:
            slot.own = slot.parameter.grad
        self._changed, self._overlap, self._next, self.own_squares = False, False, 0, None
        self.finish()

    def _lay_out(self, extras: int) -> None:
        """Divide the trained parameters into buckets of about `bucket_bytes`; the last one gets the tail."""
        self._layers = [(module, _content(module)) for module in self.model.modules()]
        self._laid_out = [(p, p.requires_grad) for p in self.model.parameters()]
        trained = [(name, p) for name, p in self.model.named_parameters() if p.requires_grad][::-1]
        devices = {p.device: name for name, p in trained}
        if len(devices) != 1:
            found = ", ".join(f"{name!r} is on {device}" for device, name in devices.items())
            raise UsageError(
                f"trained parameters must be on one device, not {found or 'none'}: first move the model with .to(...), "
                f"or set requires_grad"
            )
        self.slots, self.buckets = list[Slot](), list[Bucket]()
        self._sizes: dict[torch.dtype, int] = {}  # of the memory of each dtype
        for name, p in trained:
            _check_dense(name, p)
        dtypes = [_sum_dtype(name, p) for name, p in trained]
        sizes = [(dtype, p.numel(), dtype.itemsize) for dtype, (_, p) in zip(dtypes, trained, strict=True)]
        for (name, p), dtype, number in zip(trained, dtypes, assign(sizes, self.bucket_bytes), strict=True):
            start = -(-self._sizes.get(dtype, 0) // self.aligned) * self.aligned
            if number == len(self.buckets):
                self.buckets.append(Bucket(dtype, start, start))
            bucket = self.buckets[number]
            self.slots.append(Slot(name, p, p.dtype, bucket, start))
            bucket.parameters += 1
            bucket.stop = self._sizes[dtype] = start + p.numel()
        self._tail = tail(len(trained), extras, sliced=self._sliced)
        self.shared = self.comm.shared_sum(self._sizes, squares=True) if self._in_place else None
        if self._sliced:
            self.buckets.append(Bucket(torch.float64, 0, self._tail))
        else:
            last = self.buckets[-1]
            last.stop = self._sizes[last.dtype] = last.stop + self._tail
        self._allocate()
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._nodes = [], list[Any]()
        self._hook((slot.parameter, self._make_hook(slot)) for slot in self.slots)
        if begin := self._on_backward:
            # Usually backward begins with the last layer: before it accumulates, so that no gradient has to be copied.
            self._hooks += [node.register_prehook(lambda _: begin()) for node in self._nodes[:2]]

    def _allocate(self) -> None:
        """Find memory for the buckets, new unless it is shared; existing references keep the old memory."""
        device = self.slots[0].parameter.device
        if self.shared:
            memory, sums = self.shared.mine, self.shared.total
        else:
            sums = memory = {n: torch.zeros(size, dtype=n, device=device) for n, size in self._sizes.items()}
        for bucket in self.buckets[:-1] if self._sliced else self.buckets:
            span = slice(bucket.start, bucket.stop)
            bucket.flat = bucket.gradients = memory[bucket.dtype][span]
            bucket.summed = sums[bucket.dtype][span]
        for slot in self.slots:
            p, span = slot.parameter, slice(slot.start, slot.start + slot.parameter.numel())
            slot.view = memory[slot.bucket.dtype][span].as_strided(p.shape, p.stride())
            slot.summed = sums[slot.bucket.dtype][span].as_strided(p.shape, p.stride())
            if self.shared:
                mine = self.slice_of(slot.bucket)
                first, last = slot.bucket.start + mine.start - slot.start, slot.bucket.start + mine.stop - slot.start
                own = slice(max(0, first), min(last, p.numel()))
                slot.own_part = own if own.stop - own.start >= MANY else None
        last = self.buckets[-1]
        if self._sliced:
            last.flat = last.summed = torch.zeros(self._tail, dtype=last.dtype, device=device)
        self.tail, self._tail_sum = last.flat[-self._tail :], last.summed[-self._tail :]
        last.gradients, last.summed = last.flat[: -self._tail], last.summed[: -self._tail]
        self.storages = [each.untyped_storage() for each in memory.values()]
        del memory, sums
        self._own_uses = sum(map(_uses, self.storages))


def squares(gradients: Tensor) -> list[Tensor]:
    """Sums of squares, of parts that are short enough for float32: a dot product of 25 million is wrong by 0.1 %."""
    return [part.dot(part) for part in gradients.split(1 << 16)]


def _sum_of_squares(tensors: list[Tensor]) -> float:
    return math.fsum(map(float, chain.from_iterable(map(squares, tensors))))


def _content(module: nn.Module) -> list[int]:
    """Which parameters and layers a module has."""
    return [*map(id, module._parameters.values()), *map(id, module._modules.values())]


def _uses(storage: torch.UntypedStorage) -> int:
    """How many tensors use this storage."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def _sum_dtype(name: str, p: Tensor) -> torch.dtype:
    """In which its gradients are summed."""
    if not p.is_floating_point():
        raise UsageError(f"parameter {name!r} is {p.dtype}: only gradients of real numbers can be averaged")
    return p.dtype if p.dtype.itemsize >= 4 else torch.float32


def _problem_with(loss: Tensor) -> str:
    if loss.numel() != 1:
        return f"the loss must be one number, not a tensor of shape {tuple(loss.shape)}: take its mean"
    if not loss.requires_grad:
        return "the loss does not depend on any trained parameter: it has no gradient"
    return ""


def _check_dense(name: str, p: Tensor) -> None:
    """Refuse parameters with gaps; any order of strides is fine (channels_last, transposed)."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
        if stride != expected:
            raise UsageError(
                f"parameter {name!r} of shape {tuple(p.shape)} has strides {p.stride()}, with gaps or overlaps: "
                f"make it .contiguous() first"
            )
        expected *= size

"""Gradients in flat buckets that are averaged while backward still computes the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from paceline.collectives.plan import Averaging
from paceline.comm.base import Comm
from paceline.errors import PacelineError
from paceline.strategies.comm_thread import CommThread


@dataclass
class Bucket:
    """A run of parameters, last layer first, whose gradients lie side by side in `flat`."""

    flat: Tensor
    parameters: int = 0
    missing: int = 0


@dataclass
class Slot:
    """A parameter, and where its gradient goes: a view of its bucket with the parameter's own strides."""

    parameter: nn.Parameter
    view: Tensor
    bucket: Bucket
    seen: bool = False
    mixed: bool = False  # a plain backward has added to what had been averaged


class GradientBuckets:
    """Sums gradients over ranks, bucket by bucket, in one fixed order on every rank.

    The last bucket has a tail: one flag a parameter (did any rank have a gradient for it?) and the `riders`, a few
    numbers that are summed along with the gradients instead of in a message of their own.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], comm: Comm, averaging: Averaging, bucket_bytes: int, riders: int = 0
    ) -> None:
        chosen = [p for p in parameters if p.requires_grad][::-1]
        kinds = {(p.dtype, p.device) for p in chosen}
        if len(kinds) != 1:
            raise PacelineError(
                f"parameters of one dtype on one device are expected, not {sorted(map(str, kinds))}: "
                f"convert the model with .to(...) first"
            )
        self.averaging = averaging
        # A communicator of its own: the thread's messages must not meet the main thread's.
        self.comm = comm.dup() if comm.size > 1 else comm
        self.thread: CommThread | None = None
        self.buckets, self.slots, self.tail = _lay_out(chosen, bucket_bytes, riders)
        self.riders = self.tail[len(chosen) :]
        self._armed, self._next = False, 0
        self._hooks = [
            slot.parameter.register_post_accumulate_grad_hook(self._make_hook(slot)) for slot in self.slots
        ]  # fmt: skip

    def backward(self, loss: Tensor | None, share: float, *, overlap: bool) -> None:
        """Run backward on share × loss and leave the sum over ranks in every parameter's .grad.

        Shares are such that their weighted losses add up to the loss of the global batch, so that gradients need only
        be summed. What .grad held before is kept, as backward does: this rank's own gradients of plain backward calls
        are weighted and summed as well; gradients that this call left there before are added once.
        """
        self._begin(share, overlap)
        try:
            if loss is not None:
                loss.backward(torch.full_like(loss, share))
        finally:
            self._armed = False

    def replay(self, ready: Callable[[int], None], *, overlap: bool) -> None:
        """As `backward`, but nothing is computed: bucket n is sent as it is when `ready(n)` returns."""
        self._open(overlap)
        for number in range(len(self.buckets)):
            ready(number)
            if self._overlap and number < len(self.buckets) - 1:
                self._send_next()

    def finish(self) -> None:
        """Send what is left, wait for all sums, and point every .grad at them."""
        for slot in self.slots:
            if not slot.seen:
                self._take(slot)
        flags = self.tail[: len(self.slots)]
        flags.copy_(torch.tensor([slot.seen for slot in self.slots]))
        while self._next < len(self.buckets):
            self._send_next()
        if self.thread:
            self.thread.wait()
        nobody = (flags == 0).tolist() if not bool(flags.all()) else None
        for i, slot in enumerate(self.slots):
            slot.parameter.grad = None if nobody and nobody[i] else slot.view
            slot.mixed = False

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self.thread:
            self.thread.close()
        self.comm.close()

    def _open(self, overlap: bool) -> None:
        if overlap and self.thread is None and self.comm.size > 1:
            self.thread = CommThread(lambda flat: self.averaging.run(self.comm, flat))
        self._overlap, self._next = overlap and self.thread is not None, 0

    def _begin(self, share: float, overlap: bool) -> None:
        self._open(overlap)
        self._armed = True
        for bucket in self.buckets:
            bucket.missing = bucket.parameters
        for slot in self.slots:
            slot.seen = False
            grad = slot.parameter.grad
            if grad is slot.view:
                if slot.mixed and share != 1 / self.comm.size:
                    raise PacelineError(
                        "a plain backward() has added to gradients that were averaged already, and this rank's share "
                        "is not 1/N: accumulate with plain backwards first and average last, or zero_grad() to None"
                    )
                grad.mul_(1 / self.comm.size)  # the same on every rank already: summed again, it must stay what it is
            elif grad is not None:
                grad.mul_(share)

    def _make_hook(self, slot: Slot) -> Callable[[Tensor], None]:
        def hook(_: Tensor) -> None:
            if not self._armed:
                slot.mixed = slot.parameter.grad is slot.view
                return
            if slot.seen:
                raise PacelineError(
                    "a parameter got its gradient twice in one backward (re-entrant checkpointing does that): "
                    "use torch.utils.checkpoint with use_reentrant=False"
                )
            self._take(slot)
            slot.bucket.missing -= 1
            while self._overlap and self._next < len(self.buckets) - 1 and not self.buckets[self._next].missing:
                self._send_next()

        return hook

    def _take(self, slot: Slot) -> None:
        """Bring the parameter's gradient into its bucket."""
        grad = slot.parameter.grad
        slot.seen = grad is not None
        if grad is None:
            slot.view.zero_()
        elif grad is not slot.view:
            slot.view.copy_(grad)
            slot.parameter.grad = slot.view

    def _send_next(self) -> None:
        flat = self.buckets[self._next].flat
        self._next += 1
        if self._overlap and self.thread:
            self.thread.put(flat)
        elif self.comm.size > 1:
            self.averaging.run(self.comm, flat)


def _lay_out(
    parameters: Sequence[nn.Parameter], bucket_bytes: int, riders: int
) -> tuple[list[Bucket], list[Slot], Tensor]:
    """Cut the parameters into buckets of about `bucket_bytes`; the tail goes behind the last one."""
    first = parameters[0]
    total = sum(p.numel() for p in parameters)
    memory = torch.zeros(total + len(parameters) + riders, dtype=first.dtype, device=first.device)
    limit = max(1, bucket_bytes // first.element_size())
    edges, start, offset = [], 0, 0
    for p in parameters:
        offset += p.numel()
        if offset - start >= limit:
            edges.append(offset)
            start = offset
    if not edges or edges[-1] != total:
        edges.append(total)
    edges[-1] = memory.numel()
    buckets = [Bucket(memory[a:b]) for a, b in zip([0, *edges], edges, strict=False)]
    slots, offset, here = [], 0, 0
    for p in parameters:
        while offset >= edges[here]:
            here += 1
        buckets[here].parameters += 1
        view = memory[offset : offset + p.numel()].as_strided(p.shape, _dense_strides(p))
        slots.append(Slot(p, view, buckets[here]))
        offset += p.numel()
    return buckets, slots, memory[total:]


def _dense_strides(p: Tensor) -> tuple[int, ...]:
    """The parameter's strides, whatever their order (channels_last, transposed); fused optimizers need them equal."""
    expected = 1
    for stride, size in sorted((stride, size) for stride, size in zip(p.stride(), p.shape, strict=True) if size > 1):
        if stride != expected:
            raise PacelineError(
                f"a parameter of shape {tuple(p.shape)} has strides {p.stride()}, with gaps or overlaps: "
                f"make it .contiguous() first"
            )
        expected *= size
    return p.stride()

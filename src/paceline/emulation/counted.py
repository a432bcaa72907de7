"""What a part of a model computes and sends for a sample, counted without running it; no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from paceline.pipeline.partition import cut_by, plan_at
from paceline.pipeline.plan import Cut, Device, Profile, StagePlan


@dataclass(frozen=True)
class Amount:
    """Numbers of `itemsize` bytes that are sent together: some for each sample, and some for all samples."""

    per_sample: int
    fixed: int
    itemsize: int

    def count(self, samples: int, shrink: int = 1) -> int:
        """Rounded up, if they are `shrink` times smaller."""
        return -(-(self.fixed + samples * self.per_sample) // shrink)

    def nbytes(self, samples: int, shrink: int = 1) -> int:
        return self.count(samples, shrink) * self.itemsize


@dataclass(frozen=True)
class Value:
    """A value that crosses a cut, and whether its gradient is sent back."""

    amount: Amount
    grad: bool


@dataclass(frozen=True, eq=False)
class Chain:
    """A model as nodes in program order. `forward` and `backward` are a node's parts of the operations of a step.

    `profile` has everything about nodes and cuts but times and bytes. `values[p]` cross the cut at position p. `sizes`
    are the numbers of each trained parameter by name, in the model's order, and `users` the nodes that use it.
    """

    profile: Profile
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    values: tuple[tuple[Value, ...], ...]
    sizes: Mapping[str, int]
    users: Mapping[str, tuple[int, ...]]
    itemsize: int
    macs: float  # multiply-adds of the forward pass of one sample

    def timed(self, samples: int, seconds: float) -> Profile:
        """The profile for micro-batches of so many samples, if the whole model takes so many seconds for one."""
        parts = zip(self.profile.nodes, self.forward, self.backward, strict=True)
        nodes = [replace(node, forward=ahead * seconds, backward=back * seconds) for node, ahead, back in parts]
        cuts = [self._cut(position, samples) for position in range(len(self.profile.cuts))]
        return replace(self.profile, nodes=tuple(nodes), cuts=tuple(cuts), micro_size=samples)

    def _cut(self, position: int, samples: int) -> Cut:
        ahead, back = (
            sum(v.amount.nbytes(samples) for v in self.values[position] if v.grad or not only) for only in (False, True)
        )
        return replace(self.profile.cuts[position], forward_bytes=ahead, backward_bytes=back)

    def plan(
        self,
        cut: str,
        samples: int,
        seconds: float,
        devices: Sequence[Device],
        schedule: str,
        micros: int,
        recompute: bool,
    ) -> StagePlan:
        """The plan for a value of `--cut`, by operations: messages count only where stages take equally long."""
        rest = (schedule, micros, None, recompute)
        found = cut_by(cut, self.timed(samples, 1.0), devices, *rest)  # a device may be infinitely fast
        return plan_at(self.timed(samples, seconds), found.positions(), devices, *rest, found.how)

    def compute(self, edges: Sequence[int]) -> list[tuple[float, float]]:
        """The parts of a step's operations that each stage has, forward and backward."""
        return [(sum(self.forward[a:b]), sum(self.backward[a:b])) for a, b in pairwise(edges)]

    def stages_of(self, edges: Sequence[int]) -> dict[str, list[int]]:
        """The stages that have each trained parameter: those whose nodes use it."""
        spans = list(enumerate(pairwise(edges)))
        return {
            name: [stage for stage, (a, b) in spans if any(a <= node < b for node in nodes)]
            for name, nodes in self.users.items()
        }


class Point(NamedTuple):
    """A point of a shard's pass: after so many exchanges, and this part of the operations of a whole model's step."""

    exchanges: int
    done: float


@dataclass(frozen=True)
class Exchange:
    """What a shard exchanges with the others at one point: an all-reduce, or messages from and to each of them."""

    done: float  # the part of the operations of a whole model's step that the shard has computed before it
    summed: Amount | None = None
    receives: tuple[tuple[int, Amount], ...] = ()
    sends: tuple[tuple[int, Amount], ...] = ()

    @property
    def amounts(self) -> list[Amount]:
        """Of its own: what it sums, or sends."""
        return [self.summed] if self.summed else [amount for _, amount in self.sends]


@dataclass(frozen=True)
class Shard:
    """What a shard computes and sends for a batch: exchanges in order, of which the first `forward.exchanges` are
    forward.

    `sizes` are the numbers of each trained parameter, and `ready` is where its gradient is ready, both in the model's
    order.
    """

    rank: int
    shards: int
    exchanges: tuple[Exchange, ...]
    forward: Point
    end: Point
    sizes: tuple[int, ...]
    ready: tuple[Point, ...]
    itemsize: int
    macs: float  # multiply-adds of the forward pass of one sample of the whole model

    def bucket_points(self, numbers: Sequence[int]) -> list[Point]:
        """Where each bucket of gradients can be sent; `numbers` are the buckets of the parameters, last one first."""
        found = [self.forward] * (max(numbers) + 1)
        for number, ready in zip(numbers, reversed(self.ready), strict=True):
            found[number] = max(found[number], ready)
        return list(accumulate(found, max))

"""What a play trains: ten values in three chunks, drawn to the samples; and a witness of every update."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from paceline.data.batch import Batch
from paceline.server.layout import Layout
from paceline.server.ledger import Part, UpdatePlan
from paceline.server.roles import Return
from paceline.server.shard import Shard
from paceline.server.tally import Result
from paceline.tasks.base import Sums
from paceline.tasks.scoring import Score

WIDTH = 10
MOMENTUM = 0.9


def layout(servers: int = 1) -> Layout:
    return Layout(WIDTH, WIDTH, servers, 8, chunk_bytes=32)


def first_weights() -> Tensor:
    return torch.linspace(-1, 1, WIDTH, dtype=torch.float64)


@cache
def targets(samples: int) -> Tensor:
    return torch.randn(samples, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@cache
def order(samples: int, epoch: int) -> Tensor:
    return torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))


def samples_of(samples: int, epoch: int, picked: Tensor) -> Tensor:
    """These samples; a little different in each epoch, so that no two parts have the same gradient."""
    return targets(samples)[picked] + 0.01 * epoch


def rate(update: int) -> float:
    return 0.1 / (1 + update % 3)


def gradient(weights: Tensor, plan: UpdatePlan, epoch: int, start: int, stop: int, total: int) -> Tensor:
    picked = order(plan.samples, epoch)[start:stop]
    return (weights - samples_of(plan.samples, epoch, picked)).sum(0) / total


def sequential(plan: UpdatePlan) -> Tensor:
    """One process, one update after the other."""
    weights = nn.Parameter(first_weights())
    optimizer = torch.optim.SGD([weights], momentum=MOMENTUM)
    for update in range(plan.updates):
        span = plan.span(update)
        optimizer.param_groups[0]["lr"] = rate(update)
        weights.grad = gradient(weights.detach(), plan, plan.epoch(update), span.start, span.stop, len(span))
        optimizer.step()
    return weights.detach()


class ToyFlat:
    """Stands for strategies.flat.FlatModel: the loss is half the squared distance to the samples."""

    def __init__(self) -> None:
        self.weights, self.gradient = torch.zeros(WIDTH, dtype=torch.float64), torch.zeros(WIDTH, dtype=torch.float64)
        self.model = nn.Identity()

    def score(self, _model: nn.Module, batch: Batch) -> Score:
        """Stands for tasks.scoring.Scorer."""
        self._leaf = self.weights.clone().requires_grad_(torch.is_grad_enabled())
        loss = (self._leaf - batch.inputs).square().sum() / 2
        return Score(loss, Sums(loss.item(), float(batch.count), float(batch.count)))

    def collect(self, _count: int, _total: int, *, last: bool) -> None:
        assert self._leaf.grad is not None
        self.gradient.copy_(self._leaf.grad)

    def compute_in(self, gradient: Tensor) -> None:
        self.gradient = gradient

    def first_nonfinite(self) -> int:
        return 0

    def arrived(self) -> None:
        pass


@dataclass(frozen=True)
class Computed:
    """A gradient, and how old the weights were that it was computed with, by chunk: found by what they were."""

    part: Part
    versions: tuple[int, ...]
    ages: tuple[int, ...]
    gradient: Tensor


@dataclass
class Record:
    """Sees every gradient that is computed and every update that is made; believes no header."""

    plan: UpdatePlan
    layout: Layout
    computed: list[Computed] = field(default_factory=list)

    def __post_init__(self) -> None:
        chunks = range(self.layout.chunks)
        self.history: dict[int, list[bytes]] = {c: [self.of(first_weights(), c).numpy().tobytes()] for c in chunks}
        self.made: dict[int, list[tuple[Computed, ...]]] = {c: [] for c in chunks}
        self.ages: dict[int, int] = dict.fromkeys(chunks, 0)  # how often a chunk went back

    def of(self, flat: Tensor, chunk: int) -> Tensor:
        span = self.layout.span(chunk)
        return flat[span.start : span.stop]

    def has_computed(self, part: Part, weights: Tensor, grad: Tensor) -> None:
        found = []
        for chunk, history in self.history.items():
            values = self.of(weights, chunk).numpy().tobytes()
            found.append(max((v for v, known in enumerate(history) if known == values), default=-1))
        self.computed.append(Computed(part, tuple(found), tuple(self.ages.values()), grad.clone()))

    def applying(self, chunk: int, values: Tensor) -> None:
        """The update is the sum of parts that were computed, all of one update, the next; or, unbounded, a new one."""
        if self.plan.staleness is None:
            there = {made.part.update for (made,) in self.made[chunk]}
            one = next((c for c in self.computed if torch.equal(self.of(c.gradient, chunk), values)), None)
            assert one is not None, f"chunk {chunk} got a gradient that nobody has computed"
            assert one.part.update not in there, f"{one.part} twice in chunk {chunk}"
            self.made[chunk].append((one,))
            return
        update, age = len(self.made[chunk]), self.ages[chunk]
        oldest = update - self.plan.staleness
        parts = [c for c in self.computed if c.part.update == update and c.ages[chunk] == age]
        fresh = [c for c in parts if c.versions[chunk] >= oldest]
        choices = itertools.chain.from_iterable(
            itertools.product(*([c for c in fresh if (c.part.slot, c.part.slots) == (i, n)] for i in range(n)))
            for n in {c.part.slots for c in fresh}
        )
        found = (choice for choice in choices if torch.equal(self._sum(choice, chunk), values))
        choice = next(found, None)
        assert choice is not None, (
            f"update {update} of chunk {chunk} is no sum of gradients of weights {oldest}: {parts}"
        )
        samples = [place for c in choice for place in range(c.part.start, c.part.stop)]
        assert samples == list(self.plan.span(update)), f"update {update} of chunk {chunk} has samples {samples}"
        self.made[chunk].append(choice)

    def _sum(self, choice: tuple[Computed, ...], chunk: int) -> Tensor:
        total = torch.zeros(len(self.layout.span(chunk)), dtype=torch.float64)
        for c in choice:
            total += self.of(c.gradient, chunk)
        return total

    def applied(self, chunk: int, values: Tensor) -> None:
        self.history[chunk].append(values.numpy().tobytes())

    def loaded(self, chunk: int, values: Tensor) -> None:
        """A server has gone back, to weights that were there."""
        version = self.history[chunk].index(values.numpy().tobytes())
        del self.history[chunk][version + 1 :], self.made[chunk][version:]
        self.ages[chunk] += 1

    def staleness(self) -> Counter[int]:
        """How many updates the weights of each gradient in chunk 0 had missed."""
        return Counter(update - min(update, c.versions[0]) for update, parts in enumerate(self.made[0]) for c in parts)

    def samples(self, chunk: int) -> Counter[tuple[int, int]]:
        """How often each sample of each epoch is in a chunk."""
        return Counter(
            (c.part.epoch, int(number))
            for parts in self.made[chunk]
            for c in parts
            for number in order(self.plan.samples, c.part.epoch)[c.part.start : c.part.stop]
        )


class Witness(torch.optim.SGD):
    """Tells the record what it is given and what it makes of it."""

    def __init__(self, parameters: list[Tensor], record: Record, chunk: int) -> None:
        super().__init__(parameters, 0.0, momentum=MOMENTUM)
        self.record, self.chunk, self.values = record, chunk, parameters[0]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert self.values.grad is not None
        self.record.applying(self.chunk, self.values.grad)
        super().step(closure)
        self.record.applied(self.chunk, self.values.detach())

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict)
        self.record.loaded(self.chunk, self.values.detach())


def shard(record: Record, server: int) -> Shard:
    chunks = record.layout.of_server(server)
    values = {c: (record.of(first_weights(), c).clone(), len(record.layout.span(c))) for c in chunks}
    numbers = iter(chunks)

    def make(parameters: list[Tensor]) -> Witness:
        return Witness(parameters, record, next(numbers))

    return Shard(values, make, rate, record.plan.staleness)


def _copies(tensors: dict[int, dict[str, Tensor]]) -> dict[int, dict[str, Tensor]]:
    return {chunk: {name: tensor.clone() for name, tensor in own.items()} for chunk, own in tensors.items()}


class Memory:
    """A store that outlives its server."""

    def __init__(self, kept: int = 2) -> None:
        self.kept = kept
        self.files: dict[int, tuple[dict[int, dict[str, Tensor]], str]] = {}

    @property
    def busy(self) -> bool:
        return False

    def save(self, number: int, mark: str, tensors: dict[int, dict[str, Tensor]], facts: dict[str, Any]) -> None:
        self.files[number] = _copies(tensors), json.dumps(facts)
        for old in self.numbers()[: -self.kept]:
            del self.files[old]

    def abandon(self) -> None:
        pass

    def load(self, number: int) -> tuple[dict[int, dict[str, Tensor]], dict[str, Any]]:
        tensors, facts = self.files[number]
        return _copies(tensors), json.loads(facts)

    def numbers(self) -> list[int]:
        return sorted(self.files)

    def forget_after(self, number: int) -> None:
        for later in [n for n in self.files if n > number]:
            del self.files[later]


class Events:
    """A watcher that remembers."""

    def __init__(self) -> None:
        self.updates: list[int] = []
        self.epochs: list[tuple[int, Result]] = []
        self.evaluations: list[tuple[str, int, Result]] = []
        self.joins: list[int] = []
        self.losses: list[tuple[int, str]] = []
        self.returns: list[Return] = []

    def begun(self, ranks: dict[int, dict[str, Any]]) -> None:
        pass

    def updated(self, update: int, epoch: int, result: Result) -> None:
        self.updates.append(update)

    def skipped(self, update: int) -> None:
        raise AssertionError(f"update {update} was skipped")

    def epoch_ended(self, epoch: int, result: Result) -> None:
        self.epochs.append((epoch, result))

    def evaluated(self, name: str, epoch: int, update: int, result: Result) -> None:
        self.evaluations.append((name, epoch, result))

    def joined(self, rank: int, about: dict[str, Any], *, back: bool) -> None:
        self.joins.append(rank)

    def lost(self, rank: int, why: str, parts: list[Part]) -> None:
        self.losses.append((rank, why))

    def went_back(self, number: int, why: str) -> None:
        self.returns.append(Return(number, 0, why))

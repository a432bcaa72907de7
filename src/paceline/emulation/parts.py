"""Counts what parts of a model compute and send, on torch's meta device, where tensors have shapes and no values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.comm.base import Comm, Work
from paceline.comm.single import SingleComm
from paceline.data.batch import Values, call, each
from paceline.emulation.counted import Amount, Chain, Exchange, Point, Shard, Value
from paceline.emulation.timing import counting
from paceline.errors import UsageError
from paceline.pipeline.graph import Graph, Walk, tensors_in
from paceline.pipeline.profile import count
from paceline.pipeline.tracing import without_compiler
from paceline.tensor.apply import split_wide

START = Point(0, 0.0)
SAMPLES = (2, 3, 5)  # batch-norm cannot train on one value per channel


def chain_of(graph: Graph) -> Chain:
    """The operations of each node, and what crosses each cut. Raises UsageError if that is not linear in samples."""
    walks = [graph.walk(samples) for samples in SAMPLES]
    profile, operations = count(graph, SAMPLES[0]), _Operations(graph, SAMPLES[0])
    nodes = [operations.found.get(node.name, (0, 0)) for node in graph.nodes]
    total = sum(map(sum, nodes))
    if not total:  # nothing that is counted: all nodes take the same time
        nodes, total = [(1, 2)] * len(nodes), 3 * len(nodes)
    values = tuple(tuple(_value(walks, name) for name in cut.values) for cut in profile.cuts)
    users, named = dict[str, tuple[int, ...]](), dict(graph.model.named_parameters(remove_duplicate=False))
    trained = {name: p for name, p in graph.model.named_parameters() if p.requires_grad}
    first = {id(p): name for name, p in trained.items()}
    for number in range(len(graph.nodes)):
        for name in dict.fromkeys(first[id(named[n])] for n in graph.owned(number, number + 1)
                                  if n in named and id(named[n]) in first):  # fmt: skip
            users[name] = (*users.get(name, ()), number)
    return Chain(
        profile,
        tuple(ahead / total for ahead, _ in nodes),
        tuple(back / total for _, back in nodes),
        values,
        {name: p.numel() for name, p in trained.items() if name in users},
        {name: users[name] for name in trained if name in users},
        next(iter(trained.values())).itemsize,
        sum(ahead for ahead, _ in operations.found.values()) / 2 / SAMPLES[0],
    )


def _value(walks: list[Walk], name: str) -> Value:
    """Of a cut where the model cannot be cut, values that are not tensors do not count."""
    forms = [walk.forms[name] for walk in walks if name in walk.forms]
    if not forms:
        return Value(Amount(0, 0, 1), grad=False)
    return Value(linear([form.numel for form in forms], forms[0].dtype.itemsize, name), forms[0].grad)


def linear(counts: list[int], itemsize: int, what: str) -> Amount:
    """The numbers for any samples, from those for SAMPLES."""
    (one, other, third), (few, more, most) = counts, SAMPLES
    slope, rest = divmod(other - one, more - few)
    found = Amount(slope, one - slope * few, itemsize)
    if rest or found.count(most) != third:
        raise UsageError(
            f"compute cannot be emulated: the size of {what} is not linear in the number of samples: {one:,}, "
            f"{other:,} and {third:,} values for {few}, {more} and {most}"
        )
    return found


class _Operations(fx.Interpreter):
    """Runs every node on its own, forward and backward; `found` has its operations by name."""

    def __init__(self, graph: Graph, samples: int) -> None:
        trace = graph.traces[True]
        with torch.inference_mode(False):
            module = trace.module(graph.bare.train(), trace.graph, "meta")
        super().__init__(module, garbage_collect_values=True)
        self.extra_traceback = False
        self.found: dict[str, tuple[int, int]] = {}
        with counting() as self._counter, torch.inference_mode(False), torch.enable_grad(), torch.device("meta"):
            inputs = [t.new_empty(samples, *t.shape[1:]) for t in graph.arguments(graph.example)]
            with without_compiler():
                self.run(*(t.to(memory_format=graph.layout) if t.dim() == 4 else t for t in inputs))
        module.zero_grad(set_to_none=True)

    def run_node(self, n: fx.Node) -> Any:
        if n.op in ("placeholder", "get_attr", "output"):
            return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        # Copies of leaves, because a leaf cannot be changed in place.
        args, kwargs = fx.node.map_aggregate((args, kwargs), lambda value: _apart(value, copy=True))
        begun = self._counter.get_total_flops()
        result = getattr(self, n.op)(n.target, args, kwargs)
        computed = self._counter.get_total_flops()
        made = [t for t in tensors_in(result) if t.grad_fn is not None]
        if made:
            torch.autograd.backward(made, [torch.ones_like(t) for t in made])
        self.found[n.name] = computed - begun, self._counter.get_total_flops() - computed
        return fx.node.map_aggregate(result, _apart)


def _apart(value: Any, *, copy: bool = False) -> Any:
    """A tensor without its history."""
    if not isinstance(value, Tensor):
        return value
    leaf = value.detach().requires_grad_(value.requires_grad)
    return leaf.clone() if copy and leaf.requires_grad else leaf


def shard_of(
    model: nn.Module,
    inputs: Values,
    rank: int,
    shards: int,
    name: str,
    tell: Callable[[str], None] = lambda line: None,
) -> Shard:
    """Splits a model on the meta device in place, and records what a shard of it computes and sends.

    `inputs` are those of some samples, on the meta device. Raises UsageError if the model cannot be split.
    """
    recorder, undivided = Recorder(rank, shards), Recorder(0, 1).run(model, inputs, SAMPLES[0])
    whole = undivided.operations
    split_wide(model, recorder, name, tell)
    runs = [recorder.run(model, inputs, samples) for samples in SAMPLES]
    first, trained = runs[0], [p for p in model.parameters() if p.requires_grad]
    assert all([event.kind for event in run.events] == [event.kind for event in first.events] for run in runs)
    end = Point(len(first.events), first.operations / whole)
    exchanges = tuple(_exchange([run.events[i] for run in runs], whole) for i in range(len(first.events)))
    return Shard(
        rank,
        shards,
        exchanges,
        Point(first.forward.exchanges, first.forward.done / whole),
        end,
        tuple(p.numel() for p in trained),
        tuple(Point(p.exchanges, p.done / whole) if (p := first.ready.get(i)) else end for i in range(len(trained))),
        trained[0].itemsize,
        undivided.forward.done / 2 / SAMPLES[0],
    )


def _exchange(events: list[_Event], whole: float) -> Exchange:
    """The same event of runs with different numbers of samples."""
    first = events[0]

    def amounts(side: Callable[[_Event], list[tuple[int, Tensor]]]) -> tuple[tuple[int, Amount], ...]:
        rows = zip(*(side(event) for event in events), strict=True)
        return tuple(
            (row[0][0], linear([tensor.numel() for _, tensor in row], row[0][1].itemsize, "a split layer's output"))
            for row in rows
        )

    ((_, summed),) = amounts(lambda event: event.summed) or ((0, None),)
    return Exchange(first.done / whole, summed, amounts(lambda e: e.receives), amounts(lambda e: e.sends))


@dataclass
class _Event:
    """Tensors that are exchanged with other shards, each with the number of the other one."""

    done: float
    summed: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)
    sends: list[tuple[int, Tensor]] = field(default_factory=list)

    @property
    def kind(self) -> tuple[int, int, int]:
        return len(self.summed), len(self.receives), len(self.sends)


@dataclass
class _Pass:
    """A recorded pass, forward and backward; points are in operations."""

    events: list[_Event] = field(default_factory=list)
    forward: Point = START
    ready: dict[int, Point] = field(default_factory=dict)
    operations: float = 0.0


class Recorder(SingleComm):
    """A shard without others, on the meta device: it notes what it would send, and when."""

    def __init__(self, rank: int, size: int) -> None:
        super().__init__()
        self.rank, self.size, self._open = rank, size, False

    def group(self, ranks: list[int]) -> Comm:
        assert ranks == list(range(self.size))
        return self

    def run(self, model: nn.Module, inputs: Values, samples: int) -> _Pass:
        self._pass, trained = _Pass(), [p for p in model.parameters() if p.requires_grad]
        with counting() as self._counter, without_compiler(), torch.enable_grad(), torch.device("meta"):
            hooks = [p.register_post_accumulate_grad_hook(self._note(i)) for i, p in enumerate(trained)]
            output = call(model, each(lambda t: t.new_empty(samples, *t.shape[1:]), inputs))
            self._pass.forward = self._now()
            output.sum().backward()
            self._pass.operations = self._counter.get_total_flops()
        for hook in hooks:
            hook.remove()
        model.zero_grad(set_to_none=True)
        return self._pass

    def _note(self, number: int) -> Callable[[Tensor], None]:
        return lambda _: self._pass.ready.__setitem__(number, self._now())

    def _now(self) -> Point:
        return Point(len(self._pass.events), self._counter.get_total_flops())

    def allreduce(self, tensor: Tensor) -> None:
        self._pass.events.append(_Event(self._now().done, summed=[(0, tensor)]))

    def irecv(self, tensor: Tensor, source: int, tag: int = 0) -> Work:
        if not self._open:
            self._pass.events.append(_Event(self._now().done))
            self._open = True
        self._pass.events[-1].receives.append((source, tensor))
        return self

    def isend(self, tensor: Tensor, to: int, tag: int = 0) -> Work:
        self._pass.events[-1].sends.append((to, tensor))
        return self

    def wait(self) -> None:
        """Of a message: the exchange is over."""
        self._open = False

"""Counts what parts of a model compute and send, on torch's meta device, where tensors have shapes and no values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from paceline.emulation.counted import Amount, Chain, Value
from paceline.emulation.timing import counting
from paceline.errors import UsageError
from paceline.pipeline.graph import Graph, Walk, tensors_in
from paceline.pipeline.profile import count
from paceline.pipeline.tracing import without_compiler

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

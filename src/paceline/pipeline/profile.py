"""Measures the time and memory of each node of a model by running it, with one node's weights in memory at a time."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.pipeline.graph import Form, Graph, Shared, Walk, tensors_in
from paceline.pipeline.plan import Copied, Node, Profile
from paceline.pipeline.resident import most_added

MakeOptimizer = Callable[[Iterable[Tensor]], torch.optim.Optimizer]
# A node is run at least this often, and for this long, after a warm-up run.
RUNS, SECONDS, MOST_RUNS = 3, 0.02, 50
OUTPUT = -1
# Bytes that are written between two passes of a node. In a model, other layers run in between: the CPU cache then has
# the output of the previous layer, but not the node's weights, nor what it kept for backward.
ELSEWHERE = 8 << 20


@dataclass
class _Run:
    """One node, ready to run: a function of fresh inputs, the inputs, its weights, and those that count for it."""

    call: Callable[[Sequence[Tensor]], Any]
    inputs: list[Tensor]
    weights: list[Tensor]
    counted: list[Tensor]


def measure(
    graph: Graph,
    micro_size: int,
    make_optimizer: MakeOptimizer,
    base_bytes: int,
    told: Callable[[int, int], None] = lambda done, of: None,
) -> Profile:
    """Run every node forward and backward on a micro-batch of synthetic values; `told` is called with the progress.

    Nodes with the same layer settings and the same shapes of inputs are run once.
    """
    walk, known, nodes = graph.walk(micro_size), dict[Any, Node](), list[Node]()
    sizes: dict[int, int] = {}
    for tensor in tensors_in(walk.results):
        storage = walk.storage(tensor)
        sizes[storage] = max(sizes.get(storage, 0), tensor.nbytes)
    seen: set[str] = set()
    copied = graph.copied()
    shared = {name for each in copied for name in each.names}
    # What a node keeps of the model's weights is there anyway.
    held = {walk.forms[n.name].storage for n in graph.nodes if n.op == "get_attr" and n.name in walk.forms}
    for number, (node, title) in enumerate(zip(graph.nodes, graph.names, strict=True)):
        told(number, len(graph.nodes))
        key = _key(graph, walk, node, shared)
        if key not in known:
            known[key] = _measure(_prepare(graph, walk, node, shared), make_optimizer)
        found = known[key]
        inputs = [tensor for source in node.all_input_nodes for tensor in tensors_in(walk.results[source.name])]
        kept = {walk.storage(tensor) for i, tensor in enumerate(inputs) if i in found.kept}
        if OUTPUT in found.kept:
            kept |= {walk.storage(tensor) for tensor in tensors_in(walk.results[node.name])}
        own = set(graph.owned(number, number + 1))
        if own <= seen:  # its weights are shared with another node, and counted there
            found = replace(found, parameters=0, weight_bytes=0, gradient_bytes=0, optimizer_bytes=0, update=0.0)
        seen |= own
        nodes.append(replace(found, name=title, kept=frozenset(kept - held)))
    by_number = tuple(sizes.get(number, 0) for number in range(max(sizes) + 1))
    copies = tuple(_copied(each, make_optimizer) for each in copied)
    return Profile(tuple(nodes), graph.cuts(micro_size), by_number, base_bytes, micro_size, copied=copies)


def _copied(shared: Shared, make_optimizer: MakeOptimizer | None) -> Copied:
    """What a copy of a weight costs on each stage; without the optimizer, only its size."""
    like, update, optimizer_bytes = shared.tensor, 0.0, 0
    if make_optimizer and like.requires_grad:
        weight = _fill(torch.empty_like(like, device="cpu")).requires_grad_()
        update, optimizer_bytes = _update([weight], make_optimizer)
    trained, size = like.requires_grad, like.nbytes
    return Copied(shared.nodes, like.numel() * trained, size, size * trained, optimizer_bytes, update)


def _key(graph: Graph, walk: Walk, node: fx.Node, shared: set[str]) -> Any:
    """A key that is equal for nodes with the same cost."""
    what: Any = node.target
    if node.op == "call_module":
        layer = graph.model.get_submodule(str(node.target))
        if any(layer.children()):
            return node.name
        named = layer.named_parameters(str(node.target))
        what = (type(layer), repr(layer), [(tuple(p.shape), p.requires_grad, name in shared) for name, p in named])
    if node.op == "get_attr":
        return node.name
    place = {source: number for number, source in enumerate(node.all_input_nodes)}
    forms = [replace(f, storage=0) if (f := walk.forms.get(s.name)) else repr(walk.results[s.name]) for s in place]
    shape = fx.node.map_arg((node.args, node.kwargs), lambda source: place[source])
    return repr((node.op, what, shape, forms))


def _prepare(graph: Graph, walk: Walk, node: fx.Node, shared: set[str]) -> _Run:
    """The node with synthetic inputs and weights; shared ones are not counted."""
    made: dict[fx.Node, Any] = {source: _real(walk.results[source.name], walk) for source in node.all_input_nodes}
    inputs = [tensor for value in made.values() for tensor in tensors_in(value)]

    def fresh(tensors: Sequence[Tensor]) -> tuple[Any, Any]:
        coming = iter(tensors)
        values = {source: _swap(value, coming) for source, value in made.items()}
        out: tuple[Any, Any] = fx.node.map_arg((node.args, node.kwargs), lambda source: values[source])
        return out

    if node.op == "call_module":
        layer = _filled(copy.deepcopy(graph.model.get_submodule(str(node.target))))

        def call(tensors: Sequence[Tensor]) -> Any:
            args, kwargs = fresh(tensors)
            return layer(*args, **kwargs)

        named = dict(layer.named_parameters(str(node.target)))
        return _Run(call, inputs, [*named.values()], [p for name, p in named.items() if name not in shared])
    if node.op == "get_attr":
        value = _real(walk.results[node.name], walk)
        weights = [t for t in tensors_in(value) if t.requires_grad]
        return _Run(lambda _: value, [], weights, [] if node.target in shared else weights)

    def function(tensors: Sequence[Tensor]) -> Any:
        args, kwargs = fresh(tensors)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    return _Run(function, inputs, [], [])


def _filled(layer: nn.Module) -> nn.Module:
    """The layer with storage and arbitrary finite values."""
    layer = layer.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*layer.parameters(), *layer.buffers()):
            _fill(tensor)
    return layer


def _fill(tensor: Tensor) -> Tensor:
    return tensor.detach().uniform_(0.01, 0.1) if tensor.is_floating_point() else tensor.detach().zero_()


def _real(value: Any, walk: Walk) -> Any:
    """The value with storage; a tensor is a leaf of autograd if it has a gradient in the model."""
    if isinstance(value, Tensor):
        form: Form = walk.form(value)
        real = form.empty()
        _fill(real)
        return real.requires_grad_(form.grad)
    return _swap(value, iter([_real(tensor, walk) for tensor in tensors_in(value)]))


def _swap(value: Any, coming: Any) -> Any:
    """The value with its tensors replaced by the next ones."""
    if isinstance(value, Tensor):
        return next(coming)
    if isinstance(value, dict):
        return {key: _swap(item, coming) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_swap(item, coming) for item in value)
    return value


def _measure(run: _Run, make_optimizer: MakeOptimizer) -> Node:
    trained = [weight for weight in run.counted if weight.requires_grad]
    kept, internal = _kept(run)
    passes, first = list[tuple[float, float]](), list[float]()
    begun = time.perf_counter()
    while len(passes) <= RUNS or (time.perf_counter() - begun < SECONDS and len(passes) <= MOST_RUNS):
        if trained and len(first) <= RUNS:
            for weight in trained:
                weight.grad = None
            first.append(_pass(run)[1])
        passes.append(_pass(run))  # adds to the gradients of the previous pass
    forward, backward = (median(side) for side in zip(*passes[1:], strict=True))
    update, optimizer_bytes = _update(trained, make_optimizer)
    return Node(
        name="",
        forward=forward,
        backward=backward,
        update=update - (backward - median(first[1:]) if first else 0.0),
        parameters=sum(weight.numel() for weight in trained),
        weight_bytes=sum(weight.nbytes for weight in run.counted),
        gradient_bytes=sum(weight.nbytes for weight in trained),
        optimizer_bytes=optimizer_bytes,
        working_bytes=_working(run),
        internal_bytes=internal,
        kept=kept,
    )


def _fresh(run: _Run) -> list[Tensor]:
    """Non-leaf copies of the inputs, because a leaf of autograd cannot be changed in place."""
    return [t.clone() if t.requires_grad else t for t in run.inputs]


def _with_history(out: Any) -> list[Tensor]:
    return [t for t in tensors_in(out) if t.requires_grad and t.grad_fn is not None]


def _pass(run: _Run) -> tuple[float, float]:
    """Seconds forward and backward."""
    other = torch.empty(ELSEWHERE, dtype=torch.uint8)
    other.fill_(1)
    inputs = _fresh(run)
    start = time.perf_counter()
    out = run.call(inputs)
    forward = time.perf_counter() - start
    made = _with_history(out)
    if not made:
        return forward, 0.0
    other.fill_(2)
    gradients = [torch.ones_like(t) for t in made]
    start = time.perf_counter()
    torch.autograd.backward(made, gradients)
    backward = time.perf_counter() - start
    for tensor in run.inputs:
        tensor.grad = None
    return forward, backward


def _working(run: _Run) -> int:
    """Scratch memory, which is used only while it runs.

    At least the gradients of its inputs, outputs and weights, which are created and then added to existing ones. The
    library that computes a layer may use more, which shows only in the memory of the process.
    """
    inputs = _fresh(run)
    made = tensors_in(run.call(inputs))
    trained = [t for t in (*made, *inputs, *run.weights) if t.requires_grad]
    gradients = sum(t.nbytes for t in {t.data_ptr(): t for t in trained}.values())
    fresh = [t for t in (*made, *inputs) if t.requires_grad]  # created by a pass, but not scratch
    return max(gradients, most_added(lambda: _pass(run)) - sum(t.nbytes for t in fresh) - ELSEWHERE)


def _kept(run: _Run) -> tuple[frozenset[int], int]:
    """What a node keeps until backward: which inputs, by number, or its output; and the bytes of other tensors."""
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()  # the tensor itself would be a reference cycle

    inputs = _fresh(run)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = run.call(inputs)
    where = {t.untyped_storage().data_ptr(): i for i, t in enumerate(inputs)}
    kept = {i for place, i in where.items() if saved.pop(place, 0)}
    for tensor in tensors_in(out):
        if saved.pop(tensor.untyped_storage().data_ptr(), 0):
            kept.add(OUTPUT)
    for weight in run.weights:
        saved.pop(weight.untyped_storage().data_ptr(), 0)
    return frozenset(kept), sum(saved.values())


def _update(weights: list[Tensor], make_optimizer: MakeOptimizer) -> tuple[float, int]:
    """Seconds of an optimizer step for these weights, and the bytes of the optimizer state."""
    if not weights:
        return 0.0, 0
    for weight in weights:  # one without a gradient, as a function's, would not be updated
        weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
    optimizer, seconds = make_optimizer(weights), []
    for _ in range(RUNS):
        start = time.perf_counter()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return median(seconds[1:]), sum(tensor.nbytes for tensor in state)


def count(graph: Graph, micro_size: int) -> Profile:
    """A profile without running anything: parameters, and the traffic of each cut."""
    nodes, copied = [], graph.copied()
    shared = {name for each in copied for name in each.names}
    for number, title in enumerate(graph.names):
        own = {name: weight for name, weight in _trained(graph, number) if name not in shared}
        weights = sum(weight.nbytes for weight in own.values())
        parameters = sum(weight.numel() for weight in own.values())
        nodes.append(Node(title, 0.0, 0.0, 0.0, parameters, weights, weights, 0, 0, 0, frozenset()))
    walk = graph.walk(micro_size)
    copies = tuple(_copied(each, None) for each in copied)
    return Profile(tuple(nodes), graph.cuts(micro_size), (0,) * walk.storages, 0, micro_size, copied=copies)


def _trained(graph: Graph, number: int) -> Iterable[tuple[str, Tensor]]:
    parameters = dict(graph.model.named_parameters(remove_duplicate=False))
    return ((name, parameters[name]) for name in graph.owned(number, number + 1) if name in parameters)

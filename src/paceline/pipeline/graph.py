"""A model as a graph of values: where it can be cut, what crosses a cut, and the part of it that a stage runs."""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.errors import UsageError
from paceline.pipeline.plan import Cut

# What every transport can send; others go as bytes.
SENT = (torch.float32, torch.float64, torch.int64, torch.int32)
# While torch.fx traces a model, calls of modules in other threads go astray.
_TRACING = threading.Lock()


@dataclass(frozen=True)
class Form:
    """What a value looks like, for one size of micro-batch."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # whether a gradient comes back for it
    storage: int  # values that are views of each other, or one changed in place, have the same

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def flat(self, tensor: Tensor) -> Tensor:
        """Its values in a row, in the order of the strides: no copy where it lies in memory as both sides expect."""
        if tensor.stride() != self.stride:
            tensor = self.empty().copy_(tensor)
        row = tensor.detach().as_strided((self.numel,), (1,))
        return row if self.dtype in SENT else row.view(torch.uint8)


class Graph:
    """A traced model: its nodes in the order of the program, the values between them.

    A position p is a place to cut: before node p. Position 0 and the last one are the two ends.
    """

    def __init__(self, model: nn.Module, image: Sequence[int], dtype: torch.dtype, layout: torch.memory_format) -> None:
        self.model, self.image, self.dtype, self.layout = model, tuple(image), dtype, layout
        self.training = _trace(model.train())
        self.evaluation = _trace(model.eval())
        self.bare = copy.deepcopy(model.train())  # stays without storage when the model's layers get values
        for layer in self.bare.modules():
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                layer.momentum = 0.1  # where it is None, a count is looked at, which has no value here
        if [(n.op, n.name) for n in self.training.nodes] != [(n.op, n.name) for n in self.evaluation.nodes]:
            raise UsageError("it computes other layers in evaluation than in training")
        inputs = [node for node in self.training.nodes if node.op == "placeholder"]
        if len(inputs) != 1:
            raise UsageError(f"its forward takes {len(inputs)} inputs; one, the images, is expected")
        self.input = inputs[0]
        self.nodes = [node for node in self.training.nodes if node.op not in ("placeholder", "output")]
        self.output = next(node for node in self.training.nodes if node.op == "output").all_input_nodes[0]
        self.places = {node.name: position for position, node in enumerate(self.nodes)} | {self.input.name: -1}
        self.names = [_title(node) for node in self.nodes]

    @lru_cache(maxsize=8)  # noqa: B019  a graph lives as long as its run
    def walk(self, batch: int, *, training: bool = True) -> Walk:
        """What every node makes of a micro-batch of so many samples; computed without storage."""
        return Walk(self, batch, training)

    def crossing(self, position: int) -> list[str]:
        """The values made before this position and used after it, in the order they were made."""
        if position in (0, len(self.nodes)):
            return [self.input.name] if position == 0 else []
        made = [self.input, *self.nodes[:position]]
        return [
            n.name for n in made if any(self.places.get(user.name, len(self.nodes)) >= position for user in n.users)
        ]

    def changes_input(self) -> bool:
        """Whether a node changes the images in place."""
        walk = self.walk(2)
        return walk.forms[self.input.name].storage in walk.changed

    def owned(self, start: int, stop: int) -> list[str]:
        """The names of the parameters and buffers that nodes start to stop use."""
        found: dict[str, None] = {}
        for node in self.nodes[start:stop]:
            found |= dict.fromkeys(_weights(self.model, node))
        return list(found)

    def cuts(self, batch: int) -> tuple[Cut, ...]:
        """What each position would cost, and why it cannot be cut where it cannot."""
        walk, last = self.walk(batch), len(self.nodes)
        reasons: dict[int, str] = {}
        for first, changed in walk.changed.values():
            for position in range(max(first, 0) + 1, changed + 1):
                reasons[position] = f"{self.names[changed]} changes in place what {self._name(first)} has made"
        for name, (first, again) in self._shared().items():
            for position in range(first + 1, again + 1):
                reasons[position] = f"{self.names[first]} and {self.names[again]} use the same weights ({name})"
        cuts = []
        for position in range(last + 1):
            names = self.crossing(position) if 0 < position < last else []
            loose = [name for name in names if name not in walk.forms]
            if loose and position not in reasons:
                reasons[position] = f"{self._name(self.places[loose[0]])} makes a value that is not a tensor"
            forms = [walk.forms[name] for name in names if name not in loose]
            cuts.append(
                Cut(
                    forward_bytes=sum(form.nbytes for form in forms),
                    backward_bytes=sum(form.nbytes for form in forms if form.grad),
                    reason=reasons.get(position),
                    values=tuple(names),
                    storages=frozenset(form.storage for form in forms),
                )
            )
        return tuple(cuts)

    def stage(self, start: int, stop: int, *, training: bool) -> fx.GraphModule:
        """Nodes start to stop as a module: takes the values that cross at start, returns those that cross at stop."""
        source = self.training if training else self.evaluation
        by_name = {node.name: node for node in source.nodes}
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for name in self.crossing(start):
            copies[by_name[name]] = graph.placeholder(name)
        for node in self.nodes[start:stop]:
            copies[by_name[node.name]] = graph.node_copy(by_name[node.name], lambda n: copies[n])
        out = [self.output.name] if stop == len(self.nodes) else self.crossing(stop)
        graph.output(tuple(copies[by_name[name]] for name in out))
        return fx.GraphModule(self.model, graph)

    def _shared(self) -> dict[str, tuple[int, int]]:
        """Weights that several nodes use: the first and the last of them."""
        spans: dict[int, tuple[str, int, int]] = {}
        for position, node in enumerate(self.nodes):
            for name, tensor in _weights(self.model, node).items():
                known = spans.get(id(tensor), (name, position, position))
                spans[id(tensor)] = (known[0], known[1], position)
        return {name: (first, last) for name, first, last in spans.values() if last > first}

    def _name(self, position: int) -> str:
        return "the input" if position < 0 else self.names[position]


class Walk(fx.Interpreter):
    """Runs the graph on the meta device: shapes, strides, which values share memory, which are changed in place."""

    def __init__(self, graph: Graph, batch: int, training: bool) -> None:
        program = graph.training if training else graph.evaluation
        super().__init__(fx.GraphModule(graph.bare.train(training), program), garbage_collect_values=False)
        self.places, self.results = graph.places, dict[str, Any]()
        self.changed: dict[int, tuple[int, int]] = {}  # storage -> the node that made it, the last that changed it
        self._storages: dict[int, int] = {}
        self._made: dict[int, int] = {}
        with torch.inference_mode(False), torch.enable_grad():
            image = torch.empty(batch, *graph.image, dtype=graph.dtype, device="meta")
            self.run(image.to(memory_format=graph.layout))
        self.forms = {name: self.form(value) for name, value in self.results.items() if isinstance(value, Tensor)}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "output":
            return super().run_node(n)
        inputs = [self.env[source] for source in n.all_input_nodes]
        tensors = [t for value in inputs for t in tensors_in(value)]
        versions = [t._version for t in tensors]
        result = super().run_node(n)
        position = self.places[n.name]
        for tensor, version in zip(tensors, versions, strict=True):
            if tensor._version != version:
                storage = self.storage(tensor)
                self.changed[storage] = (self._made.get(storage, -1), position)
        for tensor in tensors_in(result):
            self._made.setdefault(self.storage(tensor), position)
        self.results[n.name] = result
        return result

    @property
    def storages(self) -> int:
        return len(self._storages)

    def storage(self, tensor: Tensor) -> int:
        return self._storages.setdefault(tensor.untyped_storage()._cdata, len(self._storages))

    def form(self, t: Tensor) -> Form:
        dense = torch.empty_like(t, device="meta")  # without gaps: what is sent has none
        return Form(tuple(t.shape), dense.stride(), t.dtype, t.requires_grad, self.storage(t))


def trace(model: nn.Module, image: Sequence[int], dtype: torch.dtype, layout: torch.memory_format, name: str) -> Graph:
    """The graph of a model that is on the meta device, which images of this shape go through."""
    try:
        with _TRACING:
            graph = Graph(model, image, dtype, layout)
            graph.walk(2)
    except Exception as error:
        why = next(iter(str(error).splitlines()), type(error).__name__)
        raise UsageError(
            f"model {name} cannot be traced to a graph, which is what a pipeline cuts: {why[:300]} (torch.fx cannot "
            f"follow an if or a loop that depends on a tensor's values; such code can go into a layer of its own)"
        ) from error
    return graph


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value that may be a tuple, a list or a dictionary of them."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in inside for tensor in tensors_in(item)]


def _trace(model: nn.Module) -> fx.Graph:
    return fx.Tracer().trace(model)


def _title(node: fx.Node) -> str:
    """What people call a node: the layer, or the function with the layer that it is in."""
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    return ".".join([*list(node.meta.get("nn_module_stack", ()))[-1:], node.name])


def _weights(model: nn.Module, node: fx.Node) -> dict[str, Tensor]:
    """The parameters and buffers that a node uses, by the model's names."""
    if node.op == "call_module":
        layer = model.get_submodule(str(node.target))
        named = [*layer.named_parameters(str(node.target), remove_duplicate=False),
                 *layer.named_buffers(str(node.target), remove_duplicate=False)]  # fmt: skip
        return dict(named)
    if node.op == "get_attr":
        value: Any = model
        for part in str(node.target).split("."):
            value = getattr(value, part)
        return {str(node.target): value} if isinstance(value, Tensor) else {}
    return {}

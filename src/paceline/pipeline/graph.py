"""A model as a graph: where it can be cut, which values cross a cut, and the module of a stage."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from paceline.data.batch import Values, tensors
from paceline.errors import UsageError
from paceline.pipeline.plan import Cut
from paceline.pipeline.tracing import TRACING, TracedModel, traced, without_compiler

# Types that every transport can send; others are sent as bytes.
SENT = (torch.float32, torch.float64, torch.int64, torch.int32)


@dataclass(frozen=True)
class Form:
    """Shape, type and layout of a value, for one size of micro-batch."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    grad: bool  # whether it has a gradient
    storage: int  # the same for values that are views of each other, or changed in place

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def flat(self, tensor: Tensor) -> Tensor:
        """Its values in the order of the strides; without a copy if the memory layout is as both sides expect."""
        if tensor.stride() != self.stride:
            tensor = self.empty().copy_(tensor)
        row = tensor.detach().as_strided((self.numel,), (1,))
        return row if self.dtype in SENT else row.view(torch.uint8)


@dataclass(frozen=True)
class Shared:
    """A parameter or buffer that several nodes use, with its names in the model and these nodes."""

    tensor: Tensor
    names: tuple[str, ...]
    nodes: tuple[int, ...]


class Graph:
    """A traced model: its nodes in program order, and the values between them.

    `example` is a batch of inputs of any size, on the meta device. A position p is a possible cut, before node p.
    Position 0 and the last one are the two ends.
    """

    def __init__(self, model: nn.Module, example: Values, layout: torch.memory_format, name: str) -> None:
        self.model, self.example, self.layout, self.name = model, example, layout, name
        self.traces = {on: _trace(model.train(on), example) for on in (False, True)}
        self.training = self.traces[True].graph
        self.bare = copy.deepcopy(model)  # stays without storage when the model's layers get values
        for layer in self.bare.modules():
            if hasattr(layer, "num_batches_tracked"):  # looked at if momentum is None; it has no value here
                layer.momentum = 0.1  # type: ignore[assignment]
        if not _is_part(self.traces[False].graph, self.training):
            raise UsageError("it computes other layers in evaluation than in training")
        self.inputs = [node for node in self.training.nodes if node.op == "placeholder"]
        if len(self.inputs) != len(tensors(example)):
            taken, given = len(self.inputs), len(tensors(example))
            raise UsageError(f"its forward takes {taken} input{'s' * (taken != 1)} of a batch that has {given}")
        self.nodes = [node for node in self.training.nodes if node.op not in ("placeholder", "output")]
        self.output = next(node for node in self.training.nodes if node.op == "output").all_input_nodes[0]
        self.places = {node.name: position for position, node in enumerate(self.nodes)}
        self.places |= {node.name: -1 for node in self.inputs}
        self.names = [_title(node) for node in self.nodes]

    def arguments(self, inputs: Values) -> list[Tensor]:
        """The tensors of a batch in the order of the graph's inputs."""
        return [inputs[node.target] for node in self.inputs] if isinstance(inputs, dict) else tensors(inputs)

    @property
    def sample_bytes(self) -> int:
        """Of the inputs of one sample."""
        return sum(t.nbytes // len(t) for t in tensors(self.example))

    @lru_cache(maxsize=8)  # noqa: B019  a graph lives as long as its run
    def walk(self, batch: int, *, training: bool = True) -> Walk:
        """The result of every node for a micro-batch of this size; computed without storage."""
        try:
            return Walk(self, batch, training)
        except Exception as error:
            samples = f"{batch} sample{'s' * (batch != 1)}"
            where, advice = f"in evaluation, on {samples}", ""
            if training:
                where, advice = f"on a micro-batch of {samples}", "; give fewer --microbatches or a larger --batch-size"
            raise UsageError(f"model {self.name} fails {where}: {_why(error)}{advice}") from error

    def crossing(self, position: int) -> list[str]:
        """The values computed before this position and used after it, in program order."""
        if position in (0, len(self.nodes)):
            return [node.name for node in self.inputs] if position == 0 else []
        made = [*self.inputs, *self.nodes[:position]]
        return [
            n.name for n in made if any(self.places.get(user.name, len(self.nodes)) >= position for user in n.users)
        ]

    def changes_input(self) -> bool:
        """Whether a node changes an input in place."""
        walk = self.walk(2)
        return any(walk.forms[node.name].storage in walk.changed for node in self.inputs)

    def owned(self, start: int, stop: int) -> list[str]:
        """The names of the parameters and buffers that the nodes from start to stop use."""
        found: dict[str, None] = {}
        for node in self.nodes[start:stop]:
            found |= dict.fromkeys(self._weights(node))
        return list(found)

    def cuts(self, batch: int) -> tuple[Cut, ...]:
        """The traffic of a cut at each position, or why it cannot be cut there."""
        walk, last = self.walk(batch), len(self.nodes)
        reasons: dict[int, str] = {}
        for first, changed in walk.changed.values():
            for position in range(max(first, 0) + 1, changed + 1):
                reasons[position] = f"{self.names[changed]} changes the output of {self._name(first)} in place"
        copied = {each.names for each in self.copied()}
        for shared in self._shared():
            first, again = shared.nodes[0], shared.nodes[-1]
            for position in range(first + 1, again + 1) if shared.names not in copied else ():
                what = "weights, which forward changes" if isinstance(shared.tensor, nn.Parameter) else "buffer"
                users = f"{self.names[first]} and {self.names[again]}"
                reasons[position] = f"{users} use the same {what} ({shared.names[0]})"
        cuts = []
        for position in range(last + 1):
            names = self.crossing(position) if 0 < position < last else []
            loose = [name for name in names if name not in walk.forms]
            if position not in reasons and (why := self._why_together(walk, names)):
                reasons[position] = why
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
        """The nodes from start to stop as a module: its inputs cross at start, its outputs cross at stop."""
        trace = self.traces[training]
        by_name = {node.name: node for node in trace.graph.nodes}
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for name in self.crossing(start):
            copies[by_name[name]] = graph.placeholder(name)
        for node in self.nodes[start:stop]:
            if node.name in by_name:
                copies[by_name[node.name]] = graph.node_copy(by_name[node.name], lambda n: copies[n])
        out = [self.output.name] if stop == len(self.nodes) else self.crossing(stop)
        graph.output(tuple(copies[by_name[name]] for name in out))
        return trace.module(self.model, graph, "cpu")

    def changed_constant(self) -> str | None:
        """A node that changes a constant of forward in place."""
        walk, constants = self.walk(2), self.traces[True].constants
        made = {walk.forms[n.name].storage for n in self.nodes if n.op == "get_attr" and n.target in constants}
        return next((self.names[last] for storage, (_, last) in walk.changed.items() if storage in made), None)

    def _why_together(self, walk: Walk, names: list[str]) -> str | None:
        """Why these values cannot be sent to another stage; None if they can."""
        evaluated = {node.name for node in self.traces[False].graph.nodes}
        taken = {node.name for node in self.nodes if node.op == "get_attr"}
        owners = {walk.forms[n.name].storage: n for n in self.nodes if n.op == "get_attr" and self._weights(n)}
        for name in names:
            title = self._name(self.places[name])
            if name not in walk.forms:
                return f"{title} returns a value that is not a tensor"
            # A sent value is a copy, so changes to it would be lost.
            owner = owners.get(walk.forms[name].storage)
            if owner or name in taken:
                return f"{owner.target if owner else title} belongs to the layers after it"
            if name not in evaluated:
                return f"{title} returns a value only in training"
        return None

    def copied(self) -> list[Shared]:
        """Parameters that several nodes use and none changes: each stage with one of these nodes can have a copy.

        A gradient of a copy is a part of the gradient, and all parts are summed.
        """
        walk = self.walk(2)
        changed = {n.target for n in self.nodes if n.op == "get_attr" and n.name in walk.forms
                   and walk.forms[n.name].storage in walk.changed}  # fmt: skip
        return [each for each in self._shared()
                if isinstance(each.tensor, nn.Parameter) and not changed & set(each.names)]  # fmt: skip

    def _shared(self) -> list[Shared]:
        found: dict[int, tuple[Tensor, dict[str, None], dict[int, None]]] = {}
        for position, node in enumerate(self.nodes):
            for name, tensor in self._weights(node).items():
                _, names, nodes = found.setdefault(id(tensor), (tensor, {}, {}))
                names[name] = nodes[position] = None
        return [Shared(tensor, tuple(names), tuple(nodes)) for tensor, names, nodes in found.values() if len(nodes) > 1]

    def _weights(self, node: fx.Node) -> dict[str, Tensor]:
        """The parameters and buffers that a node uses, by the model's names."""
        path = str(node.target)
        if node.op == "call_module":
            layer = self.model.get_submodule(path)
            named = [*layer.named_parameters(path, remove_duplicate=False),
                     *layer.named_buffers(path, remove_duplicate=False)]  # fmt: skip
            return dict(named)
        if node.op != "get_attr" or path in self.traces[True].constants:
            return {}
        value = attrgetter(path)(self.model)
        return {path: value} if isinstance(value, Tensor) else {}

    def _name(self, position: int) -> str:
        return "the input" if position < 0 else self.names[position]


class Walk(fx.Interpreter):
    """Runs the graph on the meta device: shapes, strides, which values share memory, which are changed in place."""

    def __init__(self, graph: Graph, batch: int, training: bool) -> None:
        trace = graph.traces[training]
        with torch.inference_mode(False):
            module = trace.module(graph.bare.train(training), trace.graph, "meta")
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False
        self.places, self.results = graph.places, dict[str, Any]()
        self.changed: dict[int, tuple[int, int]] = {}  # storage -> the node that created it, the last that changed it
        self._storages: dict[int, int] = {}
        self._made: dict[int, int] = {}
        with torch.inference_mode(False), torch.enable_grad(), torch.device("meta"), without_compiler():
            inputs = [t.new_empty(batch, *t.shape[1:]) for t in graph.arguments(graph.example)]
            self.run(*(t.to(memory_format=graph.layout) if t.dim() == 4 else t for t in inputs))
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
        dense = torch.empty_like(t, device="meta")  # messages have no gaps
        return Form(tuple(t.shape), dense.stride(), t.dtype, t.requires_grad, self.storage(t))


def trace(model: nn.Module, example: Values, layout: torch.memory_format, name: str) -> Graph:
    """The graph of a model on the meta device, for batches like the example."""
    try:
        with TRACING:
            graph = Graph(model, example, layout, name)
            graph.walk(2)
            if changing := graph.changed_constant():
                raise UsageError(
                    f"{changing} changes in place a tensor that forward creates without its inputs "
                    f"(use x.new_zeros instead)"
                )
    except Exception as error:
        cause = error.__cause__ if isinstance(error, UsageError) and error.__cause__ else error
        raise UsageError(
            f"model {name} cannot be traced to a graph, which a pipeline needs: {_why(cause)}{_hint(cause)}"
        ) from error
    return graph


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a value that may be a tuple, a list or a dictionary of them."""
    if isinstance(value, Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()
    return [tensor for item in inside for tensor in tensors_in(item)]


def _trace(model: nn.Module, example: Values) -> TracedModel:
    trace = traced(model, example)
    if trace.draws:
        raise UsageError(
            "its forward draws random numbers in Python code, which would be the same in every step (torch.rand_like "
            "of a tensor, or a layer like nn.Dropout, draws new ones)"
        )
    if any(constant.is_meta for constant in trace.constants.values()):
        raise UsageError("its forward uses a tensor that is neither a parameter nor a buffer (register_buffer)")
    return trace


def _is_part(evaluation: fx.Graph, training: fx.Graph) -> bool:
    """Whether evaluation does the same as training, in the same order; it may skip nodes that only change buffers."""
    known = {node.name: node for node in training.nodes}
    for node in evaluation.nodes:
        same = known.get(node.name)
        if same is None or node.op != same.op or (node.op == "call_module" and node.target != same.target):
            return False
        if not {i.name for i in node.all_input_nodes} <= {i.name for i in same.all_input_nodes}:
            return False
    order = [[n.name for n in graph.nodes if n.op != "get_attr"] for graph in (evaluation, training)]
    return order[0] == [name for name in order[1] if name in set(order[0])]


def _why(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:300].rstrip(".") or type(error).__name__


def _hint(error: BaseException) -> str:
    if not isinstance(error, fx.proxy.TraceError) and "interpreted as an integer" not in str(error):
        return ""
    return " (torch.fx cannot follow an if or a loop that depends on a tensor's values or its shape)"


def _title(node: fx.Node) -> str:
    """The name of a node: its layer, or the function and the layer it is in."""
    if node.op in ("call_module", "get_attr"):
        return str(node.target)
    return ".".join([*list(node.meta.get("nn_module_stack", ()))[-1:], node.name])

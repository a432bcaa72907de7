"""Finds out with torch.fx how a model uses its layers: how often, and where their outputs go."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx, nn

from paceline.models.attention import CausalAttention
from paceline.own_code import reason
from paceline.pipeline.tracing import TRACING, traced
from paceline.tensor.elementwise import is_elementwise

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


@dataclass(frozen=True)
class Uses:
    """A model's traces, of training and of evaluation; none if it cannot be traced, and `untraced` says why."""

    model: nn.Module
    traces: tuple[fx.Graph, ...]
    untraced: str | None = None

    def why_not(self, path: str) -> str | None:
        """Why a layer cannot be replaced by one with the same output; None if it can."""
        parent = path
        while parent:
            parent = parent.rpartition(".")[0]
            module = self.model.get_submodule(parent)
            if parent and type(module).__module__.startswith("torch.nn") and not isinstance(module, _CONTAINERS):
                return f"is inside a {type(module).__name__}, which may use its weights without calling it"
        if any(_calls(graph)[path] > 1 for graph in self.traces):
            return "is used more than once"
        attributes = [str(node.target) for graph in self.traces for node in graph.nodes if node.op == "get_attr"]
        if any(name.startswith(f"{path}.") for name in attributes):
            return "has weights that are used without calling it"
        return None

    def pairs(self, linears: set[str]) -> dict[str, str]:
        """Pairs of Linears of which the first feeds only the second, through elementwise functions and attention."""
        if not self.traces or any(has_hooks(module) for module in self.model.modules()):
            return {}  # a hook must see whole values
        wished: dict[str, str] = {}
        for graph in self.traces:
            for node in graph.nodes:
                if (following := self._fed_by(node, linears)) and not {node.target, following} & _in(wished):
                    wished[str(node.target)] = following
        return {a: b for a, b in wished.items() if all(self._agrees(graph, a, b, linears) for graph in self.traces)}

    def _fed_by(self, node: fx.Node, linears: set[str]) -> str | None:
        """The only Linear that a Linear's output goes to."""
        if node.op != "call_module" or node.target not in linears:
            return None
        for user, module in self._following(node):
            if module and user.target in linears:
                return str(user.target)
            if not (isinstance(module, CausalAttention) or is_elementwise(user, module)):
                return None
        return None

    def _following(self, node: fx.Node) -> Iterator[tuple[fx.Node, nn.Module | None]]:
        """The only users of a node, of that one, and so on, with the modules that they call."""
        while len(node.users) == 1:
            (user,) = node.users
            if user.all_input_nodes != [node]:
                return
            yield user, self.model.get_submodule(str(user.target)) if user.op == "call_module" else None
            node = user

    def heads(self, first: str, second: str) -> int | None:
        """The number of heads of the attention between the Linears of a pair; None if there is none."""
        node = next(node for graph in self.traces for node in graph.nodes if node.target == first)
        for user, module in self._following(node):
            if isinstance(module, CausalAttention):
                layer = self.model.get_submodule(first)
                assert isinstance(layer, nn.Linear)
                return layer.out_features // (3 * module.head_size)
            if user.target == second:
                return None
        return None

    def _agrees(self, graph: fx.Graph, a: str, b: str, linears: set[str]) -> bool:
        """Whether a pair is also one in this trace, or is not used in it."""
        used = [node for node in graph.nodes if node.op == "call_module" and node.target in (a, b)]
        return not used or (len(used) == 2 and self._fed_by(used[0], linears) == b and used[0].target == a)


def find_uses(model: nn.Module) -> Uses:
    """Trace the model, without running it, in training and in evaluation, which may differ."""
    modes = {module: module.training for module in model.modules()}
    traces = []
    with TRACING:
        try:
            for training in (True, False):
                graph = _trace(model.train(training))
                if isinstance(graph, str):
                    return Uses(model, (), graph)
                traces.append(graph)
        finally:
            for module, mode in modes.items():
                module.training = mode
    return Uses(model, tuple(traces))


def _trace(model: nn.Module) -> fx.Graph | str:
    """The graph, or why there is none: forward depends on values, changes the model, or draws random numbers."""
    try:
        trace = traced(model)
    except Exception as error:  # noqa: BLE001  whatever a model's code does with values that are not there
        return reason(error)
    if trace.sets:
        return "its forward sets attributes of the model"
    return "its forward draws random numbers" if trace.draws else trace.graph


def has_hooks(module: nn.Module) -> bool:
    return any(getattr(module, name, None) for name in _HOOKS)


def _calls(graph: fx.Graph) -> Counter[str]:
    return Counter(str(node.target) for node in graph.nodes if node.op == "call_module")


def _in(pairs: dict[str, str]) -> set[str]:
    return {*pairs, *pairs.values()}

"""Tracing a model's forward with torch.fx, which leaves the model and the random generators as they were."""

from __future__ import annotations

import inspect
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from paceline.data.batch import Values
from paceline.models.attention import CausalAttention

# While torch.fx traces a model, calls of modules in other threads go astray.
TRACING = threading.RLock()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Keep torch from importing its compiler only to tell it what not to compile.

    Functions wrapped in `torch._disable_dynamo`, such as many of the meta device, do that on their first call. This
    takes more than a second of processor time and leaves a folder in the temporary directory.
    """
    with TRACING:
        if "torch._dynamo" in sys.modules:
            yield
            return
        stand_in: Any = types.ModuleType("torch._dynamo")
        stand_in.disable = lambda function, *_, **__: function
        sys.modules["torch._dynamo"] = vars(torch)["_dynamo"] = stand_in
        try:
            yield
        finally:
            del sys.modules["torch._dynamo"], vars(torch)["_dynamo"]


@dataclass(frozen=True)
class TracedModel:
    """What forward does. The constants are tensors that it makes without its inputs; they are not the model's."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    sets: bool  # whether it sets attributes of the model
    draws: bool  # whether it draws random numbers that are not in the graph, and so would always be the same

    def module(self, root: nn.Module, graph: fx.Graph, device: str) -> fx.GraphModule:
        """A module that runs this graph, or a part of it, on the root's layers."""
        vars(root).update({name: constant.to(device) for name, constant in self.constants.items()})
        try:
            return fx.GraphModule(root, graph)
        finally:
            for name in self.constants:
                del vars(root)[name]


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True  # or what is computed from buffers alone is not in the graph

    def __init__(self, inputs: Values) -> None:
        super().__init__()
        self.inputs = inputs

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, CausalAttention) or super().is_leaf_module(m, module_qualified_name)

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        """Forward is called with the inputs alone: what else it takes has its default."""
        del is_module, concrete_args
        parameters = list(inspect.signature(root_fn).parameters.values())[1:]
        if isinstance(self.inputs, dict):
            names = [p.name for p in parameters if p.name in self.inputs]
        else:
            count = len(self.inputs) if isinstance(self.inputs, tuple) else 1
            positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
            needed = (p for p in parameters[count:] if p.default is p.empty and p.kind in positional)
            names = [p.name for p in (*parameters[:count], *needed)]
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in names]
        if isinstance(self.inputs, dict):
            return lambda root, *values: root_fn(root, **dict(zip(names, values, strict=True))), [self.root, *proxies]
        return root_fn, [self.root, *proxies]


class _Draws(TorchFunctionMode):
    """Detects random numbers that this thread draws while it traces: the generator's state belongs to all threads.

    An operation that torch tags as random draws; one on a proxy is in the graph. What a function of torch that is
    written in Python calls is not seen here: the state of the generator tells.
    """

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = torch.get_rng_state() if inspect.isfunction(func) else None
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, fx.Proxy):
            changed = before is not None and not torch.equal(before, torch.get_rng_state())
            self.seen |= changed or _is_random(getattr(func, "__name__", ""))
        return result


@cache
def _is_random(name: str) -> bool:
    operation = None if name.startswith("__") else getattr(torch.ops.aten, name, None)
    overloads = operation.overloads() if operation else []
    return any(torch.Tag.nondeterministic_seeded in getattr(operation, each).tags for each in overloads)


def traced(model: nn.Module, inputs: Values = None) -> TracedModel:
    """What forward does with inputs of this form: a tensor unless given. Whatever forward raises is raised."""
    constants, draws = dict[str, Tensor](), _Draws()
    with TRACING:
        before, state = [(module, _contents(module)) for module in model.modules()], _random_state()
        try:
            with draws:
                graph = _Tracer(inputs).trace(model)
            for node in graph.nodes:
                made = vars(model).get(str(node.target)) if node.op == "get_attr" else None
                if isinstance(made, Tensor) and str(node.target) not in before[0][1][0]:
                    constants[str(node.target)] = made
        finally:
            for name in constants:
                del vars(model)[name]
            sets = sum(_put_back(module, tables) for module, tables in before) > 0
            drawn = draws.seen or repr(_random_state()[1:]) != repr(state[1:])
            if drawn:
                torch.set_rng_state(state[0])
                random.setstate(state[1])
                np.random.set_state(state[2])
    _move_to_users(graph)
    return TracedModel(graph, constants, sets, drawn)


def _random_state() -> tuple[Tensor, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _contents(module: nn.Module) -> list[dict[str, Any]]:
    return [dict(table) for table in (vars(module), module._parameters, module._buffers, module._modules)]


def _put_back(module: nn.Module, contents: list[dict[str, Any]]) -> bool:
    """Whether something had to be."""
    changed, own = False, contents[0]
    if not _same(vars(module), own):
        vars(module).clear()
        vars(module).update(own)
        changed = True
    for name, table in zip(("_parameters", "_buffers", "_modules"), contents[1:], strict=True):
        if not _same(own[name], table):
            own[name].clear()
            own[name].update(table)
            changed = True
    return changed


def _same(now: dict[str, Any], then: dict[str, Any]) -> bool:
    return now.keys() == then.keys() and all(now[key] is value for key, value in then.items())


def _move_to_users(graph: fx.Graph) -> None:
    """What takes a tensor of the model goes to just before the first that uses it."""
    moved: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
        for source in node.all_input_nodes:
            if source.op == "get_attr" and source not in moved:
                moved.add(source)
                node.prepend(source)

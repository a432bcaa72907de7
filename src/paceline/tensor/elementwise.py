"""Elementwise operations, which can be applied to a part of the values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import fx, nn

# Without those that have weights (PReLU), draw random numbers (RReLU) or use other values (Softmax, GLU).
MODULES: frozenset[type[nn.Module]] = frozenset(
    {
        nn.CELU,
        nn.ELU,
        nn.GELU,
        nn.Hardshrink,
        nn.Hardsigmoid,
        nn.Hardswish,
        nn.Hardtanh,
        nn.Identity,
        nn.LeakyReLU,
        nn.LogSigmoid,
        nn.Mish,
        nn.ReLU,
        nn.ReLU6,
        nn.SELU,
        nn.SiLU,
        nn.Sigmoid,
        nn.Softplus,
        nn.Softshrink,
        nn.Softsign,
        nn.Tanh,
        nn.Tanhshrink,
        nn.Threshold,
    }
)
# As methods of a tensor, and as functions of torch and torch.nn.functional if these have them.
_LINES = (
    "abs celu celu_ clamp clamp_ elu elu_ exp gelu hardshrink hardsigmoid hardswish hardtanh hardtanh_ leaky_relu "
    "leaky_relu_ logsigmoid mish neg relu relu6 relu_ selu selu_ sigmoid sigmoid_ silu sin softplus softshrink "
    "softsign square tanh tanh_ tanhshrink threshold threshold_"
)
NAMES = frozenset(_LINES.split())
FUNCTIONS = frozenset(getattr(home, name) for home in (torch, F) for name in NAMES if hasattr(home, name))


def is_elementwise(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node with one input is elementwise; `module` is the module that it calls, if any."""
    if node.op == "call_module":
        return type(module) in MODULES or (type(module) is nn.Dropout and module.p == 0)
    if node.op == "call_method":
        return node.target in NAMES
    return node.op == "call_function" and node.target in FUNCTIONS

"""Decides which layers of a model are split over shards, and replaces them by split layers.

The rule: a Linear or Conv2d with at least WIDE weights, and an output for every shard, is split by its outputs, which
are gathered. If one Linear feeds another through elementwise functions only, the first one's outputs are not gathered,
and the second one is split by its inputs: one sum instead of a gather and a sum. Attention between two Linears counts
as such a function, because it computes each head separately: a shard has some of the heads, and the number of shards
must divide that of heads. All other layers are on every shard, also embeddings, and an output layer with their weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from torch import nn

from paceline.comm.base import Comm
from paceline.errors import UsageError
from paceline.tensor.layers import ChannelConv2d, ColumnLinear, RowLinear, SplitLayer
from paceline.tensor.uses import Uses, find_uses, has_hooks

# With fewer weights than this, communication takes longer than splitting the layer saves.
WIDE = 2**14
SHOWN = 3


def split_wide(
    model: nn.Module, comm: Comm, name: str | None = None, tell: Callable[[str], None] = lambda line: None
) -> dict[str, int]:
    """Replace the model's wide layers, in place, by this shard's parts of them; all shards call it.

    The model is on torch's meta device, or has values, which are then divided. Returns, by parameter name, the
    dimension that it is split along, with `layout.share`. `name` is the model's name in error messages; `tell` is
    called with a message about what costs speed.
    """
    wide = {
        path: layer
        for path, layer in model.named_modules()
        if isinstance(layer, nn.Linear | nn.Conv2d) and layer.weight.numel() >= WIDE
    }
    uses, shared = find_uses(model), _shared_weights(model)
    if uses.untraced:
        tell(f"The model cannot be traced ({uses.untraced}): each layer is split separately, which costs more messages")
    reasons = {path: _why_not(path, layer, comm.size, shared, uses) for path, layer in wide.items()}
    chosen = [path for path, reason in reasons.items() if reason is None]
    if not chosen:
        raise UsageError(_nothing_to_split(name or type(model).__name__, reasons, comm.size))
    pairs = uses.pairs({path for path in chosen if isinstance(wide[path], nn.Linear)})
    for first, second in pairs.items():
        heads = uses.heads(first, second)
        if heads is not None and heads % comm.size:
            raise UsageError(_uneven_heads(name or type(model).__name__, first, heads, comm.size))
    # Their own communicator: their messages must not mix with others.
    own = comm.dup() if comm.size > 1 else comm
    # If ranks are threads, none may compute while another is tracing, because tracing changes nn.Module for all.
    own.barrier()
    found: dict[str, int] = {}
    for path in chosen:
        split = _part_of(wide[path], own, gather=path not in pairs, second=path in pairs.values())
        parent, _, child = path.rpartition(".")
        setattr(model.get_submodule(parent), child, split)
        found |= {f"{path}.{each}": dim for each, dim in split.split_along.items() if getattr(split, each) is not None}
    return found


def _part_of(layer: nn.Linear | nn.Conv2d, comm: Comm, *, gather: bool, second: bool) -> SplitLayer:
    if isinstance(layer, nn.Conv2d):
        return ChannelConv2d(layer, comm)
    return RowLinear(layer, comm) if second else ColumnLinear(layer, comm, gather=gather)


def _why_not(path: str, layer: nn.Linear | nn.Conv2d, shards: int, shared: set[int], uses: Uses) -> str | None:
    """Why a wide layer is not split; None if it is."""
    outputs = layer.out_channels if isinstance(layer, nn.Conv2d) else layer.out_features
    groups = layer.groups if isinstance(layer, nn.Conv2d) else 1
    changed = type(layer) not in (nn.Linear, nn.Conv2d) or "forward" in vars(layer)
    reasons = (
        (outputs < shards, f"has {outputs} outputs"),
        (groups > 1, f"has {groups} groups"),
        (changed, f"is a {type(layer).__name__} that computes in its own way"),
        (not path, "is the model itself"),
        (any(id(p) in shared for p in layer.parameters()), "shares its weights"),
        (has_hooks(layer), "has hooks"),
    )
    return next((why for applies, why in reasons if applies), None) or uses.why_not(path)


def _shared_weights(model: nn.Module) -> set[int]:
    """The ids of parameters that have several names."""
    names = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {each for each, count in names.items() if count > 1}


def _uneven_heads(name: str, layer: str, heads: int, shards: int) -> str:
    *most, last = [str(number) for number in range(1, heads + 1) if heads % number == 0]
    possible = f"{', '.join(most)} or {last}" if most else last
    return f"model {name}: {heads} heads cannot be divided over {shards} shards (layer {layer}): use {possible}"


def _nothing_to_split(name: str, reasons: dict[str, str | None], shards: int) -> str:
    instead = "use a data-parallel strategy"
    if not reasons:
        return f"model {name} has no layer of at least {WIDE} weights to split over {shards} workers; {instead}"
    shown = [f"{path or 'the layer'} {reason}" for path, reason in reasons.items()]
    more = [f"and {len(shown) - SHOWN} more"] * (len(shown) > SHOWN)
    why = "; ".join(shown[:SHOWN] + more)
    return f"model {name} has no layer that can be split over {shards} workers ({why}); {instead}"

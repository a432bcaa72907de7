"""Split layers, which replace nn.Linear and nn.Conv2d; each shard has a part of the weights, under the same names.

With n shards, a batch of B rows or images and values of s bytes, a shard sends in a step:

    layer                    forward                                backward
    ColumnLinear             (n - 1) · B · own outputs · s          sums B · inputs · s, if these need a gradient
    ColumnLinear, no gather  nothing                                the same
    RowLinear                sums B · outputs · s                   nothing
    ChannelConv2d            (n - 1) · B · own channels · pixels    sums B · channels · pixels · s of its input
                             of its output · s

Sums are by the transport's own all-reduce. Shares can be uneven (`layout.share`).
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.layout import share
from paceline.tensor.exchange import add_up, enter, put_together


class ColumnLinear(nn.Linear):
    """Has some of the outputs. The input is whole; so is the output with `gather`; otherwise it is a part."""

    split_along: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, layer: nn.Linear, comm: Comm, *, gather: bool = True) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.comm, self.gather = comm, gather
        _take_part(self, layer, comm)

    def forward(self, x: Tensor) -> Tensor:
        out = F.linear(enter(x, self.comm), self.weight, self.bias)
        return put_together(out, -1, self.out_features, self.comm) if self.gather else out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, gather={self.gather}, {_shard(self.comm)}"


class RowLinear(nn.Linear):
    """Has the weights of some of the inputs. The input is this shard's part of them; the output is whole."""

    split_along: ClassVar[dict[str, int]] = {"weight": 1}

    def __init__(self, layer: nn.Linear, comm: Comm) -> None:
        super().__init__(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        self.comm = comm
        _take_part(self, layer, comm)

    def forward(self, x: Tensor) -> Tensor:
        out = add_up(F.linear(x, self.weight), self.comm)
        return out if self.bias is None else out.add_(self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_shard(self.comm)}"


class ChannelConv2d(nn.Conv2d):
    """Has some of the output channels. Input and output are whole."""

    split_along: ClassVar[dict[str, int]] = {"weight": 0, "bias": 0}

    def __init__(self, layer: nn.Conv2d, comm: Comm) -> None:
        assert layer.groups == 1, "grouped convolutions are not split"
        super().__init__(
            layer.in_channels,
            layer.out_channels,
            layer.kernel_size,  # type: ignore[arg-type]
            layer.stride,  # type: ignore[arg-type]
            layer.padding,  # type: ignore[arg-type]
            layer.dilation,  # type: ignore[arg-type]
            bias=layer.bias is not None,
            padding_mode=layer.padding_mode,
            device="meta",
        )
        self.comm = comm
        _take_part(self, layer, comm)

    def forward(self, x: Tensor) -> Tensor:
        out = self._conv_forward(enter(x, self.comm), self.weight, self.bias)
        return put_together(out, -3, self.out_channels, self.comm)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {_shard(self.comm)}"  # type: ignore[no-untyped-call]


SplitLayer = ColumnLinear | RowLinear | ChannelConv2d


def _take_part(split: SplitLayer, layer: nn.Module, comm: Comm) -> None:
    """Give the split layer its part of the layer's weights; unsplit parameters are shared by both."""
    for name, whole in layer.named_parameters(recurse=False):
        dim = split.split_along.get(name)
        if dim is not None:
            own = share(whole.shape[dim], comm.size, comm.rank)
            part = whole.detach().narrow(dim, own.start, len(own)).clone()
            whole = nn.Parameter(part, requires_grad=whole.requires_grad)  # noqa: PLW2901
        setattr(split, name, whole)
    split.train(layer.training)


def _shard(comm: Comm) -> str:
    return f"shard {comm.rank} of {comm.size}"

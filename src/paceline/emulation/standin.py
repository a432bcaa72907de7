"""Replaces a model that is not computed by tensors of the same sizes, so that the same bytes are sent."""

from __future__ import annotations

from collections.abc import Container

import torch
from torch import Tensor, nn


class StandIn(nn.Module):
    """A flat tensor of zeros for each parameter and buffer of a model, `shrink` times smaller; or only for those with
    these names. A dot in a name becomes a slash.
    """

    def __init__(self, model: nn.Module, shrink: int, names: Container[str] | None = None) -> None:
        super().__init__()

        def smaller(tensor: Tensor) -> Tensor:
            return torch.zeros(-(-tensor.numel() // shrink), dtype=tensor.dtype)

        for name, p in model.named_parameters():
            if names is not None and name not in names:
                continue
            self.register_parameter(name.replace(".", "/"), nn.Parameter(smaller(p), requires_grad=p.requires_grad))
        for name, b in model.named_buffers():
            if names is None or name in names:
                self.register_buffer(name.replace(".", "/"), smaller(b))

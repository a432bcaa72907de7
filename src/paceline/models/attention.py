"""Attention without weights, for any number of heads: also for those that one shard of a model has."""

import torch.nn.functional as F
from torch import Tensor, nn


class CausalAttention(nn.Module):
    """Every position attends to itself and to those before it.

    The input is [batch, positions, heads · 3 · head_size]: for each head its query, key and value. The output is
    [batch, positions, heads · head_size]. The number of heads is that of the input, so that a part of the heads can be
    computed by the same module. torch.fx traces it as one layer. No dropout: what it draws would depend on that number.
    """

    def __init__(self, head_size: int) -> None:
        super().__init__()
        self.head_size = head_size

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = x.unflatten(-1, (-1, 3, self.head_size)).permute(3, 0, 2, 1, 4).unbind()
        heads = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return heads.transpose(1, 2).flatten(2)

    def extra_repr(self) -> str:
        return f"head_size={self.head_size}"

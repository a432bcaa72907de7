"""GPT-2 (Radford et al. 2019): a decoder-only transformer that predicts the next token at every position."""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from paceline.models.attention import CausalAttention


class Block(nn.Module):
    """Attention and a two-layer network, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.attention = CausalAttention(width // heads)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.gelu = nn.GELU("tanh")
        self.narrow = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.project(self.attention(self.qkv(self.norm1(x)))))
        out: Tensor = x + self.dropout(self.narrow(self.gelu(self.widen(self.norm2(x)))))
        return out


class Gpt(nn.Module):
    """Takes token numbers [batch, positions] and returns logits [batch, positions, vocabulary]; positions ≤ `block`.

    The output layer has the weights of the token embedding. GPT-2 also drops attention weights; this does not.
    """

    def __init__(self, layers: int, heads: int, width: int, block: int, vocabulary: int, dropout: float) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(block, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        """As GPT-2's: weights of N(0, 0.02), smaller in layers whose output is added to the residual; zero biases."""
        if isinstance(module, nn.Linear):
            added = any(module in (block.project, block.narrow) for block in self.blocks)
            nn.init.normal_(module.weight, 0, 0.02 / math.sqrt(2 * len(self.blocks)) if added else 0.02)
            nn.init.zeros_(module.bias)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, 0, 0.02)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.tokens(x) + self.positions.weight[: x.size(1)])
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def build(shape: tuple[int], classes: int, dropout: float) -> nn.Module:
    return Gpt(4, 4, 128, shape[0], classes, dropout)


def build_10m(shape: tuple[int], classes: int, dropout: float) -> nn.Module:
    return Gpt(6, 6, 384, shape[0], classes, dropout)


def build_gpt2(shape: tuple[int], classes: int, dropout: float) -> nn.Module:
    """GPT-2 small."""
    return Gpt(12, 12, 768, shape[0], classes, dropout)

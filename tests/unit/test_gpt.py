"""The transformer: GPT-2's formulas written out plainly, what it starts from, and that no position sees a later one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import symbolic_trace

from paceline.models.attention import CausalAttention
from paceline.models.gpt import Gpt

LAYERS, HEADS, WIDTH, BLOCK, VOCABULARY = 2, 3, 12, 7, 11


def small(dropout: float = 0.0) -> Gpt:
    """With weights so large that a mistake shows."""
    torch.manual_seed(0)
    model = Gpt(LAYERS, HEADS, WIDTH, BLOCK, VOCABULARY, dropout).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) / 2)
    return model


def tokens(batch: int, positions: int = BLOCK, vocabulary: int = VOCABULARY) -> Tensor:
    return torch.randint(0, vocabulary, (batch, positions), generator=torch.Generator().manual_seed(1))


def norm(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + 1e-5).sqrt() * scale + shift


def formula(w: dict[str, Tensor], x: Tensor) -> Tensor:
    """As in OpenAI's code: the queries of all heads, then all keys, then all values; a mask, then a softmax."""
    size, past = WIDTH // HEADS, torch.ones(x.shape[1], x.shape[1]).tril().bool()
    h = w["tokens.weight"][x] + w["positions.weight"][torch.arange(x.shape[1])]
    # Our rows are ordered by head: [head, which of q, k, v, size]; GPT-2's are [which, head, size].
    order = torch.arange(3 * WIDTH).view(HEADS, 3, size).transpose(0, 1).reshape(-1)
    for number in range(LAYERS):
        b = {name.removeprefix(f"blocks.{number}."): value for name, value in w.items()}
        a = norm(h, b["norm1.weight"], b["norm1.bias"])
        qkv = a @ b["qkv.weight"][order].T + b["qkv.bias"][order]
        heads = []
        for q, k, v in zip(*(part.split(size, -1) for part in qkv.split(WIDTH, -1)), strict=True):
            scores = q @ k.transpose(1, 2) / math.sqrt(size)
            heads.append(scores.masked_fill(~past, -math.inf).softmax(-1) @ v)
        h = h + torch.cat(heads, -1) @ b["project.weight"].T + b["project.bias"]
        m = norm(h, b["norm2.weight"], b["norm2.bias"]) @ b["widen.weight"].T + b["widen.bias"]
        m = 0.5 * m * (1 + torch.tanh(math.sqrt(2 / math.pi) * (m + 0.044715 * m**3)))
        h = h + m @ b["narrow.weight"].T + b["narrow.bias"]
    return norm(h, w["norm.weight"], w["norm.bias"]) @ w["tokens.weight"].T


@pytest.mark.parametrize("positions", [BLOCK, 4, 1])
def test_it_computes_gpt_2s_formulas_also_for_shorter_sequences(positions: int) -> None:
    model, x = small(), tokens(3, positions)
    weights = {name: value.detach().clone().requires_grad_() for name, value in model.state_dict().items()}
    out, expected = model(x), formula(weights, x)
    assert out.shape == (3, positions, VOCABULARY)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    upstream = torch.randn(out.shape, dtype=out.dtype)
    out.backward(upstream)
    expected.backward(upstream)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-10, atol=1e-10)


def test_a_later_token_does_not_change_earlier_logits() -> None:
    model, x = small().eval(), tokens(2)
    before = model(x)
    for place in range(BLOCK):
        other = x.clone()
        other[:, place] = (other[:, place] + 1) % VOCABULARY
        same = (model(other) == before).all(-1)
        assert same[:, :place].all()
        assert not same[:, place:].any()


def test_it_starts_with_gpt_2s_weights_and_the_loss_of_a_guess() -> None:
    torch.manual_seed(0)
    model = Gpt(4, 4, 128, 64, 1000, 0.0)
    small = 0.02 / math.sqrt(8)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif "norm" in name:
            assert (parameter == 1).all(), name
        else:
            std = small if "project" in name or "narrow" in name else 0.02
            assert parameter.std().item() == pytest.approx(std, rel=0.05), name
    x = tokens(4, 65, 1000)
    loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(1000), abs=0.05)


def test_attention_on_some_of_the_heads_is_that_part_of_all() -> None:
    attention, x = CausalAttention(4), torch.randn(2, 5, 6 * 3 * 4)
    whole = attention(x)
    assert whole.shape == (2, 5, 6 * 4)
    for parts in (2, 3, 6):
        pieces = [attention(part) for part in x.chunk(parts, -1)]
        torch.testing.assert_close(torch.cat(pieces, -1), whole)


def test_dropout_is_in_training_only() -> None:
    model, x = small(0.5), tokens(2)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))


def test_it_is_traced_for_any_batch_and_length() -> None:
    model = small()
    traced = symbolic_trace(model)
    for x in (tokens(1), tokens(5), tokens(2, 3)):
        assert torch.equal(traced(x), model(x))

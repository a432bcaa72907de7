"""Which layers of a model are split, and how: the rule, on models where it must and must not apply."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tensor_cases import draw, fill
from torch import Tensor, nn

from paceline.comm.base import Comm
from paceline.comm.single import SingleComm
from paceline.errors import UsageError
from paceline.models.attention import CausalAttention
from paceline.models.build import build
from paceline.models.gpt import Gpt
from paceline.tensor.apply import WIDE, split_wide
from paceline.tensor.layers import ChannelConv2d, ColumnLinear, RowLinear

W = 128  # W x W is just wide


class Four(SingleComm):
    """The first of four, where nobody says anything."""

    size = 4

    def group(self, ranks: list[int]) -> Comm:
        return self


class Wide(nn.Module):
    """Two wide layers, and what a test wants to happen to them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **more: nn.Module) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(W, W), nn.Linear(W, W)
        for name, module in more.items():
            self.add_module(name, module)
        self.do = forward

    def forward(self, x: Tensor) -> Any:
        return self.do(self, x)


def how(model: nn.Module, tell: Callable[[str], None] = lambda line: None) -> dict[str, str]:
    """By name, how each layer of the model is split."""
    split_wide(model, Four(), tell=tell)
    kinds: dict[type[nn.Module], str] = {ChannelConv2d: "channels", RowLinear: "row"}
    return {
        name: ("gathered" if layer.gather else "kept") if isinstance(layer, ColumnLinear) else kinds[type(layer)]
        for name, layer in model.named_modules()
        if type(layer) in kinds or isinstance(layer, ColumnLinear)
    }


PAIR, APART = {"a": "kept", "b": "row"}, {"a": "gathered", "b": "gathered"}


@pytest.mark.parametrize(
    ("between", "split"),
    [
        ([nn.ReLU()], PAIR),
        ([nn.ReLU(inplace=True), nn.Dropout(0.0), nn.Identity()], PAIR),
        ([nn.Sigmoid(), nn.GELU(), nn.Tanh(), nn.LeakyReLU(0.1), nn.SiLU(), nn.ELU()], PAIR),
        ([], PAIR),
        ([nn.Dropout(0.5)], APART),
        ([nn.ReLU(), nn.Dropout(0.1)], APART),
        ([nn.Softmax(-1)], APART),
        ([nn.LayerNorm(W)], APART),
        ([nn.BatchNorm1d(W)], APART),
        ([nn.PReLU()], APART),
        ([nn.RReLU()], APART),
        ([nn.Unflatten(1, (W, 1)), nn.Flatten()], APART),
    ],
    ids=lambda value: "-".join(type(m).__name__ for m in value) if isinstance(value, list) else "",
)
def test_two_dense_layers_are_a_pair_if_only_elementwise_modules_are_between_them(
    between: Sequence[nn.Module], split: dict[str, str]
) -> None:
    model = nn.Sequential()
    for name, module in [("a", nn.Linear(W, W)), *((f"m{i}", m) for i, m in enumerate(between))]:
        model.add_module(name, module)
    model.add_module("b", nn.Linear(W, W))
    assert how(model) == split


@pytest.mark.parametrize(
    ("forward", "split"),
    [
        (lambda m, x: m.b(F.relu(m.a(x))), PAIR),
        (lambda m, x: m.b(m.a(x).relu_().sigmoid()), PAIR),
        (lambda m, x: m.b(torch.tanh(F.gelu(m.a(x), approximate="tanh"))), PAIR),
        (lambda m, x: m.b(m.a(x).clamp(0, 6)), PAIR),
        (lambda m, x: m.a(m.b(x).relu()), {"b": "kept", "a": "row"}),
        (lambda m, x: m.b(m.a(x).relu()) + m.a.in_features, PAIR),
        (lambda m, x: m.b(m.a(x).relu() + x), APART),
        (lambda m, x: m.b((y := m.a(x)).relu()) + y, APART),
        (lambda m, x: (m.b(y := m.a(x).relu()), y), APART),
        (lambda m, x: m.b(m.a(x).softmax(-1)), APART),
        (lambda m, x: m.b(m.a(x).view(-1, W)), APART),
        (lambda m, x: m.b(F.dropout(m.a(x), 0.5)), APART),
        (lambda m, x: m.b(m.a(x).mul(x)), APART),
        (lambda m, x: m.b(m.a(x).clamp(max=x)), APART),
        (lambda m, x: m.a(x) + m.b(x), APART),
        (lambda m, x: m.b(m.a(x)) if m.training else m.a(x), APART),
        (lambda m, x: m.a(x) if m.training else m.b(m.a(x)), APART),
        (lambda m, x: m.b(m.a(x)) if x.sum() > 0 else m.a(x), APART),
        (lambda m, x: m.b(m.a(x).relu()[: len(x)]), APART),
        (lambda m, x: m.b(m.a(m.a(x))), {"b": "gathered"}),
        (lambda m, x: m.b(F.linear(x, m.a.weight)), {"b": "gathered"}),
        (lambda m, x: m.b(m.a.forward(x)), {"b": "gathered"}),
    ],
)
def test_what_becomes_of_an_output_decides(forward: Callable[[Any, Tensor], Any], split: dict[str, str]) -> None:
    assert how(Wide(forward)) == split


HALF = {"qkv": "kept", "project": "row"}
BLOCK = HALF | {"widen": "kept", "narrow": "row"}


def test_a_transformer_is_split_by_heads_and_its_embeddings_are_whole() -> None:
    assert how(Gpt(2, 4, W, 8, 200, 0.0)) == {
        f"blocks.{i}.{name}": kind for i in (0, 1) for name, kind in BLOCK.items()
    }
    with torch.device("meta"):
        large = build("gpt2", (1024,), 50257, dropout=0.1)  # drops sums only, which are whole
    assert how(large) == {f"blocks.{i}.{name}": kind for i in range(12) for name, kind in BLOCK.items()}


@pytest.mark.parametrize(("heads", "use"), [(6, "1, 2, 3 or 6"), (5, "1 or 5"), (1, "1")])
def test_shards_must_divide_the_heads(heads: int, use: str) -> None:
    model = Gpt(1, heads, 30 * heads * (6 // heads), 8, 20, 0.0)
    says = rf"^model m: {heads} heads cannot be divided over 4 shards \(layer blocks.0.qkv\): use {use}$"
    with pytest.raises(UsageError, match=says):
        split_wide(model, Four(), "m")


def test_attention_whose_output_is_used_elsewhere_is_whole() -> None:
    wide = Wide(lambda m, x: m.b(y := m.attend(m.a(x))) + y.sum(), attend=CausalAttention(16))
    wide.a = nn.Linear(W, 3 * W)
    assert how(wide) == APART


def test_a_model_that_can_take_more_than_images_is_traced_with_its_defaults() -> None:
    class Optional(Wide):
        def forward(self, x: Tensor, twice: bool = False, scale: Tensor | None = None) -> Any:
            y = self.a(x) if not twice else self.a(self.a(x))
            return self.b(y if scale is None else y * scale)

    assert how(Optional(lambda m, x: x)) == PAIR


def test_of_three_layers_in_a_row_the_first_two_are_a_pair() -> None:
    model = Wide(lambda m, x: m.c(m.b(m.a(x).relu()).relu()), c=nn.Linear(W, W))
    assert how(model) == {**PAIR, "c": "gathered"}


def test_four_layers_are_two_pairs() -> None:
    model = Wide(lambda m, x: m.d(m.c(m.b(m.a(x)))), c=nn.Linear(W, W), d=nn.Linear(W, W))
    assert how(model) == {**PAIR, "c": "kept", "d": "row"}


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


def changed_forward() -> nn.Linear:
    layer = nn.Linear(W, W)
    layer.forward = lambda x: x  # type: ignore[method-assign,assignment]
    return layer


def hooked() -> nn.Linear:
    layer = nn.Linear(W, W)
    layer.register_forward_hook(lambda *_: None)
    return layer


def normed() -> nn.Module:
    layer = nn.Linear(W, W)
    torch.nn.utils.parametrizations.weight_norm(layer)
    return layer


WHOLE: list[tuple[Callable[[], nn.Module], str]] = [
    (lambda: nn.Linear(W, W - 1), ""),
    (lambda: nn.Linear(8 * W, 3), ""),
    (lambda: nn.Linear(WIDE, 3), "c has 3 outputs"),
    (lambda: nn.Conv2d(W, 8 * W, 1, groups=2), "c has 2 groups"),
    (lambda: nn.Conv2d(W, 3, 9), "c has 3 outputs"),
    (lambda: Doubled(W, W), "c is a Doubled that computes in its own way"),
    (changed_forward, "c is a Linear that computes in its own way"),
    (hooked, "c has hooks"),
    (normed, "c is a ParametrizedLinear that computes in its own way"),
    (lambda: nn.MultiheadAttention(W, 4), "c.out_proj is a NonDynamicallyQuantizableLinear"),
    (lambda: nn.TransformerEncoderLayer(W, 4, W), "c.linear1 is inside a TransformerEncoderLayer"),
]


@pytest.mark.parametrize(("make", "why"), WHOLE)
def test_a_layer_that_cannot_be_replaced_stays_whole_and_the_others_do_not(
    make: Callable[[], nn.Module], why: str
) -> None:
    layer = make()
    model = Wide(lambda m, x: m.b(m.a(m.c(x)).sum()), c=layer)
    assert how(model) == APART
    assert model.c is layer


@pytest.mark.parametrize(("make", "why"), WHOLE)
def test_if_no_layer_can_be_split_the_error_says_why(make: Callable[[], nn.Module], why: str) -> None:
    model = nn.Sequential()
    model.add_module("c", make())
    with pytest.raises(UsageError) as caught:
        split_wide(model, Four(), "mine")
    message = str(caught.value)
    assert why in message
    assert message.startswith("model mine has no layer ")
    assert message.endswith("; use a data-parallel strategy")
    if not why:
        assert "of at least 16384 weights to split over 4 workers" in message


def test_a_layer_under_two_names_and_tied_weights_stay_whole() -> None:
    shared = Wide(lambda m, x: m.b(m.a(x)).relu())
    shared.c = shared.a
    assert how(shared) == {"b": "gathered"}
    same = nn.Linear(W, W)
    tied = Wide(lambda m, x: m.b(m.a(x)).relu(), c=same)
    same.weight = tied.a.weight
    assert how(tied) == {"b": "gathered"}


def test_a_model_that_is_one_layer_cannot_be_split() -> None:
    with pytest.raises(UsageError, match=r"model Linear has no layer .*the layer is the model itself"):
        split_wide(nn.Linear(W, W), Four())


def test_where_anything_has_hooks_there_are_no_pairs_since_they_must_see_whole_values() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(W, W), nn.ReLU()), nn.Linear(W, W))
    model[0].register_forward_hook(lambda *_: None)
    assert how(model) == {"0.0": "gathered", "1": "gathered"}


def test_a_model_that_keeps_a_value_has_no_pairs_and_is_as_it_was() -> None:
    def keeps(model: Any, x: Tensor) -> Tensor:
        model.kept = model.a(x)
        out: Tensor = model.b(model.kept)
        return out

    model = Wide(keeps)
    model.b.eval()
    before = set(vars(model))
    told: list[str] = []
    assert how(model, told.append) == APART
    assert told == [
        "The model cannot be traced (its forward sets attributes of the model): each layer is split separately, which "
        "costs more messages"
    ]
    assert set(vars(model)) == before
    assert [module.training for module in (model, model.a, model.b)] == [True, True, False]


def test_why_a_model_cannot_be_traced_is_told() -> None:
    def looks(model: Any, x: Tensor) -> Tensor:
        out: Tensor = model.b(model.a(x)) if x.sum() > 0 else x
        return out

    told: list[str] = []
    assert how(Wide(looks), told.append) == APART
    assert "TraceError" in told[0]


@pytest.mark.parametrize(
    ("name", "options", "split"),
    [
        ("mlp", {"hidden": (256, 128)}, {"hidden.0": "kept", "hidden.1": "row"}),
        ("mlp", {"hidden": (256, 128), "dropout": 0.1}, {"hidden.0": "gathered", "hidden.1": "gathered"}),
        ("shallow-cnn", {}, {"conv2": "channels", "dense1": "gathered"}),
        ("alexnet", {}, {"classifier.1": "kept", "classifier.4": "row", "classifier.6": "gathered"}),
        ("alexnet", {"dropout": 0.5}, {"classifier.1": "gathered", "classifier.4": "kept", "classifier.6": "row"}),
    ],
)
def test_models_of_ours(name: str, options: dict[str, Any], split: dict[str, str]) -> None:
    with torch.device("meta"):
        shape = (1, 28, 28) if name != "alexnet" else (3, 64, 64)
        model = build(name, shape, 10, options.get("dropout", 0.0), options.get("hidden", ()))
    found = how(model)
    assert {k: v for k, v in found.items() if v != "channels" or name != "alexnet"} == split
    assert all(p.is_meta for p in model.parameters())


def test_values_names_and_kinds_of_weights_are_kept() -> None:
    plain = fill(Wide(lambda m, x: m.b(m.a(x).relu()), c=nn.Conv2d(16, 130, 3)))
    plain.a.weight.requires_grad_(False)
    whole = {name: p.detach().clone() for name, p in plain.named_parameters()}
    model = plain.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    split = split_wide(model, Four())
    assert split == {"a.weight": 0, "a.bias": 0, "b.weight": 1, "c.weight": 0, "c.bias": 0}
    assert list(model.state_dict()) == list(whole)
    for name, p in model.named_parameters():
        mine = whole[name].narrow(split[name], 0, whole[name].shape[split[name]] // 4) if name in split else whole[name]
        assert torch.equal(p, mine)
        assert p.requires_grad == (name != "a.weight")
        assert p.dtype == torch.float64
    assert model.c.weight.is_contiguous(memory_format=torch.channels_last)


def test_every_function_that_counts_as_elementwise_is() -> None:
    from paceline.tensor.elementwise import FUNCTIONS, MODULES, NAMES

    x = draw(4, 6)
    more = {"threshold": (0.1, 0.2), "threshold_": (0.1, 0.2), "clamp": (-0.5, 0.5), "clamp_": (-0.5, 0.5)}
    calls: list[Callable[[Tensor], Tensor]] = [kind(0.1, 0.2) if kind is nn.Threshold else kind() for kind in MODULES]
    for name in NAMES:
        given = more.get(name, ())
        found = [getattr(home, name) for home in (torch.Tensor, torch, F) if hasattr(home, name)]
        assert found, name
        calls += [lambda t, f=f, given=given: f(t, *given) for f in found]  # type: ignore[misc]
    assert len(calls) >= len(MODULES) + len(FUNCTIONS)
    for call in calls:
        whole = call(x.clone())
        assert whole.shape == x.shape
        assert torch.allclose(whole[:, 2:5], call(x[:, 2:5].clone()), 0, 1e-14), call

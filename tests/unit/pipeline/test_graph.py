"""Models as graphs: what crosses a cut, where none can be, and stages that together are the model."""

from __future__ import annotations

import copy
import random
import threading
from itertools import combinations
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.data.batch import Values, call, each, tensors
from paceline.errors import UsageError
from paceline.models.build import build
from paceline.models.gpt import Gpt
from paceline.pipeline.graph import Graph, trace
from paceline.pipeline.partition import Device, plan_at
from paceline.pipeline.profile import count, measure

BATCH = 3


def graph_of(model: nn.Module, shape: tuple[int, ...] = (2, 8, 8), dtype: torch.dtype = torch.float32) -> Graph:
    return traced_with(model, torch.empty(1, *shape, dtype=dtype, device="meta"))


def traced_with(model: nn.Module, example: Values) -> Graph:
    return trace(copy.deepcopy(model).to("meta"), example, torch.contiguous_format, "m")


class Skips(nn.Module):
    """The input and an early value are used again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Conv2d(2, 2, 3, padding=1) for _ in range(3))
        self.scale = nn.Parameter(torch.full((2, 1, 1), 0.5))
        self.out = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        early = self.a(x)
        late = F.relu(self.c(self.b(early).relu_()))
        out: Tensor = self.out((late * self.scale + early + x).mean((2, 3)))
        return out


def test_what_skips_a_stage_crosses_every_cut_on_its_way() -> None:
    graph = graph_of(Skips())
    crossing = {graph.names[p]: graph.crossing(p) for p in range(1, len(graph.nodes))}
    assert crossing["b"] == ["x", "a"]
    assert crossing["c"] == ["x", "a", "relu_"]
    assert crossing["scale"] == ["x", "a", "relu"]
    assert crossing["mul"] == ["x", "a", "relu", "scale"]
    assert crossing["out"] == ["mean"]
    cuts = graph.cuts(BATCH)
    image = BATCH * 2 * 8 * 8 * 4
    by_name = dict(zip(graph.names, cuts, strict=False))
    assert (by_name["c"].forward_bytes, by_name["c"].backward_bytes) == (3 * image, 2 * image)  # none for the images
    assert by_name["relu_"].reason == "relu_ changes the output of b in place"
    assert [name for name, cut in by_name.items() if cut.reason] == ["relu_", "mul"]
    assert by_name["mul"].reason == "scale belongs to the layers after it"


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_stages_one_after_the_other_are_the_model(stages: int) -> None:
    model = Skips()
    graph = graph_of(model)
    graph.model = model
    x, end = torch.randn(BATCH, 2, 8, 8), len(graph.nodes)
    valid = [p for p, cut in enumerate(graph.cuts(BATCH)) if cut.reason is None and 0 < p < end]
    expected = model(x)
    for chosen in combinations(valid, stages - 1):
        values: tuple[Tensor, ...] = (x,)
        owned: list[str] = []
        for start, stop in zip([0, *chosen], [*chosen, end], strict=True):
            values = graph.stage(start, stop, training=True)(*values)
            owned += graph.owned(start, stop)
        assert torch.equal(values[0], expected), chosen
        assert sorted(owned) == sorted(name for name, _ in model.named_parameters())


class Several(nn.Module):
    """Takes tokens, a scale that is used at the end, and by name only a mask, which is not needed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.dense, self.out = nn.Embedding(10, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, ids: Tensor, scale: Tensor, *, mask: Tensor | None = None) -> Tensor:
        x = self.dense(self.tokens(ids))
        x = x if mask is None else x * mask.unsqueeze(-1)
        out: Tensor = self.out(x) * scale
        return out


IDS, SCALE = torch.arange(BATCH * 5).view(BATCH, 5) % 10, torch.rand(BATCH, 1, 1)
INPUTS = {
    "tuple": (IDS, SCALE),
    "dict": {"scale": SCALE, "ids": IDS},
    "by name only": {"mask": torch.ones(BATCH, 5), "scale": SCALE, "ids": IDS},
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_a_model_may_have_several_inputs_of_any_type(inputs: Values) -> None:
    model = Several()
    graph = traced_with(model, each(lambda t: t[:1].to("meta"), inputs))
    graph.model = model
    assert graph.sample_bytes == sum(t[0].nbytes for t in tensors(inputs))
    end, expected = len(graph.nodes), call(model, inputs)
    cuts = graph.cuts(BATCH)
    valid = [p for p, cut in enumerate(cuts) if cut.reason is None and 0 < p < end]
    assert len(valid) >= 3
    for position in valid:
        first, second = graph.stage(0, position, training=True), graph.stage(position, end, training=True)
        assert torch.equal(second(*first(*graph.arguments(inputs)))[0], expected)
    after_tokens = cuts[1]  # no gradient for the other inputs, which go on
    assert after_tokens.forward_bytes - after_tokens.backward_bytes == sum(
        t.nbytes for t in tensors(inputs) if t is not IDS
    )


def test_inputs_that_forward_does_not_take_are_refused() -> None:
    example = {"ids": torch.empty(1, 5, dtype=torch.int64, device="meta"), "scale": torch.empty(1, 1, 1, device="meta")}
    with pytest.raises(UsageError, match="its forward takes 2 inputs of a batch that has 3"):
        traced_with(Several(), example | {"labels": example["ids"]})
    with pytest.raises(UsageError, match="missing 1 required positional argument: 'scale'"):
        traced_with(Several(), {"ids": example["ids"]})


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.leave.weight = self.enter.weight
        self.middle, self.again = nn.Linear(8, 8), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x.mean((1, 2)))
        out: Tensor = self.leave(self.again(self.middle(x)))
        return out


class OneStatistic(nn.Module):
    """Two norms that share their running means, and weights that forward changes."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm1, self.norm2 = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        self.norm2.running_mean = self.norm1.running_mean
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x.mean((1, 2))).relu()
        x = self.norm2(self.norm1(F.linear(x, self.dense.weight.detach().mul_(0.5))).relu())
        out: Tensor = self.out(x)
        return out


class Sized(nn.Module):
    """A number and a tuple are on their way from one layer to another."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(32, 3)

    def forward(self, x: Tensor) -> Tensor:
        count = x.size(0)
        x, _ = self.lstm(x.mean(1))
        out: Tensor = self.out(x.reshape(count, -1))
        return out


def test_weights_that_several_layers_use_can_be_on_several_stages() -> None:
    with torch.device("meta"):  # moving it there would give each layer its own weights
        tied = graph_of(Tied())
    assert not any(cut.reason for cut in tied.cuts(BATCH))
    (shared,) = tied.copied()
    assert (shared.names, shared.nodes) == (("enter.weight", "leave.weight"), (1, 4))
    assert tied.owned(0, 3) == ["enter.weight", "middle.weight", "middle.bias"]
    assert tied.owned(4, 5) == ["leave.weight"]


def test_no_cut_divides_what_must_stay_together() -> None:
    with torch.device("meta"):
        graph = graph_of(OneStatistic())
    reasons = {name: cut.reason for name, cut in zip(graph.names, graph.cuts(BATCH), strict=False)}
    words = "dense and dense.weight use the same weights, which forward changes (dense.weight)"
    assert reasons["relu"] == reasons["dense.weight"] == words
    assert reasons["relu_1"] == reasons["norm2"] == "norm1 and norm2 use the same buffer (norm1.running_mean)"
    assert (reasons["dense"], reasons["norm1"], reasons["out"]) == (None, None, None)
    sized = graph_of(Sized())
    reasons = {name: cut.reason for name, cut in zip(sized.names, sized.cuts(BATCH), strict=False)}
    assert reasons["lstm"] == "size returns a value that is not a tensor"
    assert reasons["out"] is None


class Moody(nn.Module):
    """Its dropout is a function, told by `self.training`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x.mean((1, 2)), 0.5, self.training)
        out: Tensor = self.out(x)
        return out


def test_a_stage_evaluates_as_the_model_does_in_evaluation() -> None:
    model = Moody()
    graph = graph_of(model)
    graph.model = model
    x, whole = torch.randn(BATCH, 2, 8, 8), len(graph.nodes)
    assert torch.equal(graph.stage(0, whole, training=False)(x)[0], model.eval()(x))
    torch.manual_seed(0)
    trained = graph.stage(0, whole, training=True)(x)[0]
    torch.manual_seed(0)
    assert torch.equal(trained, model.train()(x))


class Deciding(nn.Module):
    def __init__(self, by: str) -> None:
        super().__init__()
        self.by, self.out, self.other = by, nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.mean((1, 2))
        if (x.sum() > 0) if self.by == "value" else self.training:
            x = x.relu()
        out: Tensor = self.out(x)
        return out


@pytest.mark.parametrize(
    ("model", "words"),
    [(Deciding("value"), "cannot be traced to a graph, .*control flow"),
     (Deciding("mode"), "computes other layers in evaluation than in training"),
     (nn.Bilinear(2, 2, 2), "its forward takes 2 inputs of a batch that has 1")],
    ids=["value", "mode", "inputs"],
)  # fmt: skip
def test_a_model_that_cannot_be_cut_is_refused_in_words(model: nn.Module, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        graph_of(model)


class Normalising(nn.Module):
    """Somebody's own batch normalisation: its statistics are buffers that functions change."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv2d(2, 2, 3), nn.Linear(2, 3)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("var", torch.ones(2))
        self.register_buffer("count", torch.tensor(0))
        self.count: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count.add_(1)
        x = F.batch_norm(self.conv(x), self.mean, self.var, training=self.training)  # type: ignore[arg-type]
        out: Tensor = self.out(x.mean((2, 3)))
        return out


class LayerScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.scale * self.b(self.a(x))
        return out


class WithConstants(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, twice: bool = False) -> Tensor:
        start = torch.zeros(1, x.size(0), 4)
        x, _ = self.lstm(x.mean(1) - torch.tensor([0.5] * 8), (start, start))
        self.last = x = x if mask is None else x * mask
        out: Tensor = self.out(x.mean(1) * torch.tensor(2.0 if self.training else 3.0))
        return out * 2 if twice else out


@pytest.mark.parametrize("model", [Normalising(), LayerScale(), WithConstants()], ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("training", [True, False])
def test_stages_have_the_buffers_and_the_constants_that_they_use(model: nn.Module, training: bool) -> None:
    graph = graph_of(model)
    assert not [name for name in vars(graph.model) if "constant" in name or name == "last"]
    x, end = torch.randn(BATCH, 2, 8, 8), len(graph.nodes)
    valid = [p for p, cut in enumerate(graph.cuts(BATCH)) if cut.reason is None and 0 < p < end]
    assert len(valid) >= 2
    whole = copy.deepcopy(model).train(training)
    expected = whole(x)
    for position in valid:
        graph.model = copy.deepcopy(model).train(training)
        first, second = graph.stage(0, position, training=training), graph.stage(position, end, training=training)
        assert torch.equal(second(*first(x))[0], expected)
        owned = {*graph.owned(0, position), *graph.owned(position, end)}
        assert owned == graph.model.state_dict().keys()
        for name, tensor in whole.state_dict().items():
            assert torch.equal(graph.model.state_dict()[name], tensor), name


def test_what_a_layer_takes_from_the_model_stays_with_it() -> None:
    graph = graph_of(Normalising())
    reasons = {name: cut.reason for name, cut in zip(graph.names, graph.cuts(BATCH), strict=False)}
    assert reasons["batch_norm"] == "mean belongs to the layers after it"
    scaled = graph_of(LayerScale())
    assert scaled.names == ["a", "b", "scale", "mul"]  # not before the layers that it does not need
    assert [cut.reason is None for cut in scaled.cuts(BATCH)] == [True, True, True, False, True]


class Odd(nn.Module):
    """Its forward does this."""

    def __init__(self, does: Any, **attributes: Any) -> None:
        super().__init__()
        self.does, self.out = does, nn.Linear(8, 3)
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.does(self, x.mean((1, 2))))
        return out


@pytest.mark.parametrize(
    ("model", "words"),
    [(Odd(lambda m, x: x + torch.rand(8)), "draws random numbers in Python code"),
     (Odd(lambda m, x: x + torch.empty(8).normal_()), "draws random numbers in Python code"),
     (Odd(lambda m, x: x + torch.rand(8, generator=torch.Generator())), "draws random numbers in Python code"),
     (Odd(lambda m, x: x + F.gumbel_softmax(torch.ones(8))), "draws random numbers in Python code"),
     (Odd(lambda m, x: x if random.random() < 0.5 else -x), "draws random numbers in Python code"),
     (Odd(lambda m, x: torch.zeros(8).add_(x.mean(0)) + x), "add_ changes in place a tensor that forward creates"),
     (Odd(lambda m, x: x + m.a * 2, a=torch.ones(8, device="meta")), "neither a parameter nor a buffer"),
     (Odd(lambda m, x: x.nonsense()), "no attribute 'nonsense'$"),
     (Odd(lambda m, x: x * len(range(x.size(0)))), "an if or a loop")],
    ids=["torch", "method", "generator", "composite", "python", "in place", "attribute", "mistake", "loop"],
)  # fmt: skip
def test_what_a_trace_cannot_hold_is_refused_in_words(model: nn.Module, words: str) -> None:
    state, states = torch.get_rng_state(), random.getstate()
    with pytest.raises(UsageError, match=words):
        graph_of(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == states


def test_random_numbers_for_each_batch_and_those_of_other_threads_do_not_matter() -> None:
    model, done = Odd(lambda m, x: F.dropout(x) + torch.rand_like(x) + x.new_empty(8).normal_()), threading.Event()

    def draw() -> None:
        while not done.is_set():
            torch.rand(100)

    other = threading.Thread(target=draw)
    other.start()
    try:
        assert {"dropout", "rand_like", "normal_"} <= set(graph_of(model).names)
    finally:
        done.set()
        other.join()


def test_a_micro_batch_that_is_too_small_for_the_model_is_refused_in_words() -> None:
    graph = graph_of(Tied())
    with pytest.raises(UsageError) as caught:
        graph.cuts(1)
    assert str(caught.value).startswith("model m fails on a micro-batch of 1 sample: Expected more than 1 value per")
    assert str(caught.value).endswith("; give fewer --microbatches or a larger --batch-size")
    assert "\n" not in str(caught.value)


def sgd(weights: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(weights, 0.1, momentum=0.9)


@pytest.mark.parametrize("name", ["mnist-cnn", "resnet18"])
def test_a_profile_has_the_models_bytes(name: str) -> None:
    with torch.device("meta"):
        model = build(name, (1, 22, 22), 10)
    graph = graph_of(model, (1, 22, 22))
    profile = measure(graph, 2, sgd, 7)
    total = sum(p.numel() for p in model.parameters())
    state = sum(t.nbytes for t in model.state_dict().values() if t.is_floating_point())
    assert sum(node.parameters for node in profile.nodes) == total
    assert sum(node.weight_bytes for node in profile.nodes) == state - sum(
        buffer.nbytes for buffer in model.buffers() if buffer.is_floating_point()
    )
    assert sum(node.gradient_bytes for node in profile.nodes) == sum(n.optimizer_bytes for n in profile.nodes)
    assert all(node.forward > 0 for node in profile.nodes)
    assert all(node.backward > 0 for node in profile.nodes if node.parameters)
    assert (profile.base_bytes, profile.micro_size) == (7, 2)
    without = count(graph, 2)
    assert [node.parameters for node in without.nodes] == [node.parameters for node in profile.nodes]
    assert without.cuts == profile.cuts


@pytest.mark.parametrize("run", [True, False], ids=["measured", "counted"])
def test_a_weight_that_several_stages_have_counts_on_each_of_them_once(run: bool) -> None:
    with torch.device("meta"):
        model = Gpt(2, 2, 16, 8, 50, 0.0)
    graph = graph_of(model, (8,), torch.int64)
    profile = measure(graph, 2, sgd, 0) if run else count(graph, 2)
    total, tokens = sum(p.numel() for p in model.parameters()), model.tokens.weight
    (copied,) = profile.copied
    assert [graph.names[node] for node in copied.nodes] == ["tokens", "tokens.weight"]
    assert (copied.parameters, copied.weight_bytes, copied.gradient_bytes) == (tokens.numel(), *[tokens.nbytes] * 2)
    assert copied.optimizer_bytes == (tokens.nbytes if run else 0)
    after = [graph.names.index(name) + 1 for name in ("blocks.0.add_1", "blocks.1.add_3")]
    for positions in ((), after[:1], after):
        devices = [Device()] * (len(positions) + 1)
        stages = plan_at(profile, positions, devices, "1f1b", 2, None, False, "given").stages
        copies = min(len(stages), 2) - 1
        assert sum(stage.parameters for stage in stages) == total + copies * tokens.numel()
        for what in ("weights", "gradients", "optimizer") if run else ():
            assert sum(stage.memory[what] for stage in stages) == 4 * total + copies * tokens.nbytes
    if run:  # the output layer keeps its weights, and the first stage the positions': they are there anyway
        held = {graph.walk(2).forms[n.name].storage for n in graph.nodes if n.op == "get_attr"}
        assert not any(held & node.kept for node in profile.nodes)


def test_what_a_profile_says_is_kept_for_backward_is_what_autograd_keeps() -> None:
    """The storages that the whole model's forward pass saves, beside those that its nodes are said to keep."""
    model = build("resnet18", (3, 32, 32), 10)
    graph = graph_of(model, (3, 32, 32))
    profile = measure(graph, BATCH, sgd, 0)
    kept = frozenset().union(*(node.kept for node in profile.nodes))
    predicted = sum(profile.storage_bytes[s] for s in kept) + sum(node.internal_bytes for node in profile.nodes)
    saved: dict[int, tuple[int, Tensor]] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        saved[storage.data_ptr()] = (storage.nbytes(), tensor.detach())
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(torch.randn(BATCH, 3, 32, 32))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    measured = sum(size for place, (size, _) in saved.items() if place not in own)
    assert out.requires_grad
    assert predicted == pytest.approx(measured, rel=0.02)


def test_a_graph_is_walked_while_torch_only_infers() -> None:
    graph = graph_of(WithConstants())
    with torch.inference_mode():
        assert graph.walk(BATCH, training=False).forms[graph.output.name].shape == (BATCH, 3)

"""Initial weights are the same whichever part of a model is made; what a constructor sets itself is kept."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.build import build, check, construct
from paceline.models.deferred import Deferred, build_whole, defer, module_seed
from paceline.models.table import TABLE

SEED = 5
DEEP = {
    "vgg19",
    "resnet152",
    "resnet101v2",
    "resnet152v2",
    "gpt-10m",
    "gpt2",
}  # more of the same layers, by the same functions


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def different(got: dict[str, Tensor], real: dict[str, Tensor]) -> list[str]:
    def same(name: str) -> bool:
        return got[name].dtype == real[name].dtype and torch.equal(got[name], real[name])

    return [name for name in real if name not in got or not same(name)]


def check_parts(make: Callable[[], nn.Module], check: Callable[[nn.Module], None] = lambda model: None) -> Deferred:
    """All of it, then some of it; the model has no storage, and torch's random state is left alone."""
    real = state(build_whole(make, SEED, check))
    torch.manual_seed(99)
    before = torch.get_rng_state()
    deferred = defer(make, SEED, check)
    assert all(tensor.is_meta for tensor in state(deferred.model).values())
    assert [(n, t.shape, t.dtype) for n, t in state(deferred.model).items()] == [
        (n, t.shape, t.dtype) for n, t in real.items()
    ]
    values = dict(deferred.values(real))
    assert not different(values, real)
    for value in values.values():
        value.zero_()  # they are the caller's
    some = random.Random(SEED).sample(sorted(real), len(real) // 3)
    assert not different(dict(deferred.values(some)), {name: real[name] for name in some})
    assert torch.equal(torch.get_rng_state(), before)
    return deferred


@pytest.mark.parametrize("name", [name for name in TABLE if name not in DEEP])
def test_parts_of_every_model_of_the_table_start_as_the_whole_does(name: str) -> None:
    size = max(16, TABLE[name].min_size)
    shape = (size,) if TABLE[name].takes == "tokens" else (3, size, size)
    check_parts(lambda: build(name, shape, 10))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "one": lambda: nn.Linear(3, 4),
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "embedding": lambda: nn.Embedding(30, 5, padding_idx=2),
    "norms": lambda: nn.Sequential(nn.LayerNorm(3), nn.GroupNorm(2, 4), nn.InstanceNorm1d(3, True, True), nn.PReLU()),
    "double": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(),
    "channels_last": lambda: nn.Conv2d(3, 4, 3).half().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "frozen": lambda: nn.Sequential(nn.Linear(3, 4).requires_grad_(False), nn.Linear(4, 3)),
    "no parameters": nn.ReLU,
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_torchs_layers_are_initialised_one_by_one(make: Callable[[], nn.Module]) -> None:
    check_parts(make).check()


def test_a_layers_values_are_those_of_its_own_method_with_the_documented_seed() -> None:
    """Written from docs/models-and-data.md, by means of torch alone."""
    import hashlib

    whole = build_whole(lambda: nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Conv2d(3, 4, 3))), SEED)
    layer = nn.Conv2d(3, 4, 3)
    seed = int.from_bytes(hashlib.blake2b(b"5/1.0", digest_size=8).digest(), "little")
    assert seed == module_seed(SEED, "1.0") == 6370699494998273090
    torch.manual_seed(seed)
    layer.reset_parameters()
    assert not different(state(layer), {name[4:]: value for name, value in state(whole).items() if name > "1"})


def test_seeds_and_names_of_layers_give_other_values() -> None:
    def weights(seed: int) -> list[float]:
        model = build_whole(lambda: nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)), seed)
        return [model.get_parameter(name)[0, 0].item() for name in ("0.weight", "1.weight")]

    assert len({*weights(0), *weights(1)}) == 4
    assert weights(0) == weights(0)


class Own(nn.Module):
    """A layer of a user's, with a buffer that its method computes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 4))
        self.register_buffer("scale", torch.zeros(6), persistent=False)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for row in self.weight.data:
            row.normal_()
        self.register_buffer("scale", self.weight.norm(dim=1), persistent=False)


class Biased(nn.Module):
    """Sets biases in the hook for the modules of a model."""

    def __init__(self, apply: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), Own())
        if apply:
            self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.bias, 7)


class Scattered(nn.Module):
    """As torchvision's: the constructor sets values of all modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 4))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 1)


class Gathered(Scattered):
    """The same as docs/models-and-data.md says."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self.init_module)

    def init_module(self, module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, nn.BatchNorm2d | nn.Linear):
            module.reset_parameters()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(7, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
        self.again = self.body[1]
        self.head = nn.Linear(4, 7)
        self.head.weight = self.body.get_parameter("0.weight")
        self.body[2].running_mean = self.body[1].running_mean


@pytest.mark.parametrize("make", [Own, Biased, Gathered, Tied])
def test_layers_hooks_and_shared_weights_of_a_user_are_followed(make: Callable[[], nn.Module]) -> None:
    check_parts(make).check()


def test_the_models_hook_sets_what_it_sets_and_shared_weights_come_from_the_first_layer() -> None:
    biased, tied = build_whole(Biased, SEED), build_whole(Tied, SEED)
    assert (biased.get_parameter("layers.0.bias") > 1).all()
    assert tied.get_parameter("head.weight") is tied.get_parameter("body.0.weight")
    assert tied.get_parameter("head.weight").std() > 0.7  # an Embedding's; a Linear's are below 0.5
    values = dict(defer(Tied, SEED).values(["head.weight", "body.0.weight"]))
    assert torch.equal(values["head.weight"], values["body.0.weight"])


def changed(change: Callable[[Any], object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Own())
        with torch.no_grad():
            change(model)
        return model

    return make


class Half(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight[0])
        nn.init.zeros_(self.bias)


class Distant(nn.Module):
    """The method of a module around others sets their values; that of the model takes no module."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.init_module()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.inner.get_parameter("0.weight"))

    def init_module(self) -> None:
        for layer in self.inner:
            nn.init.normal_(layer.get_parameter("weight"))


class Within(nn.Module):
    """A part of it has a hook of its own, which is not the model's."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Biased()


def init_module(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.ones_(module.bias)


class WithArgument(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.reset_parameters(2.0)

    def reset_parameters(self, value: float = 1.0) -> None:
        nn.init.constant_(self.weight, value)
        nn.init.zeros_(self.bias)


class NeedsArgument(nn.Linear):
    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.weight, self.bias = nn.Parameter(torch.empty(4, 4)), nn.Parameter(torch.empty(4))
        self.reset_parameters(2.0)

    def reset_parameters(self, value: float) -> None:  # type: ignore[override]
        nn.init.constant_(self.weight, value)
        nn.init.zeros_(self.bias)


# Values that a constructor gives otherwise than in hooks of the module that holds them, and which are refused by what.
WHOLE_ONLY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "function": (changed(lambda m: nn.init.orthogonal_(m[0].weight)), r"sets weight of 0 \(Linear\) elsewhere"),
    "method": (changed(lambda m: m[0].bias.fill_(3)), r"sets bias of 0 \(Linear\) elsewhere"),
    "data": (changed(lambda m: m[0].bias.data.fill_(3)), r"sets bias of 0 \(Linear\) elsewhere"),
    "row": (changed(lambda m: m[0].weight[1].fill_(3)), r"sets weight of 0 \(Linear\) elsewhere"),
    "item": (changed(lambda m: m[0].weight.__setitem__(1, 3.0)), r"sets weight of 0 \(Linear\) elsewhere"),
    "operator": (changed(lambda m: m[0].weight.mul_(2)), r"sets weight of 0 \(Linear\) elsewhere"),
    "out": (changed(lambda m: torch.ones(4, out=m[0].bias)), r"sets bias of 0 \(Linear\) elsewhere"),
    "buffer": (changed(lambda m: m[1].running_mean.fill_(3)), r"sets running_mean of 1 \(BatchNorm1d\) elsewhere"),
    "replaced": (changed(lambda m: setattr(m[0], "bias", nn.Parameter(torch.ones(4)))), r"sets bias of 0 \(Linear\)"),
    "loaded": (
        changed(lambda m: m.load_state_dict({name: t * 0 + 2 for name, t in m.state_dict().items()}, strict=False)),
        r"sets weight of 0 \(Linear\) elsewhere; .*; and .* more",
    ),
    "assigned": (
        changed(lambda m: m[0].load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)}, assign=True)),
        r"sets weight of 0 \(Linear\) elsewhere",
    ),
    "copies": (lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 3), "MultiheadAttention"),
    "parametrized": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)), "has no reset_parameters"),
    "list": (lambda: nn.ParameterList([torch.randn(3)]), r"the model \(ParameterList\) holds 0 and has no reset_param"),
    "half": (lambda: Half(4, 4), r"reset_parameters\(\) of the model \(Half\) does not set all of weight"),
    "scattered": (Scattered, r"sets weight of layers.0 \(Conv2d\) elsewhere"),
    "distant": (Distant, r"sets weight of inner.0 \(Linear\) elsewhere"),
    "within": (Within, r"sets bias of part.layers.0 \(Linear\) elsewhere"),
    "function for modules": (lambda: nn.Sequential(nn.Linear(2, 2)).apply(init_module), r"sets bias of 0 \(Linear\)"),
    "takes an argument": (WithArgument, r"the model \(WithArgument\) holds weight and has no reset_parameters\(\)"),
    "needs an argument": (NeedsArgument, r"the model \(NeedsArgument\) holds weight and has no reset_parameters\(\)"),
}


@pytest.mark.parametrize(("make", "says"), WHOLE_ONLY.values(), ids=WHOLE_ONLY)
def test_other_values_of_a_constructor_are_kept_in_the_whole_model_and_refused_in_parts(
    make: Callable[[], nn.Module], says: str
) -> None:
    torch.manual_seed(SEED)
    real = state(make())
    assert not different(state(build_whole(make, SEED)), real) or "Half" in says  # some of whose values nobody sets
    deferred, start = defer(make, SEED), "the model cannot be initialised in parts: "
    with pytest.raises(UsageError, match=f"^{start}.*{says}.*--weights FILE; or use a strategy"):
        refuse(deferred)


def refuse(deferred: Deferred) -> None:
    deferred.check()
    list(deferred.values(deferred.names))


def test_what_comes_from_a_file_need_not_be_initialised() -> None:
    deferred = defer(WHOLE_ONLY["method"][0], SEED)
    deferred.check(given=["0.bias"])
    assert len(dict(deferred.values(deferred.names - {"0.bias"}))) == len(deferred.names) - 1
    with pytest.raises(UsageError, match="bias of 0"):
        list(deferred.values(["0.bias"]))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.randn(3)
        self.layer = nn.Linear(3, 3)


def test_a_tensor_that_is_a_plain_attribute_is_refused_in_parts() -> None:
    torch.manual_seed(SEED)
    assert torch.equal(Plain().scale, build_whole(Plain, SEED).scale)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"scale of the model \(Plain\) is a tensor, but no parameter and no buffer"):
        defer(Plain, SEED).check()


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.convs = nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.dense = nn.LazyLinear(classes)
    def forward(self, x):
        return self.dense(self.convs(x))

def net(classes):
    return Net(classes)

def shares(classes):
    layer = nn.Linear(9, classes)
    layer.weight.detach().numpy()[:] = 1
    return nn.Sequential(nn.Flatten(), layer)

def strange(shape, colour):
    return nn.Linear(9, colour)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deferred_models.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own")
def test_a_users_own_model_is_tried_without_storage_and_left_as_it_was() -> None:
    name, shape = "deferred_models:net", (1, 8, 8)
    deferred = check_parts(
        lambda: construct(name, shape, 3), lambda model: check(name, torch.zeros(2, *shape), (3,), model)
    )
    deferred.check()
    assert deferred.model.training


@pytest.mark.usefixtures("own")
def test_a_model_that_cannot_be_built_without_storage_is_refused_by_its_line() -> None:
    with pytest.raises(UsageError) as error:
        defer(lambda: build("deferred_models:shares", (1, 3, 3), 3), SEED)
    assert "model deferred_models:shares, called with classes=3, failed: " in str(error.value)
    assert "deferred_models.py, line 18" in str(error.value)
    assert "strategies that split a model first build it without storage" in str(error.value)
    layer = build_whole(lambda: build("deferred_models:shares", (1, 3, 3), 3), SEED).get_submodule("1")
    assert (layer.get_parameter("weight") == 1).all()

    def moves() -> nn.Module:
        return nn.Linear(3, 3).cuda()

    with pytest.raises(UsageError, match=r"cannot be built: .*test_deferred.py.*first build it without storage"):
        defer(moves, SEED)


@pytest.mark.usefixtures("own")
def test_a_model_that_is_wrong_in_any_case_is_refused_as_always() -> None:
    with pytest.raises(UsageError) as error:
        defer(lambda: build("deferred_models:strange", (1, 3, 3), 3), SEED)
    assert "colour" in str(error.value)
    assert "storage" not in str(error.value)


def test_ranks_that_are_threads_build_at_the_same_time() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(20, 20) for _ in range(20)))

    real = state(build_whole(make, SEED))
    wrong: dict[int, list[str]] = {}

    def rank(number: int) -> None:
        wrong[number] = different(dict(defer(make, SEED).values(real)), real)
        wrong[number] += different(state(build_whole(make, SEED)), real)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == {number: [] for number in range(4)}


# A process that may have only so much more memory makes none of three layers of 49 MB, then sees them one by one.
MEMORY = """
import resource
import torch
from torch import nn
from paceline.models.deferred import build_whole, defer

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(3500, 3500) for _ in range(3))
        self.small = nn.Linear(2, 2)
        self.apply(self.init_module)
    def init_module(self, module):
        if isinstance(module, nn.Linear):
            nn.init.xavier_normal_(module.weight)

def allow(more):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

torch.set_num_threads(1)
def small():
    layer = nn.Linear(20, 20)
    nn.init.xavier_normal_(layer.weight)  # torch then imports its compiler
    return layer

dict(defer(small, 0).values(["bias"]))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
allow(25_000_000)
deferred = defer(Big, 0)
[(_, small)] = deferred.values(["small.weight"])
allow(130_000_000)
sums = [value.sum().item() for _, value in deferred.values([f"parts.{n}.weight" for n in range(3)])]
fits = True
try:
    Big()
except RuntimeError:
    fits = False
assert not fits, "nothing was measured: a real one fits"
allow(1_000_000_000)
real = build_whole(Big, 0)
assert sums == [part.weight.sum().item() for part in real.parts]
assert torch.equal(small, real.small.weight)
"""


def test_only_wanted_layers_take_memory_and_only_one_at_a_time() -> None:
    assert subprocess.run([sys.executable, "-c", MEMORY], check=False).returncode == 0

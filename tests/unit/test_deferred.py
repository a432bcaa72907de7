"""A model that is built without storage gets exactly the first values that it would have had."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models import draws
from paceline.models.build import build
from paceline.models.deferred import Deferred, defer
from paceline.models.table import TABLE

SEED = 5
DEEP = {"vgg19", "resnet152", "resnet101v2", "resnet152v2"}  # more of the same layers, by the same functions


def state(model: nn.Module) -> dict[str, Tensor]:
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


def really(make: Callable[[], nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(SEED)
    return state(make())


def different(got: dict[str, Tensor], real: dict[str, Tensor]) -> list[str]:
    def same(name: str) -> bool:
        return got[name].dtype == real[name].dtype and torch.equal(got[name], real[name])

    return [name for name in real if name not in got or not same(name)]


def check(make: Callable[[], nn.Module]) -> Deferred:
    """All of it, then some of it; the model has no storage, and torch's random state is left alone."""
    real = really(make)
    torch.manual_seed(99)
    before = torch.get_rng_state()
    deferred = defer(make, SEED)
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
def test_every_model_of_the_table_gets_its_own_first_values(name: str) -> None:
    size = max(16, TABLE[name].min_size)
    check(lambda: build(name, (3, size, size), 10))


class One(nn.Module):
    """A tensor that `fill` fills, between two layers that are drawn before and after it."""

    def __init__(self, fill: Callable[[Tensor], Any], *size: int) -> None:
        super().__init__()
        self.before = nn.Linear(3, 5)
        self.tensor = nn.Parameter(torch.empty(*size or (24, 10)))
        fill(self.tensor)
        self.after = nn.Linear(5, 2)


INITS: dict[str, Callable[[Tensor], Any]] = {
    "kaiming_normal": nn.init.kaiming_normal_,
    "kaiming_uniform": nn.init.kaiming_uniform_,
    "xavier_normal": nn.init.xavier_normal_,
    "xavier_uniform": nn.init.xavier_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "orthogonal of a wide one": lambda tensor: nn.init.orthogonal_(tensor.t(), gain=2),
    "trunc_normal": lambda tensor: nn.init.trunc_normal_(tensor, std=0.5, a=-0.4, b=0.6),
    "trunc_normal far out": lambda tensor: nn.init.trunc_normal_(tensor, a=1.5, b=1.8),
    "sparse": lambda tensor: nn.init.sparse_(tensor, 0.3),
    "eye": nn.init.eye_,
    "dirac": lambda tensor: nn.init.dirac_(tensor.view(6, 4, 10)),
    "normal": lambda tensor: nn.init.normal_(tensor, 1, 2),
    "normal turned": lambda tensor: nn.init.normal_(tensor.t()),
    "few normals": lambda tensor: nn.init.normal_(tensor[0, :7]),
}


@pytest.mark.parametrize("init", INITS.values(), ids=INITS)
def test_torchs_ways_to_initialise_are_followed(init: Callable[[Tensor], Any]) -> None:
    check(lambda: One(lambda tensor: init(tensor.detach().zero_())))


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, 2, bidirectional=True),
    "embedding": lambda: nn.Embedding(30, 5, padding_idx=2),
    "attention": lambda: nn.TransformerEncoderLayer(8, 2, 16),
    "copies": lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16), 3),
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(3, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "double": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).double(),
    "channels_last": lambda: nn.Conv2d(3, 4, 3).half().to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "no parameters": nn.ReLU,
}


@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
def test_torchs_layers_are_followed(make: Callable[[], nn.Module]) -> None:
    check(make)


class Odd(nn.Module):
    """What constructors of users do."""

    def __init__(self) -> None:
        super().__init__()
        self.legacy = nn.Parameter(torch.Tensor(3, 4).uniform_())
        self.array = nn.Parameter(torch.from_numpy(np.arange(6.0)).reshape(2, 3))
        self.file = nn.Parameter(torch.frombuffer(bytearray(np.arange(6.0)), dtype=torch.float64))
        self.tied = self.file
        with torch.no_grad():
            self.legacy[0] = 7
            self.legacy[:, 1].normal_()
            self.array.copy_(torch.from_numpy(np.ones((2, 3))))
            self.array[1] += 2
        drop = torch.linspace(0, 0.5, 5)
        generator = torch.Generator().manual_seed(3)
        for name, tensor in {
            "number": torch.tensor(3),
            "list": torch.tensor([[1.0, 2.0], [3.0, 4.0]]).t(),
            "looked at": torch.tensor([p.item() * 2 for p in drop] + drop.tolist() + [float(drop.numpy().sum())]),
            "whole": torch.randn(40),
            "moved": torch.randn(4, 4, device="cpu").to("cpu").cpu(),
            "mask": torch.randn(30)[torch.randn(30) > 0],
            "rows": torch.eye(3)[torch.tensor([2, 0])],
            "own generator": torch.randn(30, generator=generator) * torch.rand(30, generator=generator),
            "chosen": torch.multinomial(torch.rand(9), 3),
            "counts": torch.poisson(torch.rand(9) * 4),
            "order": torch.randperm(9),
            "coins": torch.rand(20).bernoulli(),
            "dice": torch.randint(1, 7, (20,)),
            "two": torch.normal(torch.zeros(20), torch.rand(20)),
            "complex": torch.randn(20, dtype=torch.complex64),
            "new": drop.new_tensor([1.0, 2.0]) + drop.new(2).fill_(3),
            "triangle": torch.ones(4, 4).tril(),
            "none": torch.randn(0, 3),
            "out": torch.ones(5, out=torch.empty(5)),
        }.items():
            self.register_buffer(name, tensor)
        whole: Any = self.whole
        whole.cpu().add_(1)
        whole.to("cpu").add_(1)
        self.register_buffer("part", whole[::2])
        whole.mul_(2)
        if whole.sum() > 0:
            self.more = nn.Linear(2, 2)
        else:
            self.less = nn.Linear(3, 3)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            self.forked = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(4)
        self.norm(torch.randn(6, 4))
        self.last = nn.Linear(2, 2)


def test_what_constructors_do_otherwise_is_followed() -> None:
    deferred = check(Odd)
    tied = dict(deferred.values(["tied", "file"]))
    assert torch.equal(tied["tied"], torch.arange(6.0, dtype=torch.float64))
    assert torch.equal(tied["file"], tied["tied"])
    assert deferred.model.tied is deferred.model.file


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.randn(3)


def test_a_tensor_that_is_a_plain_attribute_has_values_too() -> None:
    torch.manual_seed(SEED)
    real = nn.Sequential(Plain())
    values = dict(defer(lambda: nn.Sequential(Plain()), SEED).values(["0.scale"]))
    assert torch.equal(values["0.scale"], real[0].scale)  # type: ignore[arg-type]


OWN = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.convs = nn.Sequential(nn.LazyConv2d(4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5), nn.Flatten())
        self.dense = nn.LazyLinear(classes)
        nn.init.trunc_normal_(self.convs[1].weight)
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
    def make() -> nn.Module:
        model = build("deferred_models:net", (1, 8, 8), 3)
        return nn.Sequential(model, nn.Linear(3, 3))  # drawn after the trial, which drops out at random

    check(make)


@pytest.mark.usefixtures("own")
def test_a_model_that_cannot_be_built_without_storage_is_refused_by_its_line() -> None:
    with pytest.raises(UsageError) as error:
        defer(lambda: build("deferred_models:shares", (1, 3, 3), 3), SEED)
    assert "model deferred_models:shares, called with classes=3, failed: ValueError" in str(error.value)
    assert "deferred_models.py, line 19" in str(error.value)
    assert "strategies pipeline and tensor first build a model without storage" in str(error.value)

    def moves() -> nn.Module:
        return nn.Linear(3, 3).cuda()

    with pytest.raises(UsageError, match=r"cannot be built: .*test_deferred.py.*build a model without storage"):
        defer(moves, SEED)


@pytest.mark.usefixtures("own")
def test_a_model_that_is_wrong_in_any_case_is_refused_as_always() -> None:
    with pytest.raises(UsageError) as error:
        defer(lambda: build("deferred_models:strange", (1, 3, 3), 3), SEED)
    assert "colour" in str(error.value)
    assert "storage" not in str(error.value)


def test_values_whose_origin_was_not_seen_are_refused_not_made_up() -> None:
    seen = torch.empty(3, device="meta")

    def make() -> nn.Module:
        layer = nn.Linear(2, 2)
        layer.register_buffer("strange", seen)
        return layer

    deferred = defer(make, SEED)
    assert len(dict(deferred.values(["weight"]))) == 1
    with pytest.raises(UsageError, match="first values of strange cannot be followed"):
        list(deferred.values(["weight", "strange"]))


SIZES = [0, 1, 7, 15, 16, 17, 31, 32, 100, draws.CHUNK - 1, draws.CHUNK, draws.CHUNK + 7, 2 * draws.CHUNK + 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", ["uniform_", "normal_"])
def test_the_generator_goes_past_a_tensor_as_if_it_had_been_drawn(kind: str, dtype: torch.dtype) -> None:
    func = getattr(torch.ops.aten, kind).default
    for size in SIZES:
        torch.manual_seed(SEED)
        torch.randn(3)  # an odd number: the generator keeps the other half of a pair
        start = torch.get_rng_state()
        func(torch.empty(size, dtype=dtype))
        expected = torch.get_rng_state()
        torch.set_rng_state(start)
        blank = torch.empty(size, dtype=dtype, device="meta")
        draws.go_past(func, (blank,), {}, blank)
        assert torch.equal(torch.get_rng_state(), expected), size


def test_ranks_that_are_threads_build_at_the_same_time() -> None:
    def make() -> nn.Module:
        return nn.Sequential(*(nn.Linear(20, 20) for _ in range(20)))

    real = really(make)
    wrong: dict[int, list[str]] = {}

    def rank(number: int) -> None:
        wrong[number] = different(dict(defer(make, SEED).values(real)), real)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == {number: [] for number in range(4)}


# A process that may have only so much more memory makes none of three tensors of 49 MB, then sees them one by one.
MEMORY = """
import resource
import torch
from torch import nn
from paceline.models.deferred import defer

class Big(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ParameterList(torch.empty(3500, 3500) for _ in range(3))
        for part in self.parts:
            nn.init.xavier_normal_(part)
        self.small = nn.Linear(2, 2)

def allow(more):
    resource.setrlimit(resource.RLIMIT_AS, (used + more, resource.RLIM_INFINITY))

torch.set_num_threads(1)
dict(defer(lambda: nn.Linear(20, 20), 0).values(["weight", "bias"]))
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
allow(25_000_000)
deferred = defer(Big, 0)
[(_, small)] = deferred.values(["small.weight"])
allow(130_000_000)
sums = [value.sum().item() for _, value in deferred.values([f"parts.{n}" for n in range(3)])]
fits = True
try:
    Big()
except RuntimeError:
    fits = False
assert not fits, "nothing was measured: a real one fits"
allow(1_000_000_000)
torch.manual_seed(0)
real = Big()
assert sums == [part.sum().item() for part in real.parts]
assert torch.equal(small, real.small.weight)
"""


def test_only_wanted_tensors_take_memory_and_only_one_at_a_time() -> None:
    assert subprocess.run([sys.executable, "-c", MEMORY], check=False).returncode == 0

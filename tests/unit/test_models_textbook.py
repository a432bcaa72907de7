"""The networks against their papers' formulas, written out plainly, in float64: outputs, statistics, gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.comm.single import SingleComm
from paceline.models.build import build
from paceline.strategies.sync_batchnorm import synchronise_batchnorm

Weights = dict[str, Tensor]
VGG = {"vgg16": (2, 2, 3, 3, 3), "vgg19": (2, 2, 4, 4, 4)}
RESNET = {"resnet18": (2, 2, 2, 2), "resnet50": (3, 4, 6, 3), "resnet152": (3, 8, 36, 3)}
RESNET_V2 = {"resnet50v2": (3, 4, 6, 3), "resnet101v2": (3, 4, 23, 3), "resnet152v2": (3, 8, 36, 3)}


def images(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Formulas:
    """Layers by the names of their weights; batch-norm from its definition."""

    def __init__(self, weights: Weights, training: bool, eps: float = 1e-5, momentum: float = 0.1) -> None:
        self.weights, self.training, self.eps, self.momentum = weights, training, eps, momentum

    def conv(self, x: Tensor, name: str, stride: int = 1, padding: int = 0) -> Tensor:
        x = F.pad(x, [padding] * 4)
        return F.conv2d(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"), stride)

    def dense(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weights[f"{name}.weight"].t() + self.weights[f"{name}.bias"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        mean, var = self.weights[f"{name}.running_mean"], self.weights[f"{name}.running_var"]
        if self.training:
            count = x.numel() / x.shape[1]
            old = (1 - self.momentum) * mean, (1 - self.momentum) * var
            mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0)
            self.weights[f"{name}.running_mean"] = old[0] + self.momentum * mean.detach()
            self.weights[f"{name}.running_var"] = old[1] + self.momentum * var.detach() * count / (count - 1)
        normal = (x - mean.view(1, -1, 1, 1)) / (var.view(1, -1, 1, 1) + self.eps).sqrt()
        return normal * self.weights[f"{name}.weight"].view(1, -1, 1, 1) + self.weights[f"{name}.bias"].view(
            1, -1, 1, 1
        )


def mnist(name: str, weights: Weights, x: Tensor, training: bool) -> Tensor:
    """Convolution, ReLU, pooling; dense layers with ReLU between them."""
    net = Formulas(weights, training)
    convolutions, dense = {"mnist-cnn": (3, 3), "shallow-cnn": (2, 2)}[name]
    for i in range(1, convolutions + 1):
        x = F.max_pool2d(F.relu(net.conv(x, f"conv{i}")), 2)
    x = x.flatten(1)
    for i in range(1, dense + 1):
        x = net.dense(x, f"dense{i}")
        x = F.relu(x) if i < dense else x
    return x


def alexnet(name: str, weights: Weights, x: Tensor, training: bool) -> Tensor:
    net = Formulas(weights, training)
    x = F.relu(net.conv(x, "features.0", padding=1) if x.shape[2] < 64 else net.conv(x, "features.0", 4, 2))
    x = F.relu(net.conv(F.max_pool2d(x, 3, 2), "features.3", padding=2))
    x = F.relu(net.conv(F.max_pool2d(x, 3, 2), "features.6", padding=1))
    x = F.relu(net.conv(x, "features.8", padding=1))
    x = F.max_pool2d(F.relu(net.conv(x, "features.10", padding=1)), 3, 2)
    x = F.relu(net.dense(x.flatten(1), "classifier.1"))
    return net.dense(F.relu(net.dense(x, "classifier.4")), "classifier.6")


def vgg(name: str, weights: Weights, x: Tensor, training: bool) -> Tensor:
    net, index = Formulas(weights, training), 0
    for depth in VGG[name]:
        for _ in range(depth):
            x, index = F.relu(net.conv(x, f"features.{index}", padding=1)), index + 2
        x, index = F.max_pool2d(F.pad(x, [0, x.shape[3] % 2, 0, x.shape[2] % 2]), 2), index + 1  # zeros lose to ReLU's
    x = F.relu(net.dense(x.flatten(1), "classifier.0"))
    return net.dense(F.relu(net.dense(x, "classifier.3")), "classifier.6")


def resnet(name: str, weights: Weights, x: Tensor, training: bool) -> Tensor:
    net = Formulas(weights, training)
    if x.shape[2] < 64:
        x = F.relu(net.norm(net.conv(x, "conv1", padding=1), "bn1"))
    else:
        x = F.relu(net.norm(net.conv(x, "conv1", 2, 3), "bn1"))
        x = F.max_pool2d(F.pad(x, [1] * 4), 3, 2)
    for stage, depth in enumerate(RESNET[name], 1):
        for block in range(depth):
            at, stride = f"layer{stage}.{block}", 2 if stage > 1 and block == 0 else 1
            if name == "resnet18":
                y = F.relu(net.norm(net.conv(x, f"{at}.conv1", stride, 1), f"{at}.bn1"))
                y = net.norm(net.conv(y, f"{at}.conv2", padding=1), f"{at}.bn2")
            else:
                y = F.relu(net.norm(net.conv(x, f"{at}.conv1"), f"{at}.bn1"))
                y = F.relu(net.norm(net.conv(y, f"{at}.conv2", stride, 1), f"{at}.bn2"))
                y = net.norm(net.conv(y, f"{at}.conv3"), f"{at}.bn3")
            if x.shape != y.shape:
                x = net.norm(net.conv(x, f"{at}.downsample.0", stride), f"{at}.downsample.1")
            x = F.relu(y + x)
    return net.dense(x.mean((2, 3)), "fc")


def resnet_v2(name: str, weights: Weights, x: Tensor, training: bool) -> Tensor:
    """From Keras' resnet.py: residual_block_v2, stack_residual_blocks_v2."""
    net = Formulas(weights, training, eps=1.001e-5, momentum=0.01)
    if x.shape[2] < 64:
        x = net.conv(x, "conv1", padding=1)
    else:
        x = F.max_pool2d(F.pad(net.conv(x, "conv1", 2, 3), [1] * 4), 3, 2)
    for stage, depth in enumerate(RESNET_V2[name], 1):
        for block in range(depth):
            at, stride = f"stage{stage}.{block}", 2 if stage < 4 and block == depth - 1 else 1
            active = F.relu(net.norm(x, f"{at}.bn1"))
            shortcut = net.conv(active, f"{at}.shortcut") if block == 0 else F.max_pool2d(x, 1, stride)
            y = F.relu(net.norm(net.conv(active, f"{at}.conv1"), f"{at}.bn2"))
            y = F.relu(net.norm(net.conv(y, f"{at}.conv2", stride, 1), f"{at}.bn3"))
            x = shortcut + net.conv(y, f"{at}.conv3")
    return net.dense(F.relu(net.norm(x, "bn")).mean((2, 3)), "fc")


def fresh(name: str, shape: tuple[int, ...]) -> nn.Module:
    """In float64, with batch-norm away from ones and zeros."""
    torch.manual_seed(0)
    model = build(name, shape, 10, dropout=0.0).double()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight.data, module.running_var):
                assert tensor is not None
                tensor.uniform_(0.5, 1.5)
            for tensor in (module.bias.data, module.running_mean):
                assert tensor is not None
                tensor.normal_(0, 0.1)
    return model


def check_same(a: Tensor, b: Tensor, of: str) -> None:
    a, b = a.detach(), b.detach()
    assert torch.allclose(a, b, rtol=1e-8, atol=1e-10 * max(1.0, float(b.abs().max()))), of


CASES: list[tuple[Callable[[str, Weights, Tensor, bool], Tensor], str, tuple[int, ...]]] = [
    *((mnist, name, (4, 1, 28, 28)) for name in ("mnist-cnn", "shallow-cnn")),
    *((alexnet, "alexnet", shape) for shape in ((2, 3, 32, 33), (2, 3, 100, 70))),
    (vgg, "vgg16", (2, 3, 28, 30)),
    *((resnet, "resnet18", shape) for shape in ((4, 3, 16, 17), (2, 3, 64, 65))),
    (resnet, "resnet50", (2, 3, 64, 65)),
    *((resnet_v2, "resnet50v2", shape) for shape in ((4, 3, 16, 17), (2, 3, 64, 65))),
]


@pytest.mark.parametrize(("formula", "name", "shape"), CASES, ids=[f"{name}-{shape[2]}" for _, name, shape in CASES])
def test_outputs_statistics_and_gradients_are_the_papers(
    formula: Callable[[str, Weights, Tensor, bool], Tensor], name: str, shape: tuple[int, ...]
) -> None:
    """In the usual layout it is evaluated, in the one of channels last trained.

    Larger images change how a network begins, whether it is trained or not: most are only trained.
    """
    model, x, labels = fresh(name, shape[1:]), images(*shape), torch.arange(shape[0])
    weights = {key: value.detach().clone() for key, value in model.state_dict().items()}
    if shape[2] < 64 or name == "resnet50":
        with torch.no_grad():
            check_same(model.eval()(x), formula(name, weights, x, False), "output when evaluated")
    learnt = {key: weights[key].requires_grad_() for key, _ in model.named_parameters()}
    model = model.train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    out, expected = model(x), formula(name, weights, x, True)
    check_same(out, expected, "output")
    F.cross_entropy(out, labels).backward()
    F.cross_entropy(expected, labels).backward()
    for key, parameter in model.named_parameters():
        other = learnt[key].grad
        assert parameter.grad is not None
        assert other is not None
        check_same(parameter.grad, other, key)
    for key, buffer in model.named_buffers():
        if not key.endswith("num_batches_tracked"):
            check_same(buffer, weights[key], key)


@pytest.mark.parametrize(
    ("formula", "name"), [(vgg, "vgg19"), (resnet, "resnet152"), (resnet_v2, "resnet101v2"), (resnet_v2, "resnet152v2")]
)
def test_the_deeper_ones_are_the_same_formula(
    formula: Callable[[str, Weights, Tensor, bool], Tensor], name: str
) -> None:
    model, x = fresh(name, (1, 16, 16)).eval(), images(2, 1, 16, 16)
    with torch.no_grad():
        check_same(model(x), formula(name, dict(model.state_dict()), x, False), name)


def test_more_pixels_than_the_classifier_takes_are_averaged() -> None:
    model = fresh("alexnet", (3, 63, 63)).eval()
    features = model.get_submodule("features")(images(1, 3, 63, 63))
    assert features.shape == (1, 256, 7, 7)
    averaged = F.avg_pool2d(features, 2, 1)  # 7 to 6: each of two neighbours
    check_same(model(images(1, 3, 63, 63)), model.get_submodule("classifier")(averaged.flatten(1)), "output")


def test_pre_activations_biases_have_no_gradient_but_the_last() -> None:
    model = fresh("resnet50v2", (3, 16, 16))
    F.cross_entropy(model(images(4, 3, 16, 16)), torch.arange(4)).backward()
    sizes = {key: float(p.grad.abs().max()) for key, p in model.named_parameters() if p.grad is not None}
    convolutions = [key for key in sizes if key.endswith(("conv1.bias", "conv3.bias", "shortcut.bias"))]
    assert len(convolutions) == 1 + 16 + 4
    assert max(sizes[key] for key in convolutions) < 1e-10
    assert sizes["fc.bias"] > 1e-2


@pytest.mark.parametrize("name", ["resnet18", "resnet50v2"])
def test_synchronised_batchnorm_bears_what_is_done_in_place(name: str) -> None:
    plain = fresh(name, (3, 16, 16))
    synchronised = synchronise_batchnorm(copy.deepcopy(plain), SingleComm())
    for model in (plain, synchronised):
        F.cross_entropy(model(images(4, 3, 16, 16)), torch.arange(4)).backward()
    for (key, a), b in zip(plain.named_parameters(), synchronised.parameters(), strict=True):
        assert a.grad is not None
        assert b.grad is not None
        check_same(b.grad, a.grad, key)


def test_names_of_weights_are_torchvisions() -> None:
    def modules(name: str) -> set[str]:
        with torch.device("meta"):
            return {key.rpartition(".")[0] for key in build(name, (3, 224, 224), 10).state_dict()}

    dense = {f"classifier.{i}" for i in (0, 3, 6)}
    assert modules("alexnet") == {f"features.{i}" for i in (0, 3, 6, 8, 10)} | {f"classifier.{i}" for i in (1, 4, 6)}
    assert modules("vgg16") == {f"features.{i}" for i in (0, 2, 5, 7, 10, 12, 14, 17, 19, 21, 24, 26, 28)} | dense
    numbers = (0, 2, 5, 7, 10, 12, 14, 16, 19, 21, 23, 25, 28, 30, 32, 34)
    assert modules("vgg19") == {f"features.{i}" for i in numbers} | dense
    for name, depths in RESNET.items():
        parts = range(1, 3 if name == "resnet18" else 4)
        blocks = {f"layer{stage}.{i}" for stage, depth in enumerate(depths, 1) for i in range(depth)}
        stages = (2, 3, 4) if name == "resnet18" else (1, 2, 3, 4)
        assert modules(name) == (
            {"conv1", "bn1", "fc"}
            | {f"{block}.{part}{i}" for block in blocks for part in ("conv", "bn") for i in parts}
            | {f"layer{stage}.0.downsample.{i}" for stage in stages for i in (0, 1)}
        )


@pytest.mark.parametrize("name", ["vgg16", "resnet18", "resnet50v2"])
def test_first_weights_are_as_the_reference_has_them(name: str) -> None:
    torch.manual_seed(0)
    for module in build(name, (3, 32, 32), 10).modules():
        if not isinstance(module, nn.Conv2d | nn.Linear):
            continue
        weight, fans = module.weight.detach(), module.weight[0].numel() + module.weight[:, 0].numel()
        if name == "resnet50v2":
            assert 0.95 * math.sqrt(6 / fans) < weight.abs().max() <= math.sqrt(6 / fans)
        elif isinstance(module, nn.Conv2d):
            assert float(weight.std()) == pytest.approx(math.sqrt(2 / weight[:, 0].numel()), rel=0.1)
        elif name == "vgg16":
            assert float(weight.std()) == pytest.approx(0.01, rel=0.1)
        if module.bias is not None and name != "resnet18":
            assert not module.bias.any()

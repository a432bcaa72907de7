"""The models: as large as published, equal to the textbook, and refused where they do not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.models.build import build
from paceline.models.table import TABLE, check_fits

MNIST = (1, 28, 28)
CNNS = ["mnist-cnn", "shallow-cnn"]


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("mnist-cnn", 690_590), ("shallow-cnn", 431_080), ("mlp", 28 * 28 * 128 + 128 + 128 * 10 + 10)],
)
def test_the_count_is_the_published_one_and_the_tables(name: str, parameters: int) -> None:
    assert count(build(name, MNIST, 10)) == parameters == TABLE[name].parameters


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(("shape", "classes"), [(MNIST, 10), ((3, 32, 40), 7)])
def test_there_is_one_output_for_each_class(name: str, shape: tuple[int, int, int], classes: int) -> None:
    model = build(name, shape, classes)
    assert model(images(5, *shape)).shape == (5, classes)
    assert model(images(0, *shape)).shape == (0, classes)


def textbook(name: str, weights: dict[str, Tensor], x: Tensor) -> Tensor:
    """Convolution, ReLU, pooling; dense layers with ReLU between them."""
    convolutions, dense = {"mnist-cnn": (3, 3), "shallow-cnn": (2, 2)}[name]
    for i in range(1, convolutions + 1):
        x = F.max_pool2d(F.relu(F.conv2d(x, weights[f"conv{i}.weight"], weights[f"conv{i}.bias"])), 2)
    x = x.flatten(1)
    for i in range(1, dense + 1):
        x = F.linear(x, weights[f"dense{i}.weight"], weights[f"dense{i}.bias"])
        x = F.relu(x) if i < dense else x
    return x


@pytest.mark.parametrize("name", CNNS)
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_outputs_and_gradients_are_those_of_the_textbook_order(name: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model = build(name, MNIST, 10, dropout=0.0).double()
    weights = {key: value.detach().clone().requires_grad_() for key, value in model.named_parameters()}
    model = model.to(memory_format=layout)  # type: ignore[call-overload]
    x, labels = images(4, *MNIST, dtype=torch.float64), torch.arange(4)
    out, expected = model(x), textbook(name, weights, x)
    assert torch.allclose(out, expected, rtol=1e-12, atol=1e-12)
    F.cross_entropy(out, labels).backward()
    F.cross_entropy(expected, labels).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        other = weights[key].grad
        assert other is not None
        assert other.abs().max() > 0
        assert torch.allclose(parameter.grad, other, rtol=1e-12, atol=1e-14), key


@pytest.mark.parametrize("name", CNNS)
@pytest.mark.parametrize("side", [1, 2], ids=["height", "width"])
def test_min_size_is_the_smallest_that_works(name: str, side: int) -> None:
    smallest = TABLE[name].min_size
    fits, small = [1, smallest, smallest], [1, smallest, smallest]
    small[side] -= 1
    check_fits(name, fits)
    model = build(name, fits, 10)
    assert model(images(1, *fits)).shape == (1, 10)
    with pytest.raises(
        UsageError, match=f"{name} needs images of at least {smallest}x{smallest}.*{small[1]}x{small[2]}"
    ):
        check_fits(name, small)
    with pytest.raises(RuntimeError, match="too small"):
        model(images(1, *small))


def test_the_mlp_takes_a_single_pixel() -> None:
    check_fits("mlp", (1, 1, 1))
    assert build("mlp", (1, 1, 1), 2)(images(3, 1, 1, 1)).shape == (3, 2)


def test_the_mlps_hidden_sizes_can_be_set() -> None:
    model = build("mlp", MNIST, 10, hidden=(32, 16))
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in layers] == [(784, 32), (32, 16), (16, 10)]
    x = images(4, *MNIST)
    expected = x.flatten(1)
    for layer in layers[:-1]:
        expected = torch.sigmoid(layer(expected))
    assert torch.allclose(model(x), layers[-1](expected))


@pytest.mark.parametrize("name", TABLE)
def test_dropout_is_applied_in_training_only_and_as_asked_for(name: str) -> None:
    torch.manual_seed(0)
    x = images(4, *MNIST)
    model = build(name, MNIST, 10, dropout=0.5)
    assert not torch.equal(model(x), model(x))
    assert torch.equal(model.eval()(x), model(x))
    model = build(name, MNIST, 10, dropout=0.0)
    assert torch.equal(model(x), model(x))
    model = build(name, MNIST, 10)
    assert torch.equal(model(x), model(x)) == (name != "mnist-cnn")


@pytest.mark.parametrize("name", TABLE)
def test_the_same_random_state_gives_the_same_weights(name: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return build(name, MNIST, 10).state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


def test_an_unknown_model_is_answered_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"unknown model 'mnist_cnn'; did you mean 'mnist-cnn'\?.*shallow-cnn"):
        build("mnist_cnn", MNIST, 10)

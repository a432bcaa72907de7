"""Every model of the table: as large as published, trainable at every size it allows, refused where it does not fit."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.utils.flop_counter import FlopCounterMode

from paceline.errors import UsageError
from paceline.models.build import build
from paceline.models.properties import properties_of
from paceline.models.table import TABLE, check_fits, describe

MNIST = (1, 28, 28)
NAMES = [name for name, info in TABLE.items() if info.takes == "images"]
SMALL = ["mnist-cnn", "shallow-cnn", "mlp"]
LARGE = [name for name in NAMES if name not in SMALL]
FAMILIES = [*SMALL, "alexnet", "vgg16", "resnet18", "resnet50", "resnet50v2"]  # one of each code
V2 = ["resnet50v2", "resnet101v2", "resnet152v2"]
# Trainable parameters; for v2, as Keras counts, with the batch-norm statistics.
PUBLISHED = {
    **{"mnist-cnn": 690_590, "shallow-cnn": 431_080, "mlp": 28 * 28 * 128 + 128 + 128 * 10 + 10},
    **{"alexnet": 61_100_840, "vgg16": 138_357_544, "vgg19": 143_667_240},
    **{"resnet18": 11_689_512, "resnet50": 25_557_032, "resnet152": 60_192_808},
    **{"resnet50v2": 25_613_800, "resnet101v2": 44_675_560, "resnet152v2": 60_380_648},
    # Ours, by hand: embeddings of tokens and positions, blocks of 12 width² + 13 width, the last norm.
    "gpt": (256 + 128) * 128 + 4 * (12 * 128**2 + 13 * 128) + 2 * 128,
    "gpt-10m": (256 + 256) * 384 + 6 * (12 * 384**2 + 13 * 384) + 2 * 384,
    "gpt2": 124_439_808,
}


def images(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(0))


def without_memory(name: str, shape: tuple[int, ...], classes: int = 10) -> nn.Module:
    """The model with shapes only."""
    with torch.device("meta"):
        return build(name, shape, classes)


@pytest.mark.parametrize("name", TABLE)
def test_counts_and_costs_are_the_tables_and_the_published_ones(name: str) -> None:
    info = TABLE[name]
    model = without_memory(name, info.shape, info.classes).eval()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    statistics = sum(b.numel() for key, b in model.named_buffers() if key.endswith(("running_mean", "running_var")))
    assert (parameters, statistics) == (info.parameters, info.statistics)
    assert PUBLISHED[name] == parameters + (statistics if name in V2 else 0)
    with FlopCounterMode(display=False) as counter:
        dtype = torch.int64 if info.takes == "tokens" else torch.float32
        model(torch.zeros(1, *info.shape, dtype=dtype, device="meta"))
    assert f"{counter.get_total_flops() / 2e9:.4g}" == f"{info.gmacs:.4g}"


@pytest.mark.parametrize("name", FAMILIES)
def test_there_is_one_output_for_each_class_even_of_no_image(name: str) -> None:
    model = build(name, (3, 32, 40), 7).eval()
    with torch.no_grad():
        assert model(images(2, 3, 32, 40)).shape == (2, 7)
        assert model(images(0, 3, 32, 40)).shape == (0, 7)


# Deeper ones are built of the same blocks; from 64 pixels on, networks begin in another way.
LEARNING = [(name, size) for name in LARGE for size in (0, 28, 64) if name in FAMILIES or not size]


@pytest.mark.parametrize(("name", "size"), LEARNING)
def test_every_parameter_learns_at_every_size(name: str, size: int) -> None:
    torch.manual_seed(0)
    size = size or TABLE[name].min_size
    model = build(name, (3, size, size), 10)
    F.cross_entropy(model(images(2, 3, size, size)), torch.arange(2)).backward()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all(), key
        without_effect = name in V2 and key.endswith("bias") and isinstance(_owner(model, key), nn.Conv2d)
        assert without_effect or parameter.grad.abs().max() > 0, key


def _owner(model: nn.Module, key: str) -> nn.Module:
    return model.get_submodule(key.rpartition(".")[0])


@pytest.mark.parametrize("size", [0, 31, 33, 63, 64, 65, 127, 225])
@pytest.mark.parametrize("name", ["alexnet", "vgg16", "resnet18", "resnet50v2"])
def test_any_size_from_the_smallest_on_fits_square_or_not(name: str, size: int) -> None:
    size = max(size, TABLE[name].min_size)
    for shape in ((3, size, size), (3, size, size + 33)):
        assert without_memory(name, shape)(torch.zeros(2, *shape, device="meta")).shape == (2, 10)


@pytest.mark.parametrize(("name", "size", "inputs"), [
    *[("vgg16", 16, 512), ("vgg16", 32, 512), ("vgg16", 33, 2048), ("vgg16", 224, 25088), ("vgg16", 300, 25088)],
    *[("alexnet", 15, 256), ("alexnet", 32, 2304), ("alexnet", 63, 9216), ("alexnet", 64, 256)],
    *[("alexnet", 224, 9216), ("alexnet", 300, 9216)],
])  # fmt: skip
def test_small_images_do_not_get_duplicated_features(name: str, size: int, inputs: int) -> None:
    model = without_memory(name, (3, size, size))
    first = next(module for module in model.modules() if isinstance(module, nn.Linear))
    assert first.in_features == inputs


@pytest.mark.parametrize("name", [name for name in FAMILIES if "resnet" in name])
def test_the_stem_is_cifars_under_64_pixels(name: str) -> None:
    for shape, size, grid in [((3, 63, 80), 3, (63, 80)), ((3, 80, 63), 3, (80, 63)), ((3, 64, 80), 7, (16, 20))]:
        model = without_memory(name, shape)
        stem, stage = model.get_submodule("conv1"), model.get_submodule("stage1" if name in V2 else "layer1")
        assert isinstance(stem, nn.Conv2d)
        assert stem.kernel_size == (size, size)
        seen: list[torch.Size] = []
        stage.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0].shape))
        model(torch.zeros(2, *shape, device="meta"))
        assert seen == [(2, 64, *grid)]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "mlp"])
@pytest.mark.parametrize("side", [1, 2], ids=["height", "width"])
def test_images_under_the_smallest_size_are_refused(name: str, side: int) -> None:
    smallest = TABLE[name].min_size
    fits, small = [1, smallest, smallest], [1, smallest, smallest]
    small[side] -= 1
    check_fits(name, fits)
    model = without_memory(name, tuple(fits)).eval()
    assert model(torch.zeros(1, *fits, device="meta")).shape == (1, 10)
    says = f"{name} needs images of at least {smallest}x{smallest}.*{small[1]}x{small[2]}.*--image-size {smallest} "
    with pytest.raises(UsageError, match=says):
        check_fits(name, small)
    if name in ("mnist-cnn", "shallow-cnn", "alexnet"):  # the others pad, and would go on with pixels of padding
        with pytest.raises(RuntimeError, match="too small"):
            model(torch.zeros(1, *small, device="meta"))


def test_samples_that_are_not_images_are_refused_by_models_that_need_images() -> None:
    check_fits("gpt", (128,))
    check_fits("mlp", (8,))
    with pytest.raises(
        UsageError, match=r"model resnet18 takes images \(.*\), but the data set has samples of shape \[8\]"
    ):
        check_fits("resnet18", (8,))


@pytest.mark.parametrize("name", [name for name in FAMILIES if "resnet" in name])
def test_batch_norm_can_learn_from_one_of_the_smallest_images(name: str) -> None:
    size = TABLE[name].min_size
    assert without_memory(name, (3, size, size))(torch.zeros(1, 3, size, size, device="meta")).shape == (1, 10)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        without_memory(name, (3, size - 1, size - 1))(torch.zeros(1, 3, size - 1, size - 1, device="meta"))


@pytest.mark.parametrize("name", ["vgg16", "vgg19"])
def test_the_last_convolutions_see_one_whole_pixel_of_the_smallest_image(name: str) -> None:
    """Strides before them, multiplied, are the smallest size."""
    size = TABLE[name].min_size
    model = without_memory(name, (3, size, size))
    grids: list[torch.Size] = []
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda _, args, out: grids.append(out.shape[2:]))
    model(torch.zeros(2, 3, size, size, device="meta"))
    assert grids[-1] == (1, 1)
    grids.clear()
    model(torch.zeros(2, 3, 2 * size, 2 * size, device="meta"))
    assert grids[-1] == (2, 2)


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


@pytest.mark.parametrize("name", FAMILIES)
def test_dropout_is_applied_in_training_only_and_as_asked_for(name: str) -> None:
    torch.manual_seed(0)
    shape = (1, TABLE[name].min_size, TABLE[name].min_size)
    x = images(4, *shape)
    with torch.no_grad():
        model = build(name, shape, 10, dropout=0.5)
        assert not torch.equal(model(x), model(x))
        assert torch.equal(model.eval()(x), model(x))
        model.train()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        assert torch.equal(model(x), model(x))


@pytest.mark.parametrize("name", NAMES)
def test_dropout_is_the_papers_unless_asked_for(name: str) -> None:
    default = 0.5 if name in ("mnist-cnn", "alexnet", "vgg16", "vgg19") else 0.0
    layers = [module for module in without_memory(name, MNIST).modules() if isinstance(module, nn.Dropout)]
    assert {layer.p for layer in layers} == {default} == {TABLE[name].dropout}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_same_random_state_gives_the_same_weights(name: str) -> None:
    def weights(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return build(name, MNIST, 10).state_dict()

    first, again, other = weights(0), weights(0), weights(1)
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_graph_can_be_traced_to_be_cut(name: str) -> None:
    shape = (1, TABLE[name].min_size, TABLE[name].min_size)
    model = build(name, shape, 10).eval()
    traced = symbolic_trace(model)
    assert len(traced.graph.nodes) > 5
    with torch.no_grad():
        assert torch.equal(traced(images(2, *shape)), model(images(2, *shape)))


def test_an_unknown_model_is_answered_with_the_nearest_and_the_way_to_ones_own() -> None:
    says = r"unknown model 'mnist_cnn'; did you mean 'mnist-cnn'\?.*shallow-cnn.*of your own: FILE.py:function"
    for ask in (describe, lambda name: build(name, MNIST, 10), lambda name: check_fits(name, MNIST)):
        with pytest.raises(UsageError, match=says):
            ask("mnist_cnn")


@pytest.mark.parametrize("name", NAMES)
def test_properties_are_those_of_the_layers(name: str) -> None:
    norm = ["batch-norm"] if "resnet" in name else []
    assert properties_of(without_memory(name, MNIST)) == norm + ["dropout"] * (TABLE[name].dropout > 0)
    with torch.device("meta"):
        assert properties_of(build(name, MNIST, 10, dropout=0.0)) == norm
        assert properties_of(build(name, MNIST, 10, dropout=0.1)) == [*norm, "dropout"]


def test_every_layer_of_torch_that_drops_or_normalises_over_the_batch_counts() -> None:
    for kind in (each for each in vars(nn).values() if isinstance(each, type) and issubclass(each, nn.Module)):
        if "BatchNorm" in kind.__name__ and "Lazy" not in kind.__name__:
            assert properties_of(nn.Sequential(kind(3))) == ["batch-norm"], kind
        elif "Dropout" in kind.__name__:
            assert (properties_of(kind(0.1)), properties_of(kind(0.0))) == (["dropout"], []), kind
    assert properties_of(nn.Sequential(nn.LayerNorm(3), nn.InstanceNorm2d(3), nn.Linear(3, 3))) == []

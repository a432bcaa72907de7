"""All models by name; no torch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from paceline import own_code
from paceline.errors import UsageError, unknown
from paceline.plugins import Table


@dataclass(frozen=True)
class ModelInfo:
    """The description of a model, without building it. `build` is `module:function`, which is called with the shape of
    a sample, the number of classes, `dropout`, and `hidden` if the model has hidden sizes.

    The counts are for samples of `shape` and for `classes`: `parameters` are trainable, `statistics` are the running
    means and variances of batch-norm, `gmacs` are the 10^9 multiply-adds of the forward pass of one sample. For a model
    of tokens, a sample is a block of tokens, and the classes are the vocabulary.
    """

    name: str
    build: str
    parameters: int
    dropout: float
    min_size: int
    about: str
    statistics: int = 0
    gmacs: float = 0.0
    shape: tuple[int, ...] = (3, 224, 224)
    classes: int = 1000
    used_with: str = ""  # the data in published studies of parallel training
    hidden: tuple[int, ...] = ()
    channels_last: bool = True
    takes: str = "images"  # or tokens: the kind of data


_MNIST = (1, 28, 28)
_SHI = "CIFAR-10 (Shi)"
_TORRES = "CIFAR-10 at 128x128 (Torres)"

# fmt: off
_MODELS = (
    ModelInfo("mnist-cnn", "mnist_cnn:build", 690_590, 0.5, 22, "3 convolutions, 3 dense layers (Wang and Yang)",
              0, 0.007666, _MNIST, 10, "MNIST (Wang and Yang)"),
    ModelInfo("shallow-cnn", "shallow_cnn:build", 431_080, 0.0, 16, "2 convolutions, 2 dense layers (Pani et al.)",
              0, 0.002293, _MNIST, 10, "MNIST (Pani et al.)"),
    ModelInfo("mlp", "mlp:build", 101_770, 0.0, 1, "sigmoid layers; sizes by --hidden (Singh)",
              0, 0.0001016, _MNIST, 10, "Fashion-MNIST (Singh)", hidden=(128,)),
    ModelInfo("alexnet", "alexnet:build", 61_100_840, 0.5, 15, "5 convolutions, 3 dense layers (Krizhevsky 2014)",
              0, 0.7142, used_with=_SHI),
    ModelInfo("vgg16", "vgg:build16", 138_357_544, 0.5, 16, "13 convolutions, 3 dense layers (Simonyan et al. 2014)",
              0, 15.47, used_with=_SHI, channels_last=False),
    ModelInfo("vgg19", "vgg:build19", 143_667_240, 0.5, 16, "16 convolutions, 3 dense layers (Simonyan et al. 2014)",
              0, 19.63, used_with=_SHI, channels_last=False),
    ModelInfo("resnet18", "resnet:build18", 11_689_512, 0.0, 9, "residual, 8 blocks of two 3x3 (He et al. 2015)",
              9_600, 1.814, used_with="MNIST (Pani et al.)"),
    ModelInfo("resnet50", "resnet:build50", 25_557_032, 0.0, 9, "residual, 16 bottlenecks, v1.5 (He et al. 2015)",
              53_120, 4.089, used_with="CIFAR-10 (Shi), MNIST (Pani, planned)"),
    ModelInfo("resnet152", "resnet:build152", 60_192_808, 0.0, 9, "residual, 50 bottlenecks, v1.5 (He et al. 2015)",
              151_424, 11.51, used_with=_SHI),
    ModelInfo("resnet50v2", "resnet_v2:build50", 25_568_360, 0.0, 9, "pre-activation, as in Keras (He et al. 2016)",
              45_440, 3.482, used_with=_TORRES),
    ModelInfo("resnet101v2", "resnet_v2:build101", 44_577_896, 0.0, 9, "pre-activation, as in Keras (He et al. 2016)",
              97_664, 7.194, used_with="shown, not trained (Torres)"),
    ModelInfo("resnet152v2", "resnet_v2:build152", 60_236_904, 0.0, 9, "pre-activation, as in Keras (He et al. 2016)",
              143_744, 10.91, used_with=_TORRES),
    ModelInfo("gpt", "gpt:build", 842_496, 0.0, 1, "like GPT-2: 4 layers, 4 heads, width 128",
              0, 0.1216, (128,), 256, channels_last=False, takes="tokens"),
    ModelInfo("gpt-10m", "gpt:build_10m", 10_844_160, 0.0, 1, "like GPT-2: 6 layers, 6 heads, width 384",
              0, 3.045, (256,), 256, channels_last=False, takes="tokens"),
    ModelInfo("gpt2", "gpt:build_gpt2", 124_439_808, 0.0, 1, "transformer, 12 layers, 12 heads (Radford et al. 2019)",
              0, 145.8, (1024,), 50_257, channels_last=False, takes="tokens"),
)
# fmt: on
TABLE = Table("paceline.models", ModelInfo, (replace(info, build=f"paceline.models.{info.build}") for info in _MODELS))


def describe(name: str) -> ModelInfo | None:
    """The model's entry; None for a user's own; otherwise an error that suggests the nearest name."""
    if name in TABLE:
        return TABLE[name]
    if not own_code.is_own(name):
        raise UsageError(f"{unknown('model', name, TABLE)}, or a function of your own: {own_code.FORMS}")
    return None


def check_fits(name: str, shape: Sequence[int]) -> None:
    """Refuse samples of a shape that the model's layers do not take; a user's own model is not checked."""
    info = describe(name)
    size = info.min_size if info else 1
    if size > 1 and len(shape) != 3:
        raise UsageError(
            f"model {name} takes images (channels, height, width), but the data set has samples of shape "
            f"{list(shape)}; choose another model (paceline models)"
        )
    if len(shape) == 3 and min(shape[1:]) < size:
        raise UsageError(
            f"model {name} needs images of at least {size}x{size} pixels, but these are {shape[1]}x{shape[2]}; "
            f"enlarge them (--image-size {size} or more) or choose another model (paceline models)"
        )

"""The models by name; this file is read before torch is."""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.errors import UsageError, unknown


@dataclass(frozen=True)
class ModelInfo:
    """What is known of a model without building it. `build` is `module:function` under paceline.models."""

    name: str
    build: str
    parameters: int
    dropout: float
    min_size: int
    about: str
    hidden: tuple[int, ...] = ()


TABLE = {
    info.name: info
    for info in (
        ModelInfo("mnist-cnn", "mnist_cnn:build", 690_590, 0.5, 22, "3 convolutions, 3 dense layers (Wang and Yang)"),
        ModelInfo("shallow-cnn", "shallow_cnn:build", 431_080, 0.0, 16, "2 convolutions, 2 dense layers (Pani et al.)"),
        ModelInfo("mlp", "mlp:build", 101_770, 0.0, 1, "sigmoid layers; sizes by --hidden (Singh)", hidden=(128,)),
    )
}


def describe(name: str) -> ModelInfo:
    """The model's entry, or an error that names the nearest one."""
    if name not in TABLE:
        raise unknown("model", name, TABLE)
    return TABLE[name]


def check_fits(name: str, shape: Sequence[int]) -> None:
    """Refuse images that the model's convolutions would shrink to nothing."""
    smallest = describe(name).min_size
    if min(shape[1:]) < smallest:
        raise UsageError(
            f"model {name} needs images of at least {smallest}x{smallest} pixels, and these are "
            f"{shape[1]}x{shape[2]}; choose other data or another model (paceline models)"
        )

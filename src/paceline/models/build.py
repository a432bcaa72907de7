"""Builds a model from the table, or a user's own, which is tried out before training."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline import own_code
from paceline.errors import UsageError
from paceline.models.table import describe


def build(
    name: str,
    shape: Sequence[int],
    classes: int,
    dropout: float | None = None,
    hidden: Sequence[int] | None = None,
) -> nn.Module:
    """The model for images of `shape` (channels, height, width), initialised from torch's current random state."""
    model = construct(name, shape, classes, dropout, hidden)
    check(name, shape, classes, model)
    return model


def construct(
    name: str,
    shape: Sequence[int],
    classes: int,
    dropout: float | None = None,
    hidden: Sequence[int] | None = None,
) -> nn.Module:
    """The model as its constructor leaves it."""
    info = describe(name)
    if info is None:
        return _own(name, tuple(shape), classes, dropout)
    module, function = info.build.split(":")
    make = cast(Callable[..., nn.Module], getattr(importlib.import_module(module), function))
    options: dict[str, object] = {"dropout": info.dropout if dropout is None else dropout}
    if info.hidden:
        options["hidden"] = tuple(hidden or info.hidden)
    return make(tuple(shape), classes, **options)


def _own(name: str, shape: tuple[int, ...], classes: int, dropout: float | None) -> nn.Module:
    """A user's model; its function is called with those of the offered values that its signature names."""
    offered: dict[str, object] = {"shape": shape, "channels": shape[0], "image_size": shape[1]}
    offered |= {"classes": classes, "num_classes": classes}
    if dropout is not None:
        if "dropout" not in own_code.parameters(name, "model"):
            raise UsageError(
                f"--dropout {dropout}: model {name} has no parameter `dropout`; leave the option out, or use "
                f"a function that has it"
            )
        offered["dropout"] = dropout
    model = own_code.call(name, "model", offered)
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"an object of type {type(model).__name__}"
        raise UsageError(f"model {name} returned {what} instead of a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(f"model {name} has nothing to train: no parameter with requires_grad")
    return model


def check(name: str, shape: Sequence[int], classes: int, model: nn.Module) -> None:
    """Refuse a user's model that does not take two black images in evaluation and in training; leave no trace in it."""
    if describe(name):
        return
    like = next(model.parameters())
    images = torch.zeros(2, *shape, device=like.device, dtype=like.dtype)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _forward(name, model.eval(), images, classes)
        before = [buffer.clone() for buffer in model.buffers()]
        _forward(name, model.train(), images, classes)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def _forward(name: str, model: nn.Module, images: Tensor, classes: int) -> None:
    mode = "training" if model.training else "evaluation"
    try:
        out: Any = model(images)
    except Exception as error:
        if images.is_meta and (isinstance(error, NotImplementedError) or "on meta tensors" in str(error)):
            return  # its code looks at values, which are not there yet: that is no fault of it
        raise UsageError(
            f"model {name}, in {mode}, fails on images of shape {list(images.shape)}: {own_code.reason(error, model)}"
        ) from error
    expected = f"a floating-point tensor of shape [{len(images)}, {classes}] is expected for {len(images)} images"
    if not isinstance(out, Tensor):
        raise UsageError(f"model {name}, in {mode}, returned an object of type {type(out).__name__}; {expected}")
    if out.dim() == 2 and len(out) == len(images) and out.shape[1] != classes:
        raise UsageError(
            f"model {name} returned {out.shape[1]} numbers per image, but the data set has {classes} classes: use the "
            f"parameter classes or num_classes for the size of its last layer"
        )
    if out.shape != (len(images), classes) or not out.is_floating_point():
        dtype = str(out.dtype).removeprefix("torch.")
        raise UsageError(
            f"model {name}, in {mode}, returned a tensor of {dtype} and shape {list(out.shape)}; {expected}"
        )

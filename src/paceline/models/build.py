"""Builds a model from the table, or a user's own, which is tried out before training."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from paceline import own_code
from paceline.data.batch import Values, call, each, tensors
from paceline.errors import UsageError
from paceline.models.table import describe


def build(
    name: str,
    shape: Sequence[int],
    classes: int,
    dropout: float | None = None,
    hidden: Sequence[int] | None = None,
) -> nn.Module:
    """The model for images of `shape` (channels, height, width), or of the kind that a model of the table takes,
    initialised from torch's current random state."""
    model = construct(name, shape, classes, dropout, hidden)
    check(name, torch.zeros(2, *shape), (classes,), model)
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
    offered: dict[str, object] = {"shape": shape}
    if len(shape) == 3:
        offered |= {"channels": shape[0], "image_size": shape[1]}
    if len(shape) == 1:
        offered |= {"block": shape[0], "vocabulary": classes}
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


def check(name: str, inputs: Values, output: Sequence[int] | None, model: nn.Module, *, fitting: bool = True) -> None:
    """Refuse a model that does not take a batch like `inputs` in evaluation and in training; one of ours only if it is
    not known to fit the data.

    Floating-point inputs are converted to the type of the model's weights. `output` is the expected shape of the output
    for one sample, whose last number are the classes; None if the output may be anything. The model stays as it was.
    """
    if describe(name) and fitting:
        return
    like = next(model.parameters())
    inputs = each(lambda t: t.to(like.device, like.dtype if t.is_floating_point() else t.dtype), inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        _forward(name, model.eval(), inputs, output)
        before = [buffer.clone() for buffer in model.buffers()]
        _forward(name, model.train(), inputs, output)
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)


def _forward(name: str, model: nn.Module, inputs: Values, output: Sequence[int] | None) -> None:
    mode, given = "training" if model.training else "evaluation", tensors(inputs)
    try:
        out: Any = call(model, inputs)
    except Exception as error:
        if given[0].is_meta and (isinstance(error, NotImplementedError) or "on meta tensors" in str(error)):
            return  # its code looks at values, which are not there yet: that is no fault of it
        shapes = ", ".join(str(list(t.shape)) for t in given)
        raise UsageError(
            f"model {name}, in {mode}, fails on inputs of shape {shapes}: {own_code.reason(error, model)}"
        ) from error
    if output is None:
        return
    shape = (len(given[0]), *output)
    expected = f"a floating-point tensor of shape {list(shape)} is expected for {shape[0]} samples"
    if not isinstance(out, Tensor):
        raise UsageError(f"model {name}, in {mode}, returned an object of type {type(out).__name__}; {expected}")
    if out.shape[:-1] == shape[:-1] and out.shape[-1] != shape[-1]:
        raise UsageError(
            f"model {name} returned {out.shape[-1]} numbers instead of {shape[-1]}, the number of classes in the data "
            f"set: use the parameter classes or num_classes for the size of its last layer"
        )
    if out.shape != shape or not out.is_floating_point():
        dtype = str(out.dtype).removeprefix("torch.")
        raise UsageError(
            f"model {name}, in {mode}, returned a tensor of {dtype} and shape {list(out.shape)}; {expected}"
        )

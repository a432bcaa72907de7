"""Training as the documentation describes it, in one plain loop in float64: what every strategy has to train.

It imports nothing of Paceline. Order of samples, learning rate, batch-norm and micro-batches are written from
docs/data-parallel.md and docs/model-parallel.md; Adam, AdamW and SGD from their papers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor, nn


@dataclass(frozen=True)
class Recipe:
    """Options by their names on the command line; `replicas` are whole models, each with its part of a batch.

    `parts` says how many parts each step's batch has, where these are not the replicas: some have been lost.
    """

    batch_size: int
    epochs: int
    optimizer: str = "adam"
    lr: float = 0.001
    momentum: float = 0.9
    weight_decay: float = 0.0
    scale_lr: bool = True
    warmup_epochs: float | None = None
    warmup_steps: int | None = None
    decay: str = "cosine"
    decay_every: float = 1.0
    decay_factor: float = 0.1
    normalize: bool = False
    sync_batchnorm: bool = False
    microbatches: int = 1
    clip_norm: float | None = None
    replicas: int = 1
    parts: tuple[int, ...] = ()
    seed: int = 0


@dataclass(frozen=True)
class Trained:
    steps: int
    weights: dict[str, Tensor]  # and buffers
    train_loss: list[float]  # the mean of each epoch
    test_loss: float
    test_accuracy: float


@dataclass(frozen=True)
class Data:
    """Images [n, channels, height, width] of bytes, and their classes."""

    train: NDArray[Any]
    train_labels: NDArray[Any]
    test: NDArray[Any]
    test_labels: NDArray[Any]


def train(model: nn.Module, start: Path, data: Data, recipe: Recipe) -> Trained:
    """Train the model, from the weights in the file `start`."""
    model = model.double().train()
    model.load_state_dict(load_file(start))
    images, test = _floats(data, normalize=recipe.normalize)
    labels = torch.from_numpy(data.train_labels).long()
    update = partial(_sgd, momentum=recipe.momentum) if recipe.optimizer == "sgd" else _adam
    kept: dict[nn.Parameter, dict[str, Tensor]] = {}
    samples, batch = len(labels), recipe.batch_size * recipe.replicas
    steps = math.ceil(samples / batch)
    losses = []
    for epoch in range(recipe.epochs):
        order = np.random.default_rng([recipe.seed, 0, epoch]).permutation(samples)
        loss_sum = 0.0
        for step in range(steps):
            chosen = torch.from_numpy(order[step * batch : (step + 1) * batch])
            model.zero_grad()
            done = epoch * steps + step
            parts = recipe.parts[done] if recipe.parts else recipe.replicas
            loss_sum += _gradients(model, images[chosen], labels[chosen], parts, recipe)
            if recipe.clip_norm:
                nn.utils.clip_grad_norm_(model.parameters(), recipe.clip_norm)
            lr = _rate(recipe, done, steps)
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        penalty = recipe.weight_decay * p
                        if recipe.optimizer == "adamw":  # Loshchilov and Hutter 2019: not part of the gradient
                            p.sub_(lr * penalty)
                            penalty = torch.zeros_like(p)
                        update(p, p.grad + penalty, kept.setdefault(p, {}), lr)
        losses.append(loss_sum / samples)
    with torch.no_grad():
        out = model.eval()(test.clone())
    expected = torch.from_numpy(data.test_labels).long()
    hits = (out.argmax(1) == expected).double().mean().item()
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return Trained(recipe.epochs * steps, state, losses, F.cross_entropy(out, expected).item(), hits)


def _floats(data: Data, *, normalize: bool) -> tuple[Tensor, Tensor]:
    """Bytes become 0 to 1; then each channel has mean 0 and deviation 1 over the training set, if asked for."""
    train, test = (torch.from_numpy(images).double() / 255 for images in (data.train, data.test))
    if not normalize:
        return train, test
    mean = train.mean((0, 2, 3), keepdim=True)
    deviation = train.std((0, 2, 3), keepdim=True, correction=0)
    return (train - mean) / deviation, (test - mean) / deviation


def _gradients(model: nn.Module, images: Tensor, labels: Tensor, parts: int, recipe: Recipe) -> float:
    """Leave the gradient of the batch's mean loss in `.grad`; the summed loss.

    Every replica normalises its own part and starts from the same running statistics, which then move by the mean of
    the replicas' changes, weighted by their samples. Batches are counted as one process would.
    """
    parts = 1 if recipe.sync_batchnorm else parts
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    changes: list[tuple[float, dict[str, Tensor]]] = []
    loss_sum = 0.0
    for own_images, own_labels in zip(_divide(images, parts), _divide(labels, parts), strict=True):
        if not len(own_labels):
            continue
        for name, buffer in model.named_buffers():
            buffer.copy_(before[name])
        micros = _micro_batches(len(own_labels), recipe)
        for micro_images, micro_labels in zip(_divide(own_images, micros), _divide(own_labels, micros), strict=True):
            loss = F.cross_entropy(model(micro_images.clone()), micro_labels, reduction="sum")
            (loss / len(labels)).backward()
            loss_sum += loss.item()
        moved = {name: buffer - before[name] for name, buffer in model.named_buffers()}
        changes.append((len(own_labels) / len(labels), moved))
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(before[name] + sum(weight * moved[name] for weight, moved in changes))
        else:
            buffer.copy_(before[name] + max(moved[name] for _, moved in changes))
    return loss_sum


def _divide(values: Tensor, parts: int) -> list[Tensor]:
    """Part i of n samples over N parts is samples n·i ÷ N to n·(i + 1) ÷ N, rounded down."""
    return [values[len(values) * i // parts : len(values) * (i + 1) // parts] for i in range(parts)]


def _micro_batches(count: int, recipe: Recipe) -> int:
    """As many as asked for; of a smaller last batch as many as are needed for none to be larger than usual."""
    if recipe.microbatches == 1 or count == recipe.batch_size:
        return recipe.microbatches
    return math.ceil(count / math.ceil(recipe.batch_size / recipe.microbatches))


def _rate(recipe: Recipe, step: int, steps_per_epoch: int) -> float:
    """From one replica's rate to N times that over the warm-up, or from zero to the rate that is not scaled; then down
    to zero at the end, or by a factor every few epochs.
    """
    scale = recipe.replicas if recipe.scale_lr else 1
    epochs = (1.0 if scale > 1 else 0.0) if recipe.warmup_epochs is None else recipe.warmup_epochs
    warmup = round(epochs * steps_per_epoch) if recipe.warmup_steps is None else recipe.warmup_steps
    if step < warmup:
        return recipe.lr * (1 + (scale - 1) * step / warmup if scale > 1 else (step + 1) / (warmup + 1))
    part = (step - warmup) / (recipe.epochs * steps_per_epoch - warmup)
    falls = {"none": 1.0, "cosine": (1 + math.cos(math.pi * part)) / 2, "linear": 1 - part,
             "step": recipe.decay_factor ** (step // round(recipe.decay_every * steps_per_epoch))}  # fmt: skip
    return recipe.lr * scale * falls[recipe.decay]


def _adam(weight: Tensor, gradient: Tensor, kept: dict[str, Tensor], lr: float) -> None:
    """Kingma and Ba 2015, algorithm 1, with the constants of the paper."""
    zero = torch.zeros_like(weight)
    t = kept["t"] = kept.get("t", torch.tensor(0.0, dtype=torch.float64)) + 1
    m = kept["m"] = 0.9 * kept.get("m", zero) + 0.1 * gradient
    v = kept["v"] = 0.999 * kept.get("v", zero) + 0.001 * gradient**2
    weight -= lr * (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)


def _sgd(weight: Tensor, gradient: Tensor, kept: dict[str, Tensor], lr: float, momentum: float) -> None:
    """Momentum as in PyTorch: the velocity is a decaying sum of gradients, and the rate multiplies it."""
    velocity = kept["velocity"] = momentum * kept.get("velocity", torch.zeros_like(weight)) + gradient
    weight -= lr * velocity

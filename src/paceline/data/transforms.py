"""Prepares batches for a model: conversion to its dtype; of images also random crops, normalisation, resizing."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.data.batch import Values, each

_AUGMENT = 2  # a random stream besides the sampler's _SHUFFLE and _HOLD_OUT
_SHIFT = 8  # images are shifted by up to an eighth of their size


class Prepare:
    """Copies batches to the model's device: floating-point numbers in its dtype, whole numbers as int64."""

    def __init__(self, dtype: torch.dtype, device: torch.device, *, size: tuple[int, int] | None = None) -> None:
        self.dtype, self.device, self.size = dtype, device, size

    def train(self, inputs: Values, epoch: int, numbers: Tensor) -> Values:
        """Inputs for training; `numbers` are the samples' numbers in the training set."""
        return self.test(inputs)

    def test(self, inputs: Values) -> Values:
        """Inputs for evaluation."""
        return each(self._converted, inputs)

    def targets(self, targets: Values) -> Values:
        return each(self._converted, targets)

    def _converted(self, tensor: Tensor) -> Tensor:
        whole = tensor.dtype if tensor.dtype == torch.bool else torch.int64
        return tensor.to(self.device, self.dtype if tensor.is_floating_point() else whole, copy=True)


class PrepareImages(Prepare):
    """Makes batches of floats in the model's dtype and memory layout, on its device.

    Bytes become 0 to 1, floats do not change; then, if given, each channel's mean is subtracted and its deviation
    divided by. Images are resized last, so that everything before works on the small ones.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        layout: torch.memory_format = torch.channels_last,
        size: tuple[int, int] | None = None,
        normal: tuple[tuple[float, ...], tuple[float, ...]] | None = None,
        augment: str = "none",
        seed: int = 0,
    ) -> None:
        super().__init__(dtype, device, size=size)
        self.layout, self.augment, self.seed = layout, augment, seed
        self._normal = None
        if normal:
            mean, deviation = (torch.tensor(each, dtype=torch.float64).view(1, -1, 1, 1) for each in normal)
            self._normal = (mean, deviation)

    def train(self, images: Tensor, epoch: int, numbers: Tensor) -> Tensor:
        """Augmented images for training; `numbers`, the samples' numbers in the training set, seed the augmentation."""
        if self.augment != "none" and len(images):
            images = shifted(images, draws(self.seed, epoch, numbers), mirror=self.augment == "crop-flip")
        return self.test(images)

    def test(self, images: Tensor) -> Tensor:
        """Images without augmentation."""
        unit = 1 / 255 if images.dtype == torch.uint8 else 1.0
        floats = images.to(self.device).to(self.dtype, memory_format=self.layout, copy=True)
        if self._normal:
            mean, deviation = self._normal
            floats.mul_((unit / deviation).to(floats)).sub_((mean / deviation).to(floats))
        elif unit != 1.0:
            floats.mul_(unit)
        if self.size is None or self.size == tuple(floats.shape[2:]):
            return floats
        smaller = self.size[0] < floats.shape[2] or self.size[1] < floats.shape[3]
        return F.interpolate(floats, self.size, mode="bilinear", antialias=smaller)


class PrepareTargets(Prepare):
    """For batches without inputs."""

    def test(self, inputs: Values) -> Values:
        return inputs


def draws(seed: int, epoch: int, numbers: Tensor) -> Tensor:
    """64 random bits for each sample, which depend only on its number, the epoch and the seed: equal on every rank.

    The mixing function is that of splitmix64 (Steele, Lea and Flood 2014); its state is a key plus the sample's number.
    """
    key = np.random.SeedSequence([seed, _AUGMENT, epoch]).generate_state(1, np.uint64)
    z = numbers.numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return torch.from_numpy((z ^ (z >> np.uint64(31))).view(np.int64))


def shifted(images: Tensor, bits: Tensor, *, mirror: bool) -> Tensor:
    """A random crop of each image, padded with black; with `mirror`, half of them are mirrored."""
    count, channels, height, width = images.shape
    down, right = height // _SHIFT, width // _SHIFT
    padded = F.pad(images, (right, right, down, down))
    n, c, y, x = padded.stride()
    # A view of every possible crop; selecting one per image copies only that one.
    crops = padded.as_strided((count, 2 * down + 1, 2 * right + 1, channels, height, width), (n, y, x, c, y, x))
    picked = crops[torch.arange(count), (bits & 0xFFFFF) % (2 * down + 1), (bits >> 20 & 0xFFFFF) % (2 * right + 1)]
    return torch.where((bits >> 40 & 1).bool().view(-1, 1, 1, 1), picked.flip(3), picked) if mirror else picked

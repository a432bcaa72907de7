"""The devices that can be emulated, with the published figures for them; no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from paceline.errors import UsageError, unknown
from paceline.models import table as models

REAL = "real"
PREFIX = "emulated:"
MOST_SECONDS = 3600.0
# For one image: a forward pass, and a backward pass, which costs twice as much; a multiply-add is two operations.
TRAINING_FLOPS_PER_MAC = 2 * 3


@dataclass(frozen=True)
class Device:
    """How fast a device trains: images per second by model, at 224x224 pixels, or operations per second."""

    name: str
    about: str
    source: str
    url: str
    images: Mapping[str, float] = field(default_factory=dict)
    flops: float = 0.0


_PAGE = "TensorFlow, Benchmarks, May 2017: one GPU, synthetic ImageNet data, update included"
_PAGE_URL = "https://www.tensorflow.org/performance/benchmarks"
_DEVICES = (
    Device(
        "k80",
        "NVIDIA Tesla K80, one of the board's two GPUs, on Google Compute Engine",
        _PAGE,
        _PAGE_URL,
        {"alexnet": 656, "vgg16": 35.4, "resnet50": 51.9, "resnet152": 20.0},
    ),
    Device(
        "p100",
        "NVIDIA Tesla P100 of a DGX-1",
        _PAGE,
        _PAGE_URL,
        {"alexnet": 2987, "vgg16": 154, "resnet50": 219, "resnet152": 91.8},
    ),
    Device(
        "v100",
        "NVIDIA Tesla V100 with tensor cores, mixed precision",
        "NVIDIA, Volta Tensor Core GPU Achieves New AI Performance Milestones, 2018: one GPU",
        "https://developer.nvidia.com/blog/tensor-core-ai-performance-milestones/",
        {"resnet50": 1075},
    ),
    Device(
        "gtx1660ti",
        "NVIDIA GeForce GTX 1660 Ti: half of its peak",
        "TechPowerUp, EVGA GTX 1660 XC Ultra Review, 2019: 1536 cores at 1.77 GHz, so 5.4 TFLOP/s; that half of it is "
        "used is our assumption: the P100's 219 images/s of ResNet-50 are half of its 10.6 TFLOP/s",
        "https://www.techpowerup.com/review/evga-gtx-1660-xc-ultra/2.html",
        flops=1536 * 2 * 1.77e9 / 2,
    ),
)
TABLE = {device.name: device for device in _DEVICES}


@dataclass(frozen=True)
class Asked:
    """The value of `--compute emulated:…`, one of: seconds per batch, a device, an earlier run."""

    seconds: float | None = None
    device: Device | None = None
    folder: Path | None = None


@dataclass(frozen=True)
class Estimate:
    """A device's time for one image, forward and backward, and its derivation: `derived` if not for this very model."""

    seconds: float
    how: str
    derived: bool = False


def read(compute: str) -> Asked | None:
    """Parse `--compute`; None if compute is real."""
    if compute == REAL:
        return None
    given = compute.removeprefix(PREFIX)
    if not compute.startswith(PREFIX) or not given:
        raise UsageError(f"--compute {compute!r}: use {_allowed()}")
    if given in TABLE:
        return Asked(device=TABLE[given])
    try:
        seconds = float(given)
    except ValueError:
        return Asked(folder=_folder(given))
    if not (math.isfinite(seconds) and 0 <= seconds <= MOST_SECONDS):
        raise UsageError(f"--compute {compute}: a batch can take 0 to {MOST_SECONDS:g} seconds")
    return Asked(seconds=seconds)


def _folder(given: str) -> Path:
    path = Path(given)
    if "\0" not in given and path.is_dir():
        return path
    if given[:1].isdigit():
        raise UsageError(f"--compute {PREFIX}{given}: seconds are a number without a unit, such as {PREFIX}0.5")
    if "/" in given:
        raise UsageError(f"--compute {PREFIX}{given}: there is no such run folder")
    raise UsageError(f"--compute: {unknown('device', given, TABLE)}; allowed is {_allowed()}")


def _allowed() -> str:
    kinds = ("SECONDS (of one batch)", "DEVICE (see paceline models --devices)", "RUN_FOLDER (of a completed run)")
    return f"{REAL}, " + " or ".join(PREFIX + kind for kind in kinds)


def estimate(device: Device, model: str, macs: float) -> Estimate:
    """The device's time for one image of a model whose forward pass has `macs` multiply-adds.

    A figure for the same model at another size, or for another model, is scaled by the multiply-adds.
    """
    if device.flops:
        seconds = TRAINING_FLOPS_PER_MAC * macs / device.flops
        return Estimate(seconds, f"{macs / 1e9:.3g} GFLOPs at {device.flops / 1e12:.2g} TFLOP/s", derived=True)
    reference = _reference(device, model, macs)
    figure, published = device.images[reference], models.TABLE[reference].gmacs * 1e9
    # Another number of classes changes only the last layer, which is negligible.
    if model == reference and abs(macs / published - 1) < 0.01:
        return Estimate(1 / figure, f"{model}: {figure:g} images/s")
    return Estimate(
        macs / published / figure,
        f"derived from {reference}'s {figure:g} images/s at 224x224 pixels by FLOPs",
        derived=True,
    )


def _reference(device: Device, model: str, macs: float) -> str:
    """The model whose figure is scaled: this one, one of its family, or resnet50; of several, the nearest in cost."""
    if model in device.images:
        return model
    family = [name for name in device.images if _family(name) == _family(model)] or ["resnet50"]
    return min(family, key=lambda name: abs(math.log(models.TABLE[name].gmacs * 1e9 / max(macs, 1))))


def _family(model: str) -> str:
    found = re.match("[a-z-]+", model)
    return found.group() if found else model


def device(compute: str) -> str:
    """What an emulated run waits like: a device, the seconds that a batch is given, or another run."""
    given = compute.removeprefix(PREFIX)
    if re.fullmatch(r"[0-9.e-]+", given):
        return f"{given} s"
    return f"as in {given.rstrip('/').rpartition('/')[2]}" if "/" in given else given


def in_words(compute: str) -> str:
    """For tables and legends."""
    return "real compute" if compute == REAL else f"emulated compute ({device(compute)})"

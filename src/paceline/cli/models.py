"""paceline models: lists models, and devices that can be emulated."""

import argparse
import textwrap

from paceline.cli.main import add_json
from paceline.emulation.table import TABLE as DEVICES
from paceline.models.table import TABLE, ModelInfo
from paceline.strict_json import dump

INTERNAL = ("build", "channels_last")
COLUMNS = ("parameters", "with stats", "MB", "GFLOPs", "input", "classes", "smallest")
NOTES = """
Counts are for the input and classes shown: an image, or a block of tokens and the vocabulary. Parameters are
trainable; stats are the running means and variances of batch-norm, which Keras counts, too; MB is both as 32-bit
floats, in 2^20 bytes; GFLOPs are 10^9 multiply-adds of the forward pass of one image or block. Below 64 pixels AlexNet
and the ResNets start with a 3x3 convolution with stride 1.

Your own model: --model package.module:function, called with those of the arguments shape, channels, image_size (of
images), block, vocabulary (of tokens), classes, num_classes and dropout that its signature names; torchvision's models,
if it is installed: --model torchvision.models:resnet50.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--devices", action="store_true", help="list the devices of train --compute emulated:DEVICE")
    add_json(parser, "the list")


def run(args: argparse.Namespace) -> int:
    if args.json:
        table = DEVICES.values() if args.devices else TABLE.values()
        print(dump([{name: value for name, value in vars(row).items() if name not in INTERNAL} for row in table]))
        return 0
    if args.devices:
        print("\n\n".join(_device(name) for name in DEVICES))
        return 0
    rows = [COLUMNS, *(_numbers(info) for info in TABLE.values())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    texts = [("model", "used with"), *((info.name, info.used_with) for info in TABLE.values())]
    for (name, used_with), row in zip(texts, rows, strict=True):
        cells = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print(f"{name:<11} {cells}  {used_with}".rstrip())
    print()
    for info in TABLE.values():
        print(f"{info.name:<12} {info.about}")
    print(NOTES, end="")
    return 0


def _device(name: str) -> str:
    device = DEVICES[name]
    speeds = [f"{model} {figure:g}" for model, figure in device.images.items()]
    speed = f"images/s: {', '.join(speeds)}" if speeds else f"{device.flops / 1e12:.2g} TFLOP/s sustained"
    source = textwrap.wrap(f"from {device.source}", 107)
    return "\n".join([f"{name:<12} {device.about}", *(f"{'':<12} {line}" for line in (speed, *source, device.url))])


def _numbers(info: ModelInfo) -> tuple[str, ...]:
    total = info.parameters + info.statistics
    return (
        f"{info.parameters:,}",
        f"{total:,}",
        f"{total * 4 / 2**20:.0f}" if total > 2**20 else f"{total * 4 / 2**20:.1f}",
        f"{info.gmacs:.1f}" if info.gmacs >= 0.1 else f"{info.gmacs:.1g}",
        "x".join(map(str, info.shape)) + " tokens" * (info.takes == "tokens"),
        str(info.classes),
        f"{info.min_size}x{info.min_size}" if info.takes == "images" else "-",
    )

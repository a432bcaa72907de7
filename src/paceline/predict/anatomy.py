"""What of a model decides how long a step takes: the sizes of its parameters, and when their gradients are ready."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from paceline.spec import RunSpec
from paceline.strategies.bucket_layout import assign, tail
from paceline.strategies.synchronous import RIDERS

if TYPE_CHECKING:
    from torch import nn

    from paceline.data.table import DataInfo


@dataclass(frozen=True)
class Anatomy:
    """`sizes` are the values of each trained parameter, in the model's order, and `ready` says after which fraction of
    the compute of a step its gradient is there. `buffers` are the values of each buffer; a value has `itemsize` bytes.
    `macs` are the multiply-adds of the forward pass of a sample.
    """

    sizes: tuple[int, ...]
    ready: tuple[float, ...]
    buffers: tuple[int, ...] = ()
    itemsize: int = 4
    macs: float = 0.0

    @property
    def state(self) -> int:
        """The values that parameter servers hold."""
        return sum(self.sizes) + sum(self.buffers)

    def shrunk(self, times: int) -> Anatomy:
        """With tensors that are so many times smaller, as `--shrink` makes them."""
        sizes, buffers = (tuple(-(-size // times) for size in each) for each in (self.sizes, self.buffers))
        return replace(self, sizes=sizes, buffers=buffers)

    def buckets(self, limit: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The values of each bucket of gradients, and the fraction of a step after which it can be sent."""
        last_first = list(reversed(self.sizes))
        numbers = assign([("", size, self.itemsize) for size in last_first], limit)
        lengths, times = [0] * (numbers[-1] + 1), [0.0] * (numbers[-1] + 1)
        for number, size, ready in zip(numbers, last_first, reversed(self.ready), strict=True):
            lengths[number] += size
            times[number] = max(times[number], ready)
        lengths[-1] += tail(len(self.sizes), RIDERS)
        for number in range(1, len(times)):
            times[number] = max(times[number], times[number - 1])
        times[-1] = 1.0  # it also carries numbers that are known when backward has ended
        return tuple(lengths), tuple(times)


def anatomy_of(spec: RunSpec) -> Anatomy:
    """Counts the model's operations; imports torch."""
    from paceline.strategies.setup import count_operations

    data, model = build_model(spec)
    timing = count_operations(spec, data, model)
    sizes = tuple(p.numel() for p in model.parameters() if p.requires_grad)
    buffers = tuple(buffer.numel() for buffer in model.buffers())
    return Anatomy(sizes, timing.ready, buffers, 8 if spec.dtype == "float64" else 4, timing.macs)


def build_model(spec: RunSpec) -> tuple[DataInfo, nn.Module]:
    """What is known of the data set, and the model, Paceline's own ones without values; imports torch."""
    import torch

    from paceline.data import table as datasets
    from paceline.data.load import load
    from paceline.models import table as models
    from paceline.models.deferred import build_whole
    from paceline.strategies.setup import how_to_build

    data = datasets.describe(spec.data) or load(spec.data, Path(spec.data_dir) if spec.data_dir else None).info
    make, check = how_to_build(spec, data)
    if not models.describe(spec.model):
        return data, build_whole(make, spec.seed, check)
    with torch.device("meta"):
        return data, make()

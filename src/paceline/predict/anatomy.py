"""What of a model decides how long a step takes: the sizes of its parameters, and when their gradients are ready."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from paceline.data.table import DataInfo
from paceline.emulation.counted import Chain, Shard
from paceline.server.layout import CHUNK_BYTES, Layout
from paceline.spec import RunSpec
from paceline.strategies.bucket_layout import assign, tail
from paceline.strategies.synchronous import RIDERS

if TYPE_CHECKING:
    from torch import nn

    from paceline.strategies.setup import Place


class Parts(Protocol):
    """How a model can be divided over ranks; counted when it is asked for, by what emulated runs use."""

    @property
    def chain(self) -> Chain:
        """Its nodes, for stages."""

    def shard(self, shards: int) -> Shard:
        """The last of so many shards, which has the largest parts."""


@dataclass(frozen=True)
class Anatomy:
    """`sizes` are the values of each trained parameter, in the model's order, and `ready` says after which fraction of
    the compute of a step its gradient is there. `buffers` are the values of each buffer; a value has `itemsize` bytes.
    `macs` are the multiply-adds of the forward pass of a sample.
    `parts` tells how the model can be divided.
    """

    sizes: tuple[int, ...]
    ready: tuple[float, ...]
    buffers: tuple[int, ...] = ()
    itemsize: int = 4
    macs: float = 0.0
    parts: Parts | None = None

    @property
    def state(self) -> int:
        """The values that parameter servers hold."""
        return sum(self.sizes) + sum(self.buffers)

    def shrunk(self, times: int) -> Anatomy:
        """With tensors that are so many times smaller, as `--shrink` makes them."""
        sizes, buffers = (tuple(-(-size // times) for size in each) for each in (self.sizes, self.buffers))
        return replace(self, sizes=sizes, buffers=buffers)

    def on_servers(self, options: Mapping[str, Any]) -> Layout:
        """How servers divide it."""
        return Layout(self.state, self.state, options["servers"], self.itemsize, CHUNK_BYTES // options["shrink"])

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


def bucket_bytes(options: Mapping[str, Any]) -> int:
    """The size of a bucket of gradients, as `--shrink` makes it."""
    return int(options["bucket_mb"] / options["shrink"] * 2**20)


def anatomy_of(spec: RunSpec) -> Anatomy:
    """Counts the model's operations; imports torch."""
    from paceline.strategies.setup import count_operations

    data, model = build_model(spec)
    timing = count_operations(spec, data, model)
    sizes = tuple(p.numel() for p in model.parameters() if p.requires_grad)
    buffers = tuple(buffer.numel() for buffer in model.buffers())
    itemsize = 8 if spec.dtype == "float64" else 4
    return Anatomy(sizes, timing.ready, buffers, itemsize, timing.macs, CountedParts(spec, data))


def data_of(spec: RunSpec) -> DataInfo:
    """What is known of the data set; a user's own is opened, which imports torch."""
    from paceline.data import table as datasets

    return datasets.describe(spec.data) or _opened(spec.data, spec.data_dir)


@cache
def _opened(name: str, folder: str | None) -> DataInfo:
    from paceline.data.load import load

    return load(name, Path(folder) if folder else None).info


def build_model(spec: RunSpec) -> tuple[DataInfo, nn.Module]:
    """What is known of the data set, and the model, Paceline's own ones without values; imports torch."""
    import torch

    from paceline.models import table as models
    from paceline.models.deferred import build_whole
    from paceline.strategies.setup import how_to_build

    data = data_of(spec)
    make, check = how_to_build(spec, data)
    if not models.describe(spec.model):
        return data, build_whole(make, spec.seed, check)
    with torch.device("meta"):
        return data, make()


class CountedParts:
    """Those of the model of a spec; imports torch."""

    def __init__(self, spec: RunSpec, data: DataInfo) -> None:
        self.spec, self.data = spec, data
        self._shards: dict[int, Shard] = {}

    @cached_property
    def chain(self) -> Chain:
        from paceline.emulation.parts import chain_of
        from paceline.strategies.partitioned import build_without_storage
        from paceline.strategies.pipeline.planning import trace_model

        model = build_without_storage(self.spec, self.data).model
        return chain_of(trace_model(self.spec, self.data, model, self._place))

    def shard(self, shards: int) -> Shard:
        from paceline.emulation.parts import shard_of
        from paceline.strategies.partitioned import build_without_storage
        from paceline.strategies.setup import example

        if shards not in self._shards:
            dtype = self._place.dtype
            model = build_without_storage(self.spec, self.data).model.to(dtype)
            inputs = example(self.spec, self.data, 1, dtype, "meta")
            self._shards[shards] = shard_of(model, inputs, shards - 1, shards, self.spec.model)
        return self._shards[shards]

    @property
    def _place(self) -> Place:
        import torch

        from paceline.strategies.setup import Place

        return Place(torch.device("cpu"), torch.float64 if self.spec.dtype == "float64" else torch.float32, first=True)

"""Tensor parallelism: each wide layer is split over the workers of a replica; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.collectives.native import NATIVE
from paceline.layout import Grid
from paceline.options import option
from paceline.strategies import options
from paceline.strategies.partition import Partition


@dataclass(frozen=True)
class Options(options.Collective, options.Overlapped):
    tensor: int | None = option(None, "number of workers that the wide layers of a replica are split over; all of them "
                                "unless given", unit="shard", least=1)  # fmt: skip


class Tensor(Partition):
    def grid(self, values: Mapping[str, Any]) -> Grid:
        return Grid(values["workers"] // self.parts(values), shards=self.parts(values))

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"tensor": values["workers"], "averaging": NATIVE.name}


TENSOR = Tensor(
    "tensor",
    "each wide layer split over --tensor workers",
    "paceline.strategies.tensor.engine:prepare",
    Options,
    by="tensor",
    part="shard",
    on_gpu=False,
    emulates=True,
    reads_together=False,
    simulation="paceline.predict.partitioned:sharded",
)

"""Pipeline parallelism: the model's layers are cut into stages, and micro-batches run through them; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.collectives.native import NATIVE
from paceline.errors import UsageError
from paceline.layout import Grid
from paceline.models import table as models
from paceline.options import option
from paceline.pipeline.devices import stage_devices
from paceline.pipeline.schedule import SCHEDULES
from paceline.strategies import options
from paceline.strategies.partition import Partition

if TYPE_CHECKING:
    from paceline.spec import RunSpec

DEFAULT_MICROBATCHES = 8
CUTS = {"measured": "cut by measured times", "layers": "cut by layers", "parameters": "cut by parameters"}


@dataclass(frozen=True)
class Options(options.MicroBatches, options.Collective, options.Averaged):
    stages: int | None = option(None, "number of stages that a replica of the model is cut into; as many as workers "
                                "unless given", unit="stage", least=1)  # fmt: skip
    schedule: str | None = option(None, "order in which stages run micro-batches; 1f1b unless given",
                                  label="", choices=tuple(SCHEDULES))  # fmt: skip
    cut: str = option("measured", "how cut points are chosen: stages of equal measured time (measured), of equal "
                      "numbers of layers (layers) or parameters (parameters), or after the layers NAME,NAME",
                      label=lambda cut: CUTS.get(cut, f"cut after {cut}"))  # fmt: skip
    memory: str | None = option(None, "memory limit of all stages or of each stage, such as 2GB or 2GB,1GB; none "
                                "unless given", label="stages of at most")  # fmt: skip
    speed: str | None = option(None, "speed of each stage's machine relative to this one, such as 1,0.5; 1 unless "
                               "given", label="stages of speed")  # fmt: skip
    recompute: bool = option(
        False, "recompute activations in the backward pass instead of storing them", label="recomputation"
    )


class Pipeline(Partition):
    def grid(self, values: Mapping[str, Any]) -> Grid:
        return Grid(values["workers"] // self.parts(values), stages=self.parts(values))

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        micros = min(DEFAULT_MICROBATCHES, values["batch_size"])
        return {"stages": values["workers"], "microbatches": micros, "schedule": "1f1b", "averaging": NATIVE.name}

    def check(self, spec: RunSpec) -> None:
        super().check(spec)
        options.check_microbatches(spec)
        if spec.recompute and spec.carrier.in_one_process and _dropout(spec) > 0:
            raise UsageError(
                f"--recompute with --transport {spec.transport} and dropout: ranks that are threads share one random "
                "state, so recomputing would not repeat the same dropout; use gloo or mpi"
            )
        if spec.emulated and spec.memory:
            raise UsageError(
                f"--memory {spec.memory} with --compute {spec.compute}: no layer is run, so its memory is not known; "
                "leave it out"
            )
        stage_devices(spec.stages, spec.memory, spec.speed)


def _dropout(spec: RunSpec) -> float:
    """The dropout of the model; 0 for a user's own model, where it is unknown, unless --dropout is given."""
    info = models.describe(spec.model)
    return spec.dropout if spec.dropout is not None else info.dropout if info else 0.0


PIPELINE = Pipeline(
    "pipeline",
    "the model's layers cut into --stages; micro-batches run through them",
    "paceline.strategies.pipeline.engine:prepare",
    Options,
    by="stages",
    part="stage",
    timelines=True,
    on_gpu=False,
    emulates=True,
    reads_together=False,
    simulation="paceline.predict.partitioned:pipelined",
)

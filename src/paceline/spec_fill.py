"""What a spec's values are where nobody has said; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.comm import table as transports
from paceline.data import table as datasets
from paceline.emulation import table as emulation
from paceline.emulation.measured import seconds_per_image
from paceline.strategies import table as strategies

if TYPE_CHECKING:
    from paceline.spec import World

DEFAULT_LR = {"adam": 0.001, "sgd": 0.01}
DEFAULT_STALENESS = {"ps-sync": 0, "ps-bounded": 4}
DEFAULT_MICROBATCHES = 8


def choose(values: dict[str, Any], sources: dict[str, str], world: World | None) -> None:
    """Fill in what was left open, each with the reason as its source."""

    def fill(name: str, value: Any, why: str) -> None:
        values[name], sources[name] = value, why

    strategy = values["strategy"]
    served = strategy is not None and strategies.TABLE[strategy].served
    for name, default in {"servers": 1, "staleness": DEFAULT_STALENESS.get(strategy)}.items() if served else ():
        if values[name] is None:
            fill(name, default, f"default for {strategy}")
    if world and values["workers"] is None:
        fill("workers", max(1, world.size - (values["servers"] or 0)), f"from {world.launcher}")
    if values["workers"] is None:
        alone = values["strategy"] in (None, "sequential")
        fill("workers", 1 if alone else 2, f"default for {values['strategy'] or 'no strategy'}")
    if values["strategy"] is None:
        fill("strategy", "sequential" if values["workers"] == 1 else "allreduce", "default for the workers")
    for name, value in _of_parts(values).items():
        if values[name] is None:
            fill(name, value, f"default for {values['strategy']}")
    if values["lr"] is None:
        fill("lr", DEFAULT_LR[values["optimizer"]], f"default for {values['optimizer']}")
    data = datasets.describe(values["data"])
    if values["normalize"] is None:
        fill(
            "normalize", data is None or data.normalize, f"default for {'your own data' if data is None else data.name}"
        )
    if (asked := emulation.read(values["compute"])) is not None:
        fill("test", False, "emulated compute")
        if asked.folder:
            fill("compute", _measured(asked.folder, values, data), f"measured in {asked.folder}")
    if values["transport"] == "auto":
        found, why = transports.choose(
            world.launcher if world else None,
            servers=served,
            files=values["read"] == "mpi-io",
            gpu=values["device"] == "cuda" and values["workers"] > 1,
        )
        fill("transport", found, why)


def _of_parts(values: Mapping[str, Any]) -> dict[str, Any]:
    """How a model is divided, where it is."""
    if values["strategy"] == "pipeline":
        micros = min(DEFAULT_MICROBATCHES, values["batch_size"])
        return {"stages": values["workers"], "microbatches": micros, "schedule": "1f1b", "averaging": "allreduce"}
    if values["strategy"] == "tensor":
        return {"tensor": values["workers"], "microbatches": 1, "averaging": "allreduce"}
    return {"microbatches": 1}


def _measured(folder: Path, values: Mapping[str, Any], data: datasets.DataInfo | None) -> str:
    """The time of a batch in a run that was computed, as seconds: ranks elsewhere may not see its folder."""
    size = values["image_size"]
    shape = None if data is None else (data.shape[0], size, size) if size else data.shape
    seconds = seconds_per_image(folder, values["model"], shape, values["hidden"]) * values["batch_size"]
    return f"{emulation.PREFIX}{seconds:.6g}"

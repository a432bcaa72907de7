"""Defaults that depend on other options; no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paceline.comm import table as transports
from paceline.data import table as datasets
from paceline.emulation import table as emulation
from paceline.emulation.measured import seconds_per_sample
from paceline.errors import UsageError
from paceline.strategies import table as strategies
from paceline.tasks import table as tasks

if TYPE_CHECKING:
    from paceline.spec import World
    from paceline.strategies.base import Strategy

DEFAULT_LR = {"adam": 0.001, "adamw": 0.001, "sgd": 0.01}
ADAMW_WEIGHT_DECAY = 0.01  # as in PyTorch
DEFAULT_DECAY_FACTOR = 0.1


def choose(values: dict[str, Any], sources: dict[str, str], world: World | None, *, one_machine: bool) -> None:
    """Fill in values that were not given, each with the reason as its source."""

    def fill(name: str, value: Any, why: str) -> None:
        values[name], sources[name] = value, why

    method = _choose_strategy(values, fill, world)
    _divide_batch(values, sources, method)
    for name, value in method.fill(values).items():
        if values[name] is None:
            fill(name, value, f"default for {method.name}")
    if values["lr"] is None:
        fill("lr", DEFAULT_LR[values["optimizer"]], f"default for {values['optimizer']}")
    if values["optimizer"] == "adamw" and sources["weight_decay"] == "default":
        fill("weight_decay", ADAMW_WEIGHT_DECAY, "default for adamw")
    if values["decay"] == "step" and values["decay_factor"] is None:
        fill("decay_factor", DEFAULT_DECAY_FACTOR, "default for step")
    data = datasets.describe(values["data"])
    kind = datasets.kind_of(values["data"])
    if values["task"] is None:
        fill("task", tasks.USUAL[kind], "default" if kind == "images" else f"default for {kind}")
    if kind == "tokens" and sources["model"] == "default":
        fill("model", "gpt", "default for tokens")
    if values["normalize"] is None and data is not None:  # that of own data is chosen when they are loaded
        fill("normalize", data.normalize, f"default for {data.name}" if kind == "images" else "default")
    if (asked := emulation.read(values["compute"])) is not None:
        fill("test", False, "emulated compute")
        if asked.folder:
            fill("compute", _measured(asked.folder, values, data), f"measured in {asked.folder}")
    if values["transport"] == "auto":
        found, why = transports.choose(
            world.launcher if world else None,
            servers=method.servers(values) > 0,
            files=values["read"] == "mpi-io",
            gpu=values["device"] == "cuda" and values["workers"] > 1,
            one_machine=one_machine and asked is None,  # emulated compute is there to study messages
        )
        fill("transport", found, why)


def _choose_strategy(values: dict[str, Any], fill: Callable[[str, Any, str], None], world: World | None) -> Strategy:
    """Choose the strategy from the workers, or the workers from the strategy; by default one process."""
    if values["strategy"] is None:
        if values["workers"] is None:
            fill(
                "workers", world.size if world else 1, f"from {world.launcher}" if world else "default for no strategy"
            )
        fill("strategy", strategies.default(values["workers"]).name, "default for the workers")
    method = strategies.TABLE[values["strategy"]]
    if values["workers"] is None and world:
        fill("workers", max(1, world.size - method.servers(values)), f"from {world.launcher}")
    elif values["workers"] is None:
        fill("workers", 1 if method.single else 2, f"default for {method.name}")
    return method


def _divide_batch(values: dict[str, Any], sources: dict[str, str], method: Strategy) -> None:
    """Compute a worker's batch from the global batch, if that is given; the learning rate is then not scaled."""
    shares, total = method.shares(values) * values["accumulate"], values["global_batch"]
    if total is None:
        return
    each = -(-total // max(1, shares))
    if sources["batch_size"] == "default":
        values["batch_size"], sources["batch_size"] = each, "--global-batch"
    elif values["batch_size"] != each:
        raise UsageError(
            f"--global-batch {total} is {each} samples for each of {shares}, but --batch-size is "
            f"{values['batch_size']}: give only one of them"
        )
    if sources["scale_lr"] == "default":
        values["scale_lr"], sources["scale_lr"] = False, "--global-batch"


def _measured(folder: Path, values: Mapping[str, Any], data: datasets.DataInfo | None) -> str:
    """The time of a batch in an earlier run, in seconds, because ranks elsewhere may not see its folder."""
    size = values["image_size"]
    shape = None if data is None else (data.shape[0], size, size) if size else data.shape
    seconds = seconds_per_sample(folder, values["model"], shape, values["hidden"]) * values["batch_size"]
    return f"{emulation.PREFIX}{seconds:.6g}"

"""The description of a strategy for the rest of the program: its name, options and capabilities; no torch.

A strategy is a module or a subpackage of this package: a `Strategy`, which can be imported without torch, and a
function that creates the `Engine` that trains. `paceline.strategies.table` lists them. No code outside this package
compares names of strategies: it asks for the attributes and methods here.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, fields
from typing import TYPE_CHECKING, Any

from paceline.layout import Grid
from paceline.run.records import Line

if TYPE_CHECKING:
    from paceline.spec import RunSpec
    from paceline.strategies.engine import Engine
    from paceline.training.driver import Job


@dataclass(frozen=True)
class NoOptions:
    """A strategy without options of its own."""


@dataclass(frozen=True)
class NoFigures:
    """A strategy that measures nothing that the others do not."""


@dataclass(frozen=True)
class Strategy:
    """A way to divide a training over ranks."""

    name: str
    summary: str
    implementation: str  # module:function that takes a job and returns an engine that is ready to step
    options: type[Any] = NoOptions  # a dataclass of `paceline.options.option`
    figures: type[Any] = NoFigures  # a dataclass: what the summary has under the strategy's name
    lines: tuple[type[Line], ...] = ()  # kinds of lines that only its ranks write
    single: bool = False  # trains with one worker only
    exact: bool = True  # trains the model that one process would train with the global batch
    asynchronous: bool = False  # workers do not wait for each other
    updates_by_worker: bool = False  # the batch of each worker makes an update
    part: str = ""  # the part of the model that a worker has: stage or shard; empty: all of it
    averaging: str | None = None  # the collective that sums the workers' gradients
    timelines: bool = False  # every event of its first steps is recorded
    on_gpu: bool = True
    emulates: bool = False  # supports emulated compute
    reads_together: bool = True  # supports --read scatter and mpi-io
    simulation: str = ""  # module:function that predicts its steps: see paceline.predict.steps; empty: none does

    @property
    def installed(self) -> bool:
        """Whether its package is installed here; otherwise only its name is known."""
        return bool(self.implementation)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of its options."""
        return tuple(f.name for f in fields(self.options))

    def prepare(self, job: Job) -> Engine:
        """Create the engine of one rank; imports torch."""
        module, function = self.implementation.split(":")
        engine: Engine = getattr(importlib.import_module(module), function)(job)
        return engine

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on other options; options that have a value keep it."""
        return {}

    def check(self, spec: RunSpec) -> None:
        """Raise UsageError for invalid combinations of options."""
        return

    def servers(self, values: Mapping[str, Any]) -> int:
        """Number of parameter servers; they are the first ranks."""
        return 0

    def grid(self, values: Mapping[str, Any]) -> Grid:
        """How many replicas the workers make up, and the stages and shards of each."""
        return Grid(values["workers"])

    def replica_size(self, runs: Sequence[Mapping[str, Any]], workers: int) -> dict[str, int]:
        """The option that says how many workers have a replica, with its value for so many workers, as in these runs;
        nothing if each has the whole model.
        """
        return {}

    def shares(self, values: Mapping[str, Any]) -> int:
        """The number of parts that the samples of one update are divided into."""
        return 1 if self.updates_by_worker else self.grid(values).replicas

    def round(self, values: Mapping[str, Any]) -> int:
        """The number of steps that are timed together, because single steps vary systematically: asynchronous workers
        commit theirs in bursts, and local SGD communicates only in some steps.
        """
        return values["workers"] if self.updates_by_worker else 1

    def workers(self, spec: RunSpec) -> str:
        """The workers (and servers, replicas), for the console."""
        return f"{spec.workers} worker{'' if spec.workers == 1 else 's'}"

    def batches(self, spec: RunSpec) -> str:
        """The batch of an update, for the console; follows the text of `workers`."""
        if spec.update_batch % spec.shares:
            return f"with a global batch of {spec.update_batch}, up to {spec.batch_size} each"
        times = f" x {spec.accumulate}" if spec.accumulate > 1 else ""
        return f"x batch {spec.batch_size}{times} = global batch {spec.update_batch}"

    def fields(self) -> dict[str, tuple[Field[Any], Any]]:
        """Its options by name, each as a dataclass field with its type."""
        kinds = typing.get_type_hints(self.options)
        return {f.name: (f, kinds[f.name]) for f in fields(self.options)}

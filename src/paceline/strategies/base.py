"""What a strategy is to the rest of the program: its name, its options, what it can do; no torch.

A strategy is a module of this package, or a package: a `Strategy` that can be read without torch, and a function that
makes the `Engine` that trains. `paceline.strategies.table` lists them. Nothing outside this package compares a
strategy's name: it asks for what it needs to know, here.
"""

from __future__ import annotations

import importlib
import typing
from collections.abc import Mapping
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
    implementation: str  # module:function that takes a job and returns an engine, ready to step
    options: type[Any] = NoOptions  # a dataclass of `paceline.options.option`
    figures: type[Any] = NoFigures  # a dataclass: what the summary has under the strategy's name
    lines: tuple[type[Line], ...] = ()  # kinds of lines that only its ranks write
    single: bool = False  # trains with one worker only
    exact: bool = True  # trains the model that one process would train with the global batch
    asynchronous: bool = False  # workers do not wait for each other
    updates_by_worker: bool = False  # each worker's batch is an update of its own
    part: str = ""  # what a worker has of the model: a stage, a shard; empty: all of it
    averaging: str | None = None  # the collective that sums the workers' gradients
    timelines: bool = False  # its steps are recorded event by event
    on_gpu: bool = True
    emulates: bool = False  # can take a device's time instead of computing
    reads_together: bool = True  # rank 0 may scatter samples, and ranks may read by MPI-IO

    @property
    def installed(self) -> bool:
        """Whether more than its name is known here."""
        return bool(self.implementation)

    @property
    def names(self) -> tuple[str, ...]:
        """Its options."""
        return tuple(f.name for f in fields(self.options))

    def prepare(self, job: Job) -> Engine:
        """The engine of one rank. Ranks only: this imports torch."""
        module, function = self.implementation.split(":")
        engine: Engine = getattr(importlib.import_module(module), function)(job)
        return engine

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults that depend on other options. Those that have a value keep it."""
        return {}

    def check(self, spec: RunSpec) -> None:
        """Raise UsageError where options do not go together."""
        return

    def servers(self, values: Mapping[str, Any]) -> int:
        """Ranks that hold parameters and compute no gradients; they come before the workers."""
        return 0

    def grid(self, values: Mapping[str, Any]) -> Grid:
        """The workers as replicas of the model, and the stages and shards of each."""
        return Grid(values["workers"])

    def shares(self, values: Mapping[str, Any]) -> int:
        """The parts that the samples of one update are divided into."""
        return 1 if self.updates_by_worker else self.grid(values).replicas

    def round(self, values: Mapping[str, Any]) -> int:
        """Steps that are timed together, since one alone is no measure: workers that do not wait for each other commit
        theirs in bursts, and only some steps may send anything.
        """
        return values["workers"] if self.updates_by_worker else 1

    def workers(self, spec: RunSpec) -> str:
        """Who takes part, in words."""
        return f"{spec.workers} worker{'' if spec.workers == 1 else 's'}"

    def batches(self, spec: RunSpec) -> str:
        """What an update is made of, in words that follow those about the workers."""
        if spec.update_batch % spec.shares:
            return f"with a global batch of {spec.update_batch}, up to {spec.batch_size} each"
        return f"x batch {spec.batch_size} = global batch {spec.update_batch}"

    def fields(self) -> dict[str, tuple[Field[Any], Any]]:
        """Its options by name: each as a dataclass field, with its type."""
        kinds = typing.get_type_hints(self.options)
        return {f.name: (f, kinds[f.name]) for f in fields(self.options)}

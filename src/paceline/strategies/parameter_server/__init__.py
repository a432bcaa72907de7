"""Parameter servers hold the weights; workers pull weights and push gradients, and may be lost; no torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from paceline.options import LEARNING, option
from paceline.strategies.base import Strategy
from paceline.strategies.parameter_server.figures import LINES, Figures

if TYPE_CHECKING:
    from paceline.spec import RunSpec

DEFAULT_STALENESS = 4
CHECKPOINT_EVERY = 100  # updates: a server that is started again goes back to the last checkpoint
IMPLEMENTATION = "paceline.strategies.parameter_server.engine:prepare"


@dataclass(frozen=True)
class Options:
    servers: int | None = option(
        None, "number of processes that hold the parameters; 1 unless given", unit="server", least=1
    )
    worker_timeout: float = option(5.0, "seconds without a message after which a worker is given up; training "
                                   "continues without it", unit="s", least=0.5)  # fmt: skip
    restarts: int = option(0, "how many times a worker that has died is started again", unit="restart", least=0)
    encrypt: bool = option(True, "encrypt traffic between machines; turn it off only on a network you trust",
                          label="encryption")  # fmt: skip


@dataclass(frozen=True)
class BoundedOptions(Options):
    staleness: int | None = option(None, "largest staleness of a gradient: the number of updates made since its "
                                   "weights were read; 4 unless given", least=0, most=1000)  # fmt: skip


@dataclass(frozen=True)
class AsyncOptions(Options):
    staleness_lr: bool = option(False, "divide the learning rate of a gradient by its staleness", affects=LEARNING,
                                label="learning rate by staleness")  # fmt: skip


class ParameterServer(Strategy):
    """`bound` is the maximum staleness of a gradient; None is no bound."""

    def servers(self, values: Mapping[str, Any]) -> int:
        return values["servers"] or 1

    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {"servers": 1}

    def bound(self, spec: RunSpec) -> int | None:
        return 0

    def workers(self, spec: RunSpec) -> str:
        return f"{spec.servers} server{'' if spec.servers == 1 else 's'}, {super().workers(spec)}"


class Bounded(ParameterServer):
    def fill(self, values: Mapping[str, Any]) -> dict[str, Any]:
        return {**super().fill(values), "staleness": DEFAULT_STALENESS}

    def bound(self, spec: RunSpec) -> int | None:
        staleness: int = spec.staleness
        return staleness


class Unbounded(ParameterServer):
    def bound(self, spec: RunSpec) -> int | None:
        return None

    def batches(self, spec: RunSpec) -> str:
        return super().batches(spec) if spec.workers == 1 else f"with batches of {spec.batch_size}, each an update"


PS_SYNC = ParameterServer(
    "ps-sync",
    "parameter server; waits for all workers, averages, steps once",
    IMPLEMENTATION,
    Options,
    figures=Figures,
    lines=LINES,
    emulates=True,
    simulation="paceline.predict.served:served",
    on_gpu=False,
    reads_together=False,
)
PS_ASYNC = Unbounded(
    "ps-async",
    "parameter server; applies each worker's gradient on arrival",
    IMPLEMENTATION,
    AsyncOptions,
    figures=Figures,
    lines=LINES,
    exact=False,
    asynchronous=True,
    updates_by_worker=True,
    emulates=True,
    simulation="paceline.predict.served:unsynchronised",
    on_gpu=False,
    reads_together=False,
)
PS_BOUNDED = Bounded(
    "ps-bounded",
    "parameter server; workers may be --staleness updates ahead",
    IMPLEMENTATION,
    BoundedOptions,
    figures=Figures,
    lines=LINES,
    exact=False,
    asynchronous=True,
    emulates=True,
    simulation="paceline.predict.served:unsynchronised",
    on_gpu=False,
    reads_together=False,
)

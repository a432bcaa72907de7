"""Options that several strategies share; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.errors import UsageError
from paceline.options import NOTHING, PROBLEM, option

if TYPE_CHECKING:
    from paceline.spec import RunSpec


@dataclass(frozen=True)
class MicroBatches:
    microbatches: int | None = option(None, "number of micro-batches that a replica's batch is divided into, which run "
                                      "one after the other; 8 for pipeline, 1 for sequential unless given",
                                      unit="micro-batch", least=1)  # fmt: skip


@dataclass(frozen=True)
class Averaged:
    """Strategies whose replicas average gradients."""

    bucket_mb: float = option(4.0, "size in MB of the buckets in which gradients are averaged", label="buckets of",
                             unit="MB", least=0.001)  # fmt: skip
    check_replicas: int = option(0, "check every this many steps that all replicas have the same weights; 0: never",
                                 affects=NOTHING, least=0)  # fmt: skip


@dataclass(frozen=True)
class Overlapped(Averaged):
    overlap: str = option("auto", "average gradients while the backward pass is running; auto measures which is faster",
                          choices=("auto", "on", "off"))  # fmt: skip


@dataclass(frozen=True)
class DataParallel(Overlapped):
    sync_batchnorm: bool = option(False, "compute batch-norm statistics over the global batch instead of each worker's "
                                  "part", affects=PROBLEM, label="synchronized batch-norm",
                                  elsewhere=("sync-bn", "syncbn"))  # fmt: skip
    record_norms: int = option(10, "record the norm of the gradient, of all workers and of each one alone, every this "
                               "many updates: from both, the noise of gradients is estimated; 0: never",
                               affects=NOTHING, least=0)  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """Strategies that are not named after the collective they average with."""

    averaging: str | None = option(None, "collective with which replicas average their gradients (local-sgd: weights); "
                                   "allreduce unless given", label="averaged by",
                                   choices=tuple(AVERAGINGS))  # fmt: skip


def check_microbatches(spec: RunSpec) -> None:
    if spec.microbatches > spec.batch_size:
        raise UsageError(f"--microbatches {spec.microbatches} of a batch of {spec.batch_size}: give at most "
                         f"{spec.batch_size}, or a larger --batch-size")  # fmt: skip


def check_unchecked(spec: RunSpec) -> None:
    """Refuse to compare weights that emulated compute does not change."""
    if spec.emulated and spec.check_replicas:
        raise UsageError(
            f"--check-replicas {spec.check_replicas} with --compute {spec.compute}: weights do not change; leave it out"
        )

"""Options that several strategies share; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.errors import UsageError
from paceline.options import option

if TYPE_CHECKING:
    from paceline.spec import RunSpec


@dataclass(frozen=True)
class MicroBatches:
    microbatches: int | None = option(None, "cut a replica's batch into this many micro-batches, which run one after "
                                      "the other; 8 for pipeline, 1 for sequential", least=1)  # fmt: skip


@dataclass(frozen=True)
class Averaged:
    """Strategies whose replicas average gradients."""

    bucket_mb: float = option(4.0, "gradients are averaged in buckets of about this many MB", least=0.001)
    check_replicas: int = option(0, "compare the replicas' weights every this many steps; 0 is never", least=0)


@dataclass(frozen=True)
class Overlapped(Averaged):
    overlap: str = option("auto", "average while backward computes; auto measures whether that pays",
                          choices=("auto", "on", "off"))  # fmt: skip


@dataclass(frozen=True)
class DataParallel(Overlapped):
    sync_batchnorm: bool = option(False, "batch-norm over the global batch instead of each worker's part",
                                  elsewhere=("sync-bn", "syncbn"))  # fmt: skip


@dataclass(frozen=True)
class Collective:
    """Strategies that are not named after the collective they average with."""

    averaging: str | None = option(None, "how replicas average their gradients (local-sgd: weights); allreduce unless "
                                   "given",
                                   choices=tuple(AVERAGINGS))  # fmt: skip


def check_microbatches(spec: RunSpec) -> None:
    if spec.microbatches > spec.batch_size:
        raise UsageError(f"--microbatches {spec.microbatches} of a batch of {spec.batch_size}: give at most "
                         f"{spec.batch_size}, or a larger --batch-size")  # fmt: skip
    if spec.microbatches > 1 and spec.emulated:
        raise UsageError(f"--microbatches {spec.microbatches} with --compute {spec.compute}: nothing is computed")

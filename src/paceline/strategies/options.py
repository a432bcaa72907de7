"""Options that several strategies share; no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm import table as transports
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
class ElasticDataParallel(DataParallel):
    elastic: str | None = option(None, "go on when workers are lost, with at least MIN of them, and start lost ones "
                                 "again; MAX is --workers", affects=NOTHING, metavar="MIN[:MAX]",
                                 elsewhere=("nnodes", "min-np"))  # fmt: skip


def limits(elastic: str) -> tuple[int, int | None]:
    """The least and the largest number of workers of an elastic run, if the option says the latter."""
    least, colon, most = elastic.partition(":")
    if not all(part.isascii() and part.isdigit() and int(part) for part in (least, *([most] if colon else []))):
        raise UsageError(f"--elastic {elastic}: give the least number of workers (2), or the least and the most (2:8)")
    return int(least), int(most) if colon else None


def check_elastic(spec: RunSpec) -> None:
    if not spec.elastic:
        return
    workers, (least, most) = spec.workers or 1, limits(spec.elastic)
    if most not in (None, workers):
        raise UsageError(
            f"--elastic {spec.elastic} with {workers} workers: as many as --workers are started, and lost ones again; "
            f"give --workers {most}, or --elastic {min(least, workers)}:{workers}"
        )
    if not 1 <= least <= workers:
        raise UsageError(f"--elastic {spec.elastic} with {workers} workers: the least number is from 1 to {workers}")
    if not spec.carrier.generation:
        able = ", ".join(each.name for each in transports.TABLE.values() if each.generation)
        raise UsageError(
            f"--elastic with --transport {spec.transport}: it cannot connect other ranks during a run; use {able}, on "
            "one machine"
        )
    if spec.read != "own":
        raise UsageError(f"--elastic with --read {spec.read}: workers that join read their own samples; use --read own")
    if spec.emulated:
        raise UsageError(f"--elastic with --compute {spec.compute}: there is no state to go on from; leave it out")


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

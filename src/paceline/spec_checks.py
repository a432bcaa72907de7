"""What a spec's values cannot be together, by what they are about; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.comm import table as transports
from paceline.data import table as datasets
from paceline.errors import UsageError
from paceline.models import table as models
from paceline.pipeline.devices import stage_devices

if TYPE_CHECKING:
    from paceline.spec import RunSpec


def check_served(spec: RunSpec) -> None:
    """What only parameter servers can do, and what they cannot."""
    if not spec.served:
        usual = type(spec)()
        given = [name for name in ("servers", "staleness") if getattr(spec, name) is not None]
        others = ("staleness_lr", "restarts", "worker_timeout", "snapshot_every", "encrypt")
        given += [name for name in others if getattr(spec, name) != getattr(usual, name)]
        if given:
            flag, use = given[0].replace("_", "-"), {"staleness": "ps-bounded", "staleness_lr": "ps-async"}
            raise UsageError(
                f"--{flag} is for parameter servers; strategy {spec.strategy} has none: leave it out, or use "
                f"--strategy {use.get(given[0], 'ps-sync')}"
            )
        if spec.carrier.for_servers:
            raise UsageError(
                f"--transport {spec.transport} with strategy {spec.strategy}: only parameter servers use it; use gloo"
            )
        return
    if not spec.carrier.for_servers:
        raise UsageError(f"--transport {spec.transport} with {spec.strategy}: it speaks ZeroMQ; leave --transport out")
    if spec.strategy == "ps-async" and spec.staleness is not None:
        raise UsageError("--staleness with ps-async, which has no bound: leave it out, or use ps-bounded")
    if spec.strategy == "ps-sync" and spec.staleness:
        raise UsageError(f"--staleness {spec.staleness} with ps-sync, which is staleness 0: use ps-bounded")
    if spec.staleness_lr and spec.strategy != "ps-async":
        raise UsageError(f"--staleness-lr with {spec.strategy}: it is for ps-async, whose gradients come one by one")
    if spec.sync_batchnorm:
        raise UsageError(f"--sync-batchnorm with {spec.strategy}: workers of a server do not meet; use ring")
    if spec.check_replicas:
        raise UsageError(f"--check-replicas with {spec.strategy}: its workers' weights come from the server")
    if spec.read != "own":
        raise UsageError(f"--read {spec.read} with {spec.strategy}: its workers read for themselves; use --read own")


def check_divided(spec: RunSpec) -> None:
    """What only a model in parts has, and what it cannot have."""
    assert spec.workers is not None
    _check_flags_of_parts(spec)
    if not spec.divided:
        return
    flag, parts = ("--stages", spec.stages) if spec.strategy == "pipeline" else ("--tensor", spec.tensor)
    assert parts is not None
    batch_norm = "each micro-batch" if spec.strategy == "pipeline" else "the batch of each replica"
    refusals = {
        f"--workers {spec.workers} with {flag} {parts}: replicas of {parts} workers each are expected; give a multiple "
        f"of {parts} workers": spec.workers % parts > 0,
        f"--read {spec.read} with {spec.strategy}: its ranks read for themselves; use --read own": spec.read != "own",
        f"--sync-batchnorm with {spec.strategy}: batch-norm is over {batch_norm} there": spec.sync_batchnorm,
        "--overlap on with pipeline: replicas average after the last micro-batch; leave it out": (
            spec.strategy == "pipeline" and spec.overlap == "on"
        ),
        "--recompute with --transport threads and dropout: ranks that are threads share one random state, and would "
        "not drop the same values again; use gloo or mpi": (
            spec.recompute and spec.carrier.in_one_process and _dropout(spec) > 0
        ),
        f"strategy {spec.strategy} computes on CPUs alone so far: use --device cpu, and gloo or mpi": (
            spec.device == "cuda" or spec.carrier.moves_gpu_tensors
        ),
        f"--compute {spec.compute} with {spec.strategy}: a model in parts computes; leave it out": spec.emulated,
    }
    for words, holds in refusals.items():
        if holds:
            raise UsageError(words)
    if spec.strategy == "pipeline":
        stage_devices(spec.stages or 1, spec.memory, spec.speed)


def _dropout(spec: RunSpec) -> float:
    """As far as it is known: of a user's own model it is not, unless given."""
    info = models.describe(spec.model)
    return spec.dropout if spec.dropout is not None else info.dropout if info else 0.0


def _check_flags_of_parts(spec: RunSpec) -> None:
    """Refuse flags that would mean nothing to the strategy."""
    usual = type(spec)()
    only = {"pipeline": ("stages", "schedule", "memory", "speed", "recompute", "cut"), "tensor": ("tensor",)}
    for strategy, names in only.items():
        given = [name for name in names if getattr(spec, name) != getattr(usual, name)]
        if given and spec.strategy != strategy:
            mixed = " (pipeline and tensor do not mix)" if spec.divided else ""
            raise UsageError(f"--{given[0]} is for strategy {strategy}, not for {spec.strategy}{mixed}")
    if spec.microbatches != 1 and spec.strategy not in ("pipeline", "sequential"):
        raise UsageError(f"--microbatches {spec.microbatches} with {spec.strategy}: for pipeline and sequential alone")
    if (spec.microbatches or 1) > spec.batch_size:
        raise UsageError(f"--microbatches {spec.microbatches} of a batch of {spec.batch_size}: give at most "
                         f"{spec.batch_size}, or a larger --batch-size")  # fmt: skip
    if spec.microbatches != 1 and spec.emulated and not spec.divided:
        raise UsageError(f"--microbatches {spec.microbatches} with --compute {spec.compute}: nothing is computed")
    if spec.averaging and not spec.divided:
        use = spec.averaging if not spec.served else "pipeline"
        raise UsageError(f"--averaging is for replicas of pipeline and tensor; use --strategy {use}")


def check_mpi_io(spec: RunSpec) -> None:
    if not spec.carrier.reads_files_together:
        raise UsageError(f"--read mpi-io with --transport {spec.transport}: only MPI's ranks can; use --transport mpi")
    if spec.workers == 1:
        raise UsageError("--read mpi-io with one worker: it is for several that read together; use --read own")
    if not datasets.in_file(spec.data):
        raise UsageError(f"--read mpi-io: {spec.data} is not in a file; use --read own, or another data set")


def check_device(spec: RunSpec, *, here: bool) -> None:
    if spec.device == "cuda" and spec.served:
        raise UsageError(f"--device cuda with {spec.strategy}: gradients for a server are on the CPU; use --device cpu")
    if spec.device == "cuda" and here and not transports.has_gpu():
        raise UsageError("--device cuda: there is no NVIDIA GPU here; use --device cpu or auto")
    if spec.device == "cuda" and not spec.carrier.moves_gpu_tensors and spec.workers != 1:
        raise UsageError(f"--device cuda with --transport {spec.transport}: tensors on GPUs need --transport nccl")
    if spec.device == "cpu" and spec.carrier.moves_gpu_tensors:
        raise UsageError(f"--device cpu with --transport {spec.transport}: it moves tensors of GPUs; use gloo or mpi")


def check_emulated(spec: RunSpec) -> None:
    """Where nothing is computed there is nothing to look at, and the network must carry gradients alone."""
    if not spec.emulated:
        if spec.shrink > 1:
            raise UsageError(
                f"--shrink {spec.shrink} is for --compute emulated:…; a model that is trained has its size"
            )
        return
    mark = f"--compute {spec.compute}"
    if spec.validation:
        raise UsageError(f"--validation {spec.validation:g} with {mark}: nothing is trained; leave it out")
    if spec.check_replicas:
        raise UsageError(f"--check-replicas {spec.check_replicas} with {mark}: weights do not change; leave it out")
    if spec.sync_batchnorm:
        raise UsageError(f"--sync-batchnorm with {mark}: its messages are part of what is not computed; leave it out")
    if spec.weights:
        raise UsageError(f"--weights {spec.weights} with {mark}: nothing is trained; leave it out")
    if spec.read != "own":
        raise UsageError(f"--read {spec.read} with {mark}: no samples are read; leave it out")
    if spec.device == "cuda" or spec.carrier.moves_gpu_tensors:
        given = "--device cuda" if spec.device == "cuda" else f"--transport {spec.transport}"
        raise UsageError(f"{given} with {mark}: its gradients are on the CPU; use --device cpu, and gloo or mpi")

"""What a spec's values cannot be together, by what they are about; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.comm import table as transports
from paceline.data import table as datasets
from paceline.errors import UsageError
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
            flag = given[0].replace("_", "-")
            raise UsageError(f"--{flag} is for parameter servers; strategy {spec.strategy} has none: use ps-sync")
        if spec.transport == "zmq":
            raise UsageError(f"--transport zmq with strategy {spec.strategy}: only parameter servers use it; use gloo")
        return
    if spec.transport != "zmq":
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
    only = {"pipeline": ("stages", "schedule", "memory", "speed", "recompute"), "tensor": ("tensor",)}
    for strategy, names in only.items():
        given = [name for name in names if getattr(spec, name)] + ["cut"] * (strategy == "pipeline" != spec.strategy
                                                                             and spec.cut != "measured")  # fmt: skip
        if given and spec.strategy != strategy:
            mixed = " (pipeline and tensor do not mix)" if spec.divided else ""
            raise UsageError(f"--{given[0]} is for strategy {strategy}, not for {spec.strategy}{mixed}")
    if spec.microbatches != 1 and spec.strategy not in ("pipeline", "sequential"):
        raise UsageError(f"--microbatches {spec.microbatches} with {spec.strategy}: for pipeline and sequential alone")
    if not spec.divided:
        if spec.averaging:
            raise UsageError(f"--averaging is for replicas of pipeline and tensor; use --strategy {spec.averaging}")
        return
    parts = spec.stages if spec.strategy == "pipeline" else spec.tensor
    flag = "--stages" if spec.strategy == "pipeline" else "--tensor"
    assert parts is not None
    if spec.workers % parts:
        raise UsageError(f"--workers {spec.workers} with {flag} {parts}: replicas of {parts} workers each are "
                         f"expected; give a multiple of {parts} workers")  # fmt: skip
    if spec.microbatches and spec.microbatches > spec.batch_size:
        raise UsageError(f"--microbatches {spec.microbatches} of a batch of {spec.batch_size}: give at most "
                         f"{spec.batch_size}, or a larger --batch-size")  # fmt: skip
    if spec.read != "own":
        raise UsageError(f"--read {spec.read} with {spec.strategy}: its ranks read for themselves; use --read own")
    if spec.sync_batchnorm:
        raise UsageError(f"--sync-batchnorm with {spec.strategy}: batch-norm is over each "
                         f"{'micro-batch' if spec.strategy == 'pipeline' else 'batch'} there")  # fmt: skip
    if spec.device == "cuda" or spec.transport == "nccl":
        raise UsageError(f"strategy {spec.strategy} computes on CPUs alone so far: use --device cpu, and gloo or mpi")
    if spec.emulated:
        raise UsageError(f"--compute {spec.compute} with {spec.strategy}: a model in parts computes; leave it out")
    if spec.strategy == "pipeline":
        stage_devices(spec.stages or 1, spec.memory, spec.speed)


def check_mpi_io(spec: RunSpec) -> None:
    if spec.transport != "mpi":
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
    if spec.device == "cuda" and spec.transport != "nccl" and spec.workers != 1:
        raise UsageError(f"--device cuda with --transport {spec.transport}: tensors on GPUs need --transport nccl")
    if spec.device == "cpu" and spec.transport == "nccl":
        raise UsageError("--device cpu with --transport nccl: nccl moves tensors of GPUs; use gloo or mpi")


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
    if spec.device == "cuda" or spec.transport == "nccl":
        given = "--device cuda" if spec.device == "cuda" else "--transport nccl"
        raise UsageError(f"{given} with {mark}: its gradients are on the CPU; use --device cpu, and gloo or mpi")

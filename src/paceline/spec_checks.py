"""Invalid combinations of options; no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from paceline.comm import table as transports
from paceline.data import table as datasets
from paceline.errors import UsageError
from paceline.export.trackers import check_tensorboard

if TYPE_CHECKING:
    from paceline.spec import RunSpec


def check_strategy(spec: RunSpec) -> None:
    """Check the strategy's capabilities, and call its own checks."""
    method = spec.method
    if spec.carrier.for_servers and not spec.servers:
        raise UsageError(
            f"--transport {spec.transport} with strategy {spec.strategy}: only parameter servers use it; use gloo"
        )
    if spec.servers and not spec.carrier.for_servers:
        raise UsageError(f"--transport {spec.transport} with {spec.strategy}: it uses ZeroMQ; leave --transport out")
    if spec.read != "own" and not method.reads_together:
        raise UsageError(f"--read {spec.read} with {spec.strategy}: its ranks read their own samples; use --read own")
    if not method.on_gpu and (spec.device == "cuda" or spec.carrier.moves_gpu_tensors):
        given = "--device cuda" if spec.device == "cuda" else f"--transport {spec.transport}"
        raise UsageError(f"{given} with {spec.strategy}, which runs only on CPUs: use --device cpu, and gloo or mpi")
    if spec.emulated and not method.emulates:
        raise UsageError(f"--compute {spec.compute}: {spec.strategy} does not support emulated compute; leave it out")
    method.check(spec)


def check_decay(spec: RunSpec) -> None:
    """Check the options of the learning rate's schedule, none of which may be without effect."""
    if spec.warmup_epochs is not None and spec.warmup_steps is not None:
        raise UsageError(
            f"--warmup-epochs {spec.warmup_epochs:g} and --warmup-steps {spec.warmup_steps}: give only one of them"
        )
    if spec.decay == "step" and spec.decay_every is None:
        raise UsageError("--decay step: it needs --decay-every, the epochs after which the learning rate is lowered")
    for given, value in (("--decay-every", spec.decay_every), ("--decay-factor", spec.decay_factor)):
        if spec.decay != "step" and value is not None:
            raise UsageError(f"{given} {value:g} with --decay {spec.decay}: it is for --decay step; leave it out")


def check_validation(spec: RunSpec) -> None:
    """Check the options of validation, none of which may be without effect."""
    names = spec.objective.names
    if spec.best_by not in names:
        listed = ", ".join(f"'{name}'" if " " in name else name for name in names)
        raise UsageError(f"--best-by {spec.best_by}: task {spec.task} has no such figure; use one of {listed}")
    given = {"--evaluate-every": spec.evaluate_every, "--best-by": spec.best_by * (spec.best_by != "loss"),
             "--patience": spec.patience}  # fmt: skip
    for shown, value in given.items():
        if value and not spec.validation:
            raise UsageError(f"{shown} {value}: there is no validation set; give --validation 0.1, or leave it out")


def check_mpi_io(spec: RunSpec) -> None:
    if not spec.carrier.reads_files_together:
        raise UsageError(f"--read mpi-io with --transport {spec.transport}: it needs MPI; use --transport mpi")
    if spec.workers == 1:
        raise UsageError("--read mpi-io with one worker: it needs several workers; use --read own")
    if not datasets.in_file(spec.data):
        raise UsageError(f"--read mpi-io: {spec.data} is not in a file; use --read own, or another data set")


def check_device(spec: RunSpec, *, here: bool) -> None:
    if spec.precision == "bf16" and spec.dtype == "float64":
        raise UsageError("--precision bf16 with --dtype float64: autocast leaves float64 as it is; use float32")
    if spec.device == "cuda" and here and not transports.has_gpu():
        raise UsageError("--device cuda: this machine has no NVIDIA GPU; use --device cpu or auto")
    if spec.device == "cuda" and not spec.carrier.moves_gpu_tensors and spec.workers != 1:
        raise UsageError(f"--device cuda with --transport {spec.transport}: tensors on GPUs need --transport nccl")
    if spec.device == "cpu" and spec.carrier.moves_gpu_tensors:
        raise UsageError(f"--device cpu with --transport {spec.transport}: it moves only GPU tensors; use gloo or mpi")


def check_tracking(spec: RunSpec, *, here: bool) -> None:
    if spec.tensorboard and here:
        check_tensorboard("--tensorboard")


def check_emulated(spec: RunSpec) -> None:
    """Refuse options that have no effect with emulated compute, or would add other traffic than gradients."""
    if not spec.emulated:
        if spec.shrink > 1:
            raise UsageError(
                f"--shrink {spec.shrink} is only for --compute emulated:…; it cannot shrink a model that is trained"
            )
        return
    mark = f"--compute {spec.compute}"
    if spec.validation:
        raise UsageError(f"--validation {spec.validation:g} with {mark}: nothing is trained; leave it out")
    if spec.weights:
        raise UsageError(f"--weights {spec.weights} with {mark}: nothing is trained; leave it out")
    if spec.read != "own":
        raise UsageError(f"--read {spec.read} with {mark}: no samples are read; leave it out")
    if spec.device == "cuda" or spec.carrier.moves_gpu_tensors:
        given = "--device cuda" if spec.device == "cuda" else f"--transport {spec.transport}"
        raise UsageError(f"{given} with {mark}: its gradients are on the CPU; use --device cpu, and gloo or mpi")

"""How the model of a user's loop is distributed: the name of that, the plain model, and what it communicates."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from paceline.comm.metered import MeteredComm
from paceline.loop.data_parallel import DataParallel

OWN_LOOP, DDP, FSDP, DATA_PARALLEL = "own-loop", "ddp", "fsdp2", "data-parallel"


class Traffic:
    """What averaging gradients has cost this rank; `seconds` is None where that is not known."""

    wire: str | None = None

    def seconds(self) -> float | None:
        return None

    def bytes(self) -> tuple[int, int]:
        """Sent and received."""
        return 0, 0


class Metered(Traffic):
    """That of paceline.DataParallel, whose communicator counts."""

    def __init__(self, model: DataParallel, comm: MeteredComm) -> None:
        self._meter, self._before = comm.meter, comm.meter.total()
        self.wire = "exact" if model.averager.buckets.averaging.cost(2, 1).exact else "opaque"

    def seconds(self) -> float:
        return self._meter.total().seconds - self._before.seconds

    def bytes(self) -> tuple[int, int]:
        made = self._meter.plus(self._before, -1)
        return made.bytes_sent + made.opaque_bytes, made.bytes_received + made.opaque_bytes


class AllReduces(Traffic):
    """That of DDP: averages its buckets just as DDP does, and measures how long at least one is on its way."""

    wire = "opaque"

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group = model.process_group
        self._factor = 1.0 / dist.get_world_size(self._group)
        self._lock, self._running, self._since = threading.Lock(), 0, 0.0
        self.reset()
        model.register_comm_hook(None, lambda _, bucket: self._average(bucket))  # DDP reads annotations, if there are

    def reset(self) -> None:
        self._seconds, self._bytes = 0.0, 0

    def seconds(self) -> float:
        return self._seconds

    def bytes(self) -> tuple[int, int]:
        return self._bytes, self._bytes

    def _average(self, bucket: dist.GradBucket) -> Any:
        buffer = bucket.buffer()
        with self._lock:
            self._since = self._since if self._running else time.perf_counter()
            self._running += 1
            self._bytes += buffer.nbytes
        work = dist.all_reduce(buffer.mul_(self._factor), group=self._group, async_op=True)
        return work.get_future().then(self._done)

    def _done(self, future: Any) -> Tensor:
        with self._lock:
            self._running -= 1
            if not self._running:
                self._seconds += time.perf_counter() - self._since
        result: Tensor = future.value()[0]
        return result


_MEASURED: WeakKeyDictionary[nn.Module, AllReduces] = WeakKeyDictionary()  # a hook cannot be removed


def traffic_of(model: nn.Module) -> Traffic:
    """What can be known of the communication of a model; measures that of DDP from here on, if that is on CPUs.

    (On GPUs, a Python hook does not see when an all-reduce ends.) DDP takes one hook: a user's own stays.
    """
    if isinstance(model, DistributedDataParallel) and all(p.device.type == "cpu" for p in model.parameters()):
        try:
            measured = _MEASURED.get(model) or _MEASURED.setdefault(model, AllReduces(model))
        except RuntimeError:
            return Traffic()
        measured.reset()
        return measured
    comm = model.averager.buckets.comm if isinstance(model, DataParallel) else None
    return Metered(model, comm) if isinstance(model, DataParallel) and isinstance(comm, MeteredComm) else Traffic()


def strategy_of(model: nn.Module) -> str:
    """The name under which runs of such models are compared."""
    if isinstance(model, DistributedDataParallel):
        return DDP
    return FSDP if _is_sharded(model) else DATA_PARALLEL if isinstance(model, DataParallel) else OWN_LOOP


def name_of(model: nn.Module) -> str:
    """The class of the plain model."""
    inner = model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
    kinds = type(inner).__mro__  # FSDP derives a class of its own
    return next(kind.__name__ for kind in kinds if not (_is_sharded(inner) and issubclass(kind, _sharded())))


def _is_sharded(model: Any) -> bool:
    return isinstance(model, _sharded())


def _sharded() -> tuple[type, ...]:
    """The class of modules that fully_shard has changed, if that was ever imported: importing it takes long."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return (fsdp.FSDPModule,) if fsdp and hasattr(fsdp, "FSDPModule") else ()

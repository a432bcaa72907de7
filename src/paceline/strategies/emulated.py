"""Engines with emulated compute: they sleep instead of computing, and send what the real engines send."""

from __future__ import annotations

import time

import torch
from torch import nn

from paceline.collectives.choose import TABLE as AVERAGINGS
from paceline.comm.base import Comm
from paceline.data.batch import Batch
from paceline.emulation.device import EmulatedDevice
from paceline.strategies.buckets import GradientBuckets
from paceline.strategies.engine import Lockstep, StepResult, StepTimer
from paceline.strategies.overlap import OverlapChoice
from paceline.strategies.synchronous import RIDERS, Options, Synchronous
from paceline.tasks.base import Sums


class EmulatedSequential(Lockstep):
    """One device; its published speed includes the optimizer step, which therefore takes no extra time."""

    def __init__(self, comm: Comm, model: nn.Module, device: EmulatedDevice) -> None:
        super().__init__(comm, model, None)
        self.device = device

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        self.device.begin(batch.count)
        self.device.forward()
        timer.mark("forward")
        self.device.reach(1.0)
        timer.mark("backward")
        return StepResult(Sums(), batch.global_count, ask)


class EmulatedSynchronous(Synchronous):
    """Sends the same buckets in the same order as a real run, each when its last gradient would be ready.

    Gradients are zeros, because zero is the only number that stays the same when it is summed over ranks in every step.
    Weights are not broadcast, because they are not used, and not updated, because the device's time includes that.
    """

    def __init__(
        self,
        comm: Comm,
        model: nn.Module,
        options: Options,
        device: EmulatedDevice,
    ) -> None:
        super().__init__(comm, model, None, options)
        self.device = device

    def setup(self) -> None:
        o = self.options
        self.overlap = OverlapChoice(o.overlap, self.comm)
        self.buckets = o.buckets(self.model, self.comm, AVERAGINGS[o.averaging], int(o.bucket_mb * 2**20), RIDERS)
        for slot in self.buckets.slots:
            slot.view.zero_()  # new memory costs nothing until it is written to
            slot.parameter.grad = slot.view
        self.ready = bucket_times(self.buckets, self.device.timing.ready)

    def agree(self, weight: float | None = None) -> None:
        """Do nothing: no buffer has changed."""

    def step(self, batch: Batch, lr: float, ask: int, timer: StepTimer) -> StepResult:
        device, extras = self.device, self.buckets.extras[:RIDERS]
        device.begin(batch.count)
        extras.copy_(torch.tensor([*Sums(), ask]))
        device.forward()
        timer.mark("forward")
        start = time.perf_counter()
        self.buckets.replay(lambda number: device.reach(self.ready[number]), overlap=self.overlap.now())
        device.reach(1.0)
        timer.mark("backward")
        self.buckets.finish()
        self.overlap.took(time.perf_counter() - start)
        asked = extras[-1].item()
        self.buckets.gather_weights()
        timer.mark("wait")
        return StepResult(Sums(), batch.global_count, asked)


def bucket_times(buckets: GradientBuckets, ready: tuple[float, ...]) -> list[float]:
    """When each bucket can be sent, as a fraction of a step: its last gradient is ready, earlier buckets are sent."""
    times, latest = [], 0.0
    for bucket in buckets.buckets:
        # Slots are the parameters from the last one to the first.
        own = [part for slot, part in zip(buckets.slots, reversed(ready), strict=True) if slot.bucket is bucket]
        latest = max([latest, *own])
        times.append(latest)
    return times

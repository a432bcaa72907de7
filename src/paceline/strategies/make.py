"""A strategy by its name in the table."""

from __future__ import annotations

import torch
from torch import nn

from paceline.comm.base import Comm
from paceline.emulation.device import EmulatedDevice
from paceline.strategies.base import Strategy
from paceline.strategies.emulated import EmulatedSequential, EmulatedSynchronous
from paceline.strategies.sequential import Sequential
from paceline.strategies.synchronous import Options, Synchronous
from paceline.strategies.table import TABLE


def make_strategy(
    name: str,
    comm: Comm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    options: Options,
    device: EmulatedDevice | None = None,
) -> Strategy:
    """`options.averaging` follows from the name. With a device, its time is taken instead of computing."""
    averaging = TABLE[name].averaging
    if averaging is None:
        return (
            EmulatedSequential(comm, model, device)
            if device
            else Sequential(comm, model, optimizer, options.micros, options.batch_size)
        )
    options = Options(**{**vars(options), "averaging": averaging})
    if device:
        return EmulatedSynchronous(comm, model, options, device)
    return Synchronous(comm, model, optimizer, options)

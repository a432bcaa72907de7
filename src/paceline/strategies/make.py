"""A strategy by its name in the table."""

import torch
from torch import nn

from paceline.comm.base import Comm
from paceline.strategies.base import Strategy
from paceline.strategies.sequential import Sequential
from paceline.strategies.synchronous import Options, Synchronous
from paceline.strategies.table import TABLE


def make_strategy(
    name: str, comm: Comm, model: nn.Module, optimizer: torch.optim.Optimizer, options: Options
) -> Strategy:
    """`options.averaging` follows from the name."""
    averaging = TABLE[name].averaging
    if averaging is None:
        return Sequential(comm, model, optimizer)
    return Synchronous(comm, model, optimizer, Options(**{**vars(options), "averaging": averaging}))

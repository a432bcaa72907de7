"""Paceline trains a neural network on many processes and machines, and measures what each strategy costs."""

from __future__ import annotations

import importlib

# Not from typing: under `python -m paceline` the working folder is still first on the import path here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from paceline.data.sampler import Sampler
    from paceline.errors import PacelineError
    from paceline.launch.run import train
    from paceline.loop.checkpoints import Checkpoints
    from paceline.loop.data_parallel import DataParallel
    from paceline.loop.record import record
    from paceline.loop.reduce import all_reduce
    from paceline.loop.shard import shard
    from paceline.loop.world import connect
    from paceline.run.records import Summary
    from paceline.spec import RunSpec
    from paceline.strategies.setup import initial_weights

__version__ = "0.1.0"
__all__ = [
    "Checkpoints",
    "DataParallel",
    "PacelineError",
    "RunSpec",
    "Sampler",
    "Summary",
    "all_reduce",
    "connect",
    "initial_weights",
    "record",
    "shard",
    "train",
]

# Imported on first use, so that `import paceline` does not import torch.
_HOMES = {
    "Checkpoints": "paceline.loop.checkpoints",
    "DataParallel": "paceline.loop.data_parallel",
    "PacelineError": "paceline.errors",
    "RunSpec": "paceline.spec",
    "Sampler": "paceline.data.sampler",
    "Summary": "paceline.run.records",
    "all_reduce": "paceline.loop.reduce",
    "connect": "paceline.loop.world",
    "initial_weights": "paceline.strategies.setup",
    "record": "paceline.loop.record",
    "shard": "paceline.loop.shard",
    "train": "paceline.launch.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

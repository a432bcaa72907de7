"""Paceline trains a neural network on many processes and machines, and measures what each strategy costs."""

from __future__ import annotations

import importlib

# Not from typing: under `python -m paceline` the working folder is still first on the import path here.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from typing import Any

    from paceline.checkpoint.loop import Checkpoints
    from paceline.data.sampler import Sampler
    from paceline.errors import PacelineError
    from paceline.launch.connect import connect
    from paceline.launch.run import train
    from paceline.run.records import Summary
    from paceline.spec import RunSpec
    from paceline.strategies.data_parallel import DataParallel
    from paceline.strategies.setup import initial_weights

__version__ = "0.1.0"
__all__ = [
    "Checkpoints",
    "DataParallel",
    "PacelineError",
    "RunSpec",
    "Sampler",
    "Summary",
    "connect",
    "initial_weights",
    "train",
]

# Imported on first use, so that `import paceline` does not import torch.
_HOMES = {
    "Checkpoints": "paceline.checkpoint.loop",
    "DataParallel": "paceline.strategies.data_parallel",
    "PacelineError": "paceline.errors",
    "RunSpec": "paceline.spec",
    "Sampler": "paceline.data.sampler",
    "Summary": "paceline.run.records",
    "connect": "paceline.launch.connect",
    "initial_weights": "paceline.strategies.setup",
    "train": "paceline.launch.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'paceline' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)

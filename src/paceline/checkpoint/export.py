"""Writes the model of a checkpoint to one file, which needs no Paceline to be read."""

from __future__ import annotations

from pathlib import Path

import torch

from paceline.checkpoint.file_format import save
from paceline.checkpoint.load import Checkpoint
from paceline.checkpoint.state import BEST, MODEL
from paceline.errors import UsageError
from paceline.run.atomic import replacing


def export(folder: Path, output: Path, *, best: bool = False) -> int:
    """Write all weights and buffers, as safetensors or as PyTorch's state_dict; return their number."""
    checkpoint, prefix = Checkpoint(folder), BEST if best else MODEL
    state = {name: checkpoint.tensor(prefix + name).contiguous() for name in checkpoint.under(prefix)}
    if not state:
        raise UsageError(f"{folder} has no best weights: no epoch had been validated (--validation)")
    try:
        if output.suffix == ".safetensors":
            save(state, output)
        else:
            with replacing(output) as temporary:
                torch.save(state, temporary)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}") from error
    return len(state)

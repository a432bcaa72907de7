"""Weights in and out: safetensors under the model's own names."""

from __future__ import annotations

import os
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from paceline.errors import UsageError
from paceline.records import usual_mode


def save(state: dict[str, Tensor], path: Path) -> None:
    """Write all tensors, contiguous, as a file that appears whole or not at all."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({name: tensor.cpu().contiguous() for name, tensor in state.items()}, temporary)
        temporary.chmod(usual_mode())
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def start_from(model: nn.Module, path: str) -> list[str]:
    """Load weights; a last layer for another number of classes stays new. Returns the names that were not loaded."""
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--weights {path} cannot be read as safetensors: {error}") from error
    own = model.state_dict()
    differ = [name for name in own if name in saved and saved[name].shape != own[name].shape]
    fresh = [name for name in differ if name in _head(model)]
    wrong = [
        f"{name}: {tuple(saved[name].shape)} in the file, {tuple(own[name].shape)} in the model"
        for name in differ
        if name not in fresh
    ]
    wrong += [f"{name}: not in the file" for name in own if name not in saved]
    wrong += [f"{name}: not in the model" for name in saved if name not in own]
    if wrong:
        shown = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise UsageError(f"--weights {path} are of another model than the one to train: {shown}")
    model.load_state_dict({name: tensor for name, tensor in saved.items() if name not in fresh}, strict=False)
    return fresh


def _head(model: nn.Module) -> list[str]:
    """The names of the last linear layer's weights: what transfer learning replaces."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [f"{layers[-1]}.{part}" for part in ("weight", "bias")] if layers else []

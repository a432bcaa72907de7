"""Files of safetensors: written whole, or piece by piece after their header."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from paceline.run.atomic import replacing

DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.complex64: "C64"},
}


def header(tensors: Iterable[tuple[str, torch.dtype, Sequence[int], int]]) -> bytes:
    """What comes before the tensors, given the name, type, shape and bytes of each; padded for alignment."""
    entries, end = {}, 0
    for name, dtype, shape, size in tensors:
        start, end = end, end + size
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def save(state: dict[str, Tensor], path: Path) -> None:
    """Write all tensors, contiguous, to a file, atomically."""
    with replacing(path) as temporary:
        try:
            save_file(_apart({name: tensor.cpu().contiguous() for name, tensor in state.items()}), temporary)
        except SafetensorError as error:
            number = re.search(r"\(os error (\d+)\)", str(error))
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) if number else error from error


def _apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies of tensors that several layers share, because the format allows no two names for one tensor."""
    seen: set[int] = set()
    for name, tensor in state.items():
        place = tensor.untyped_storage().data_ptr()
        state[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return state

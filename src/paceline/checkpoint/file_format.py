"""The file format of safetensors, for files that are written piece by piece."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch

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

"""Texts and files of tokens: one row of tokens, cut into blocks that are the samples; no torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.data import mini
from paceline.data.mapped import Records, open_bytes
from paceline.data.origins import SHAKESPEARE
from paceline.data.table import DataInfo, Text, describe, text_info
from paceline.errors import DataError

_PIECE = 1 << 22  # tokens that are checked at once
_MOST = 1 << 31  # the largest vocabulary
_UNICODE = 0x110000


def read(name: str, text: Text) -> tuple[DataInfo, list[NDArray[Any]], list[Records] | None]:
    """The description; training inputs and targets, test inputs and targets; and where they are in the file.

    The arrays have a sample in each row. They are views of one row of tokens, which is mapped where the file has it.
    """
    raw = open_bytes(text.path) if text.path else np.frombuffer(mini.read(SHAKESPEARE), np.uint8)
    if not raw.size:
        raise DataError(f"{text.path} is empty (0 bytes)")
    tokens, vocabulary = _tokens(text, raw)
    info = describe(name) or text_info(name, text, len(tokens), vocabulary, f"your own {text.kind}")
    arrays, records = [], []
    for start, count in ((0, info.train), (text.cut(len(tokens)), info.test)):
        for first in (start, start + 1):  # inputs, and the token after each
            arrays.append(tokens[first : first + count * text.block].reshape(count, text.block))
            if text.path and text.mapped:
                each = text.block * tokens.itemsize
                where = Records(text.path, first * tokens.itemsize, each, count, info.shape, tokens.dtype.name)
                records.append(where)
    return info, arrays, records or None


def _tokens(text: Text, raw: NDArray[np.uint8]) -> tuple[NDArray[Any], int]:
    """All tokens, and the size of the vocabulary."""
    if text.kind == "tokens":
        return _integers(text, raw)
    return (raw, 256) if text.level == "bytes" else _characters(text, raw)


def _integers(text: Text, raw: NDArray[np.uint8]) -> tuple[NDArray[Any], int]:
    dtype = np.dtype(text.dtype).newbyteorder("<")
    if raw.size % dtype.itemsize:
        raise DataError(
            f"{text.path} has {raw.size} bytes, which is not a multiple of the {dtype.itemsize} bytes of {text.dtype}: "
            f"it is damaged, or has another dtype"
        )
    tokens, largest, limit = raw.view(dtype), 0, text.vocabulary or _MOST
    for start in range(0, len(tokens), _PIECE):
        piece = tokens[start : start + _PIECE]
        least, most = int(piece.min()), int(piece.max())
        if least < 0 or most >= limit:
            wrong = int(np.argmax((piece < 0) | (piece >= limit)))
            raise DataError(
                f"{text.path} has the token {piece[wrong]} at position {start + wrong}, but tokens must be from 0 to "
                f"{limit - 1}: give the right dtype and vocabulary"
            )
        largest = max(largest, most)
    return tokens, text.vocabulary or largest + 1


def _characters(text: Text, raw: NDArray[np.uint8]) -> tuple[NDArray[Any], int]:
    """The characters as their positions in the sorted set of all characters of the text."""
    try:
        codes = np.frombuffer(raw.tobytes().decode("utf-8").encode("utf-32-le"), "<u4")
    except UnicodeDecodeError as why:
        raise DataError(
            f"{text.path} is not UTF-8: it has the byte 0x{raw[why.start]:02x} at position {why.start} ({why.reason}); "
            f"convert it, or use level=bytes"
        ) from why
    present = np.zeros(_UNICODE, bool)
    present[codes] = True
    vocabulary = np.flatnonzero(present)
    number = np.zeros(_UNICODE, np.min_scalar_type(len(vocabulary) - 1))
    number[vocabulary] = np.arange(len(vocabulary))
    return number[codes], len(vocabulary)

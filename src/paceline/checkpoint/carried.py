"""A checkpoint that goes from the memory of one rank to that of others, without a disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.file_format import DTYPES
from paceline.checkpoint.load import TORCH, Checkpoint
from paceline.checkpoint.manifest import Damaged, Manifest, Part, Piece, checksum
from paceline.checkpoint.save import Held
from paceline.comm.base import Comm
from paceline.comm.words import tell
from paceline.data.course import Position
from paceline.strict_json import build, dump, parse


class Carried(Checkpoint):
    """The state of one rank."""

    def __init__(self, manifest: Manifest, values: Mapping[str, Tensor]) -> None:
        super().__init__(Path("memory"), manifest)
        self._memory = values

    @classmethod
    def pack(cls, held: Iterable[Held], position: Position, facts: Mapping[str, Any]) -> Carried:
        """What this rank has, where it lies if its values are in one piece."""
        pieces, values = list[Piece](), dict[str, Tensor]()
        for each in held:
            flat = values[each.name] = each.values().contiguous().view(-1)
            pieces.append(Piece(each.name, DTYPES[flat.dtype], each.shape, each.start, each.start + len(flat), 0,
                                _checksum(flat), each.order, each.own))  # fmt: skip
        part = Part(0, "", 0, 0, "", tuple(pieces))
        return cls(Manifest(position, {}, {}, (part,), dict(facts)), values)

    def _values(self, part: Part, piece: Piece) -> Tensor:
        return self._memory[piece.name]


def carry(mine: Carried | None, comm: Comm, tick: Callable[[], object] = lambda: None) -> Carried:
    """Rank 0 gives what it has to all others, which have none. They use it when all has arrived unchanged.

    `tick` is called for every tensor.
    """
    text = tell(dump(asdict(mine.manifest)) if mine else "", comm)
    manifest = mine.manifest if mine else build(Manifest, parse(text))
    values = dict[str, Tensor]()
    for piece in manifest.parts[0].pieces:
        tick()
        flat = mine._memory[piece.name] if mine else torch.empty(piece.stop - piece.start, dtype=TORCH[piece.dtype])
        if math.prod(flat.shape):
            comm.broadcast(flat)
        if mine is None and _checksum(flat) != piece.checksum:
            raise Damaged(f"{piece.name} has changed on its way from rank {comm.name(0)} to rank {comm.name()}")
        values[piece.name] = flat
    return Carried(manifest, values)


def _checksum(flat: Tensor) -> str:
    return checksum(flat.detach().view(torch.uint8).numpy().data) if len(flat) else ""

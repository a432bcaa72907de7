"""Reads tensors of a checkpoint by name, whoever wrote them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from paceline.checkpoint.file_format import DTYPES
from paceline.checkpoint.manifest import Damaged, Manifest, Part, Piece, checksum, verify

TORCH = {name: dtype for dtype, name in DTYPES.items()}


class Checkpoint:
    """A complete checkpoint. Nothing in it is ever unpickled."""

    def __init__(self, folder: Path, manifest: Manifest | None = None) -> None:
        self.folder, self.manifest = folder, manifest or verify(folder)

    def __contains__(self, name: str) -> bool:
        return name in self.manifest.tensors

    def under(self, prefix: str) -> Iterator[str]:
        """The names of tensors that begin so, without the prefix."""
        return (name.removeprefix(prefix) for name in self.manifest.tensors if name.startswith(prefix))

    def tensor(self, name: str, rank: int | None = None) -> Tensor:
        """A whole tensor. Of one that differs between ranks, the values of `rank`; without a rank, the mean.

        (Whole numbers, such as counts of batches, have no mean: they are those of the last rank.)
        """
        pieces = self.manifest.tensors[name]
        own = {part.rank: (part, piece) for part, piece in pieces if piece.own}
        if not own:
            shape, order = pieces[0][1].shape, pieces[0][1].order
            return shaped(self.read(name, 0, math.prod(shape), order), shape, order)
        if rank in own:
            return self._whole(*own[rank])
        last = self._whole(*own[max(own)])
        if not last.is_floating_point():
            return last
        change = sum((self._whole(*each) - last for each in own.values()), torch.zeros_like(last))
        return last + (change / len(own)).masked_fill_(change.isnan(), 0.0)  # infinities are constants

    def read(self, name: str, start: int, stop: int, order: tuple[int, ...] = ()) -> Tensor:
        """The values from `start` to `stop` of a tensor with its dimensions in this order, flattened."""
        pieces = [(part, piece) for part, piece in self.manifest.tensors[name] if not piece.own]
        shape, stored = pieces[0][1].shape, pieces[0][1].order
        if any(piece.order != stored for _, piece in pieces):
            raise Damaged(f"{self.folder} has pieces of {name} that do not fit together")
        if order != stored:
            whole = shaped(self.read(name, 0, math.prod(shape), stored), shape, stored)
            return whole.permute(order or tuple(range(len(shape)))).reshape(-1)[start:stop]
        flat, filled = torch.empty(stop - start, dtype=TORCH[pieces[0][1].dtype]), 0
        for part, piece in pieces:
            first, last = max(start, piece.start), min(stop, piece.stop)
            if first < last:
                values = self._values(part, piece)
                flat[first - start : last - start] = values[first - piece.start : last - piece.start]
                filled += last - first
        if filled != stop - start:
            raise Damaged(f"{self.folder} has {filled:,} of {stop - start:,} values of {name}")
        return flat

    def _whole(self, part: Part, piece: Piece) -> Tensor:
        return shaped(self._values(part, piece), piece.shape, piece.order)

    def _values(self, part: Part, piece: Piece) -> Tensor:
        dtype = TORCH[piece.dtype]
        size = (piece.stop - piece.start) * dtype.itemsize
        data = bytearray(size)
        with (self.folder / part.file).open("rb") as file:
            file.seek(piece.offset)
            done = file.readinto(data)
        if done != size or checksum(memoryview(data)) != piece.checksum:
            raise Damaged(f"{self.folder / part.file} is damaged: the checksum of {piece.name} is wrong")
        return torch.frombuffer(data, dtype=dtype) if size else torch.empty(0, dtype=dtype)


def shaped(flat: Tensor, shape: tuple[int, ...], order: tuple[int, ...]) -> Tensor:
    """Flat values in this order of dimensions as a tensor of this shape."""
    if not order:
        return flat.view(shape)
    back = sorted(range(len(order)), key=lambda dim: order[dim])
    return flat.view([shape[dim] for dim in order]).permute(back)

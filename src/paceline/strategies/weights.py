"""Saves and loads weights as safetensors under the model's own names, also of a model in parts on many ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from paceline.checkpoint.file_format import header
from paceline.comm.base import Comm
from paceline.comm.words import all_or_none
from paceline.errors import UsageError, refuse_pipe
from paceline.run.atomic import replacing

MESSAGE = 16 << 20  # bytes: the largest message


@dataclass(frozen=True)
class Piece:
    """The part of a tensor that a rank has: from `start` to `stop` along one dimension. A scalar has one row."""

    rank: int
    dim: int
    start: int
    stop: int


def save_parts(
    path: Path,
    whole: Mapping[str, Tensor],
    pieces: Mapping[str, Sequence[Piece]],
    own: Mapping[str, Tensor],
    comm: Comm,
) -> None:
    """Write a model that is in parts on many ranks to one file, atomically; all ranks call it.

    `whole` has the shapes and types of all tensors, `pieces` which rank has which piece, `own` this rank's pieces.
    Rank 0 writes, with at most MESSAGE bytes of other ranks' pieces in memory; on return, on any rank, the file exists.
    """
    names = sorted(whole, key=lambda name: (-whole[name].itemsize, name))  # aligned, and the same on every rank
    for name in names:
        for piece in pieces[name]:
            if piece.rank == comm.rank:
                _check(name, whole[name], piece, own[name])
    spans = [span for name in names for span in _spans(name, whole[name], pieces[name])]
    largest = max((span.nbytes for span in spans), default=0)
    room = torch.empty(largest, dtype=torch.uint8, device=comm.device)  # allocated once, against fragmentation
    if comm.rank:
        for span in _in_step(spans, comm):
            _send(span, own, room, comm)
        all_or_none(lambda: None, comm)
        return
    with ExitStack() as writing:
        temporary = writing.enter_context(replacing(path))
        with temporary.open("wb") as file:
            file.write(header((name, whole[name].dtype, whole[name].shape, whole[name].nbytes) for name in names))
            desk = torch.empty(largest, dtype=torch.uint8)
            for span in _in_step(spans, comm):
                lines = desk[: span.nbytes].view(span.lines, -1)
                _gather(span, own, room, lines, comm)
                file.write(lines.numpy().data)
        all_or_none(writing.pop_all().close, comm)


def _check(name: str, whole: Tensor, piece: Piece, tensor: Tensor) -> None:
    shape = list(whole.shape)
    if shape:
        shape[piece.dim] = piece.stop - piece.start
    has = (list(tensor.shape), tensor.dtype)
    assert has == (shape, whole.dtype), f"{name}: rank {piece.rank} has {has} where {(shape, whole.dtype)} is expected"


@dataclass(frozen=True)
class _Span:
    """Rows of a tensor that are written at once: lines of bytes, each with all pieces one after another.

    If the tensor is divided by rows, its rows are one line of one piece.
    """

    name: str
    rows: range
    lines: int
    pieces: tuple[Piece, ...]
    widths: tuple[int, ...]  # bytes that each piece has of a line

    @property
    def nbytes(self) -> int:
        return self.lines * sum(self.widths)


def _spans(name: str, tensor: Tensor, pieces: Sequence[Piece]) -> Iterator[_Span]:
    shape, dim = tuple(tensor.shape) or (1,), pieces[0].dim
    ordered = tuple(sorted((piece for piece in pieces if piece.start < piece.stop), key=lambda piece: piece.start))
    edges = [0, *(piece.stop for piece in ordered)]
    fits = [piece.start for piece in ordered] == edges[:-1] and edges[-1] == shape[dim]
    assert fits, f"{name}: {ordered} do not make up {shape}"
    if not tensor.nbytes:
        return
    row = tensor.nbytes // shape[0]
    step = max(1, MESSAGE // 2 // row)  # received bytes are in memory twice, as a message and in their lines
    if dim == 0:
        for piece in ordered:
            for start in range(piece.start, piece.stop, step):
                rows = range(start, min(start + step, piece.stop))
                yield _Span(name, rows, 1, (piece,), (len(rows) * row,))
    else:
        inner = math.prod(shape[dim + 1 :]) * tensor.itemsize
        widths = tuple((stop - start) * inner for start, stop in pairwise(edges))
        for start in range(0, shape[0], step):
            rows = range(start, min(start + step, shape[0]))
            yield _Span(name, rows, len(rows) * math.prod(shape[1:dim]), ordered, widths)


def _in_step(spans: Sequence[_Span], comm: Comm) -> Iterator[_Span]:
    """The spans, with a barrier now and then, so that no rank waits for its turn beyond the timeout."""
    passed = 0
    for span in spans:
        yield span
        passed += span.nbytes
        if passed >= MESSAGE:
            comm.barrier()
            passed = 0


def _send(span: _Span, own: Mapping[str, Tensor], room: Tensor, comm: Comm) -> None:
    for piece in span.pieces:
        if piece.rank == comm.rank:
            for message in _bytes(own[span.name], span.rows, piece, room).split(MESSAGE):
                comm.send(message, 0)


def _gather(span: _Span, own: Mapping[str, Tensor], room: Tensor, lines: Tensor, comm: Comm) -> None:
    for piece, place in zip(span.pieces, lines.split(span.widths, 1), strict=True):
        if piece.rank == comm.rank:
            part = _bytes(own[span.name], span.rows, piece, room)
        else:
            part = room[: place.numel()]
            for message in part.split(MESSAGE):
                comm.recv(message, piece.rank)
        place.copy_(part.view(place.shape))


def _bytes(tensor: Tensor, rows: range, piece: Piece, room: Tensor) -> Tensor:
    """The bytes of these rows of a piece: in place if they are contiguous, otherwise copied to `room`."""
    first = piece.start if piece.dim == 0 else 0
    part = tensor.detach() if tensor.dim() else tensor.detach().view(1)
    part = part[rows.start - first : rows.stop - first]
    if not part.is_contiguous() or part.device != room.device:
        part = room[: part.nbytes].view(part.dtype).view(part.shape).copy_(part)
    return part.view(-1).view(torch.uint8)


def start_from(model: nn.Module, path: str) -> list[str]:
    """Load weights, except a last layer for another number of classes; return the names that were not loaded."""
    own = model.state_dict()
    values, fresh = start_values(path, own, head_of(model), own.keys())
    model.load_state_dict(dict(values), strict=False)
    return fresh


def start_values(
    path: str, whole: Mapping[str, Tensor], head: Collection[str], wanted: Collection[str]
) -> tuple[Iterator[tuple[str, Tensor]], list[str]]:
    """The wanted tensors of a file, read one by one, and the names of the model's tensors that it does not have.

    The file must have all tensors of the whole model, which may be on the meta device, except a `head` for another
    number of classes.
    """
    refuse_pipe(path, "--weights")
    try:
        with safe_open(path, "pt") as file:
            saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise UsageError(f"--weights {path} cannot be read as safetensors: {error}") from error
    own = {name: tuple(tensor.shape) for name, tensor in whole.items()}
    differ = [name for name in own if name in saved and saved[name] != own[name]]
    fresh = [name for name in differ if name in head]
    wrong = [f"{name}: {saved[name]} in the file, {own[name]} in the model" for name in differ if name not in fresh]
    wrong += [f"{name}: not in the file" for name in own if name not in saved]
    wrong += [f"{name}: not in the model" for name in saved if name not in own]
    if wrong:
        shown = "; ".join(wrong[:4]) + (f"; and {len(wrong) - 4} more" if len(wrong) > 4 else "")
        raise UsageError(f"--weights {path} is the file of another model: {shown}")
    return _read(path, [name for name in own if name in wanted and name not in fresh]), fresh


def _read(path: str, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
    with safe_open(path, "pt") as file:
        for name in names:
            yield name, file.get_tensor(name).clone()  # get_tensor returns a view of the mapped file


def head_of(model: nn.Module) -> list[str]:
    """The names of the last linear layer's weights, which transfer learning replaces."""
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    return [f"{layers[-1]}.{part}" for part in ("weight", "bias")] if layers else []

"""What a checkpoint consists of. The manifest names every file and says which tensor lies where; no torch.

    checkpoints/step_1200/part_0.safetensors, part_1.safetensors, …    each rank's own part
                          manifest.json                                written last

The names of tensors do not depend on how the training was divided: `model.NAME`, `optimizer.NAME.KEY`, `best.NAME`
(the weights of the best epoch so far). A tensor may be in pieces on several ranks. Values that differ between ranks,
such as batch-norm statistics and random states, are there once for each rank.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from paceline.data.course import Position
from paceline.errors import UsageError
from paceline.run.atomic import write_whole
from paceline.strict_json import Count, Ranks, Seconds, build, dump, parse, read_text

MANIFEST = "manifest.json"
SCHEMA = 2
STEP = re.compile(r"step_(\d+)")
# Bytes of a file that are read at once to check them.
BLOCK = 8 << 20


class Damaged(UsageError):
    """A checkpoint that cannot be used: a file is missing, cut short, or has other bytes than were written."""


@dataclass(frozen=True)
class Piece:
    """Values of a tensor in a rank's file.

    They are the values from `start` to `stop` of the tensor with its dimensions in this `order`, flattened. An empty
    order is the tensor's own. `own`: the tensor differs between ranks, and these are the values of this one.
    """

    name: str
    dtype: str  # as safetensors calls it
    shape: tuple[Count, ...]  # of the whole tensor
    start: Count
    stop: Count
    offset: Count  # in the file
    checksum: str
    order: tuple[Count, ...] = ()
    own: bool = False


@dataclass(frozen=True)
class Part:
    """What one rank wrote: its file, the tensors in it, and its own facts."""

    rank: Ranks
    file: str
    bytes: Count
    head: Count  # bytes before the first tensor
    checksum: str  # of the head
    pieces: tuple[Piece, ...]
    facts: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Manifest:
    """A checkpoint: where the training was, the options it had, and all its parts."""

    position: Position
    options: dict[str, Any]  # of the run, by name
    division: dict[str, Any]  # how the work was divided over ranks
    parts: tuple[Part, ...]
    facts: dict[str, Any] = field(default_factory=dict)
    time: Seconds = 0.0
    version: str = ""
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @cached_property
    def tensors(self) -> Mapping[str, list[tuple[Part, Piece]]]:
        """Every tensor's pieces."""
        found: dict[str, list[tuple[Part, Piece]]] = {}
        for part in self.parts:
            for piece in part.pieces:
                found.setdefault(piece.name, []).append((part, piece))
        return found


def checksum(data: bytes | memoryview) -> str:
    """XXH3, 128 bits: here 20 GB/s, of which zlib's crc32 has a fifth and SHA-256 a twelfth."""
    return xxhash.xxh3_128_hexdigest(data)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = dump(asdict(manifest))
    write_whole(folder / MANIFEST, f"{text}\n{checksum(text.encode())}\n")


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint, if no byte of it has changed. Raises Damaged."""
    path = folder / MANIFEST
    try:
        text, _, end = read_text(path).partition("\n")
    except FileNotFoundError:
        raise Damaged(f"{folder} is not a complete checkpoint: it has no {MANIFEST}") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from error
    if end != checksum(text.encode()) + "\n":
        raise Damaged(f"{path} is damaged: its checksum is wrong")
    values = parse(text)
    if values.get("schema") != SCHEMA:
        raise Damaged(f"{folder} has schema {values.get('schema')}, and this version of paceline reads {SCHEMA}: "
                      f"it was written by paceline {values.get('version')}")  # fmt: skip
    manifest = build(Manifest, values)
    if any(Path(part.file).name != part.file for part in manifest.parts):
        raise Damaged(f"{path} names files that are not beside it")
    return manifest


def verify(folder: Path) -> Manifest:
    """Read every byte of a checkpoint and compare checksums. Raises Damaged, which names the file."""
    manifest = read_manifest(folder)
    for part in manifest.parts:
        path = folder / part.file
        try:
            with path.open("rb") as file:
                _check_file(path, file.fileno(), part)
        except OSError as error:
            raise Damaged(f"{path} cannot be read: {error.strerror}") from error
    return manifest


def _check_file(path: Path, descriptor: int, part: Part) -> None:
    size = os.fstat(descriptor).st_size
    if size != part.bytes:
        raise Damaged(f"{path} is damaged: it has {size:,} bytes instead of {part.bytes:,}")
    ends = [piece.offset for piece in part.pieces[1:]] + [part.bytes]
    spans = [(0, part.head, part.checksum, "its header")]
    spans += [(each.offset, end, each.checksum, each.name) for each, end in zip(part.pieces, ends, strict=True)]
    for start, end, expected, name in spans:
        digest = xxhash.xxh3_128()
        for place in range(start, end, BLOCK):
            digest.update(os.pread(descriptor, min(BLOCK, end - place), place))
        if digest.hexdigest() != expected:
            raise Damaged(f"{path} is damaged: the checksum of {name} is wrong")


def checkpoint_folder(parent: Path, step: int) -> Path:
    return parent / f"step_{step}"


def step_of(folder: Path) -> int:
    match = STEP.fullmatch(folder.name)
    assert match, folder
    return int(match[1])


def checkpoints(parent: Path) -> list[Path]:
    """The folders of checkpoints, the latest first; each was complete when it was given its name."""
    try:
        names = os.listdir(parent)
    except OSError:
        return []
    return sorted((parent / name for name in names if STEP.fullmatch(name)), key=step_of, reverse=True)


def latest(parent: Path) -> tuple[Path, Manifest, list[Damaged]] | None:
    """The newest checkpoint that is complete and undamaged, with what is wrong with the newer ones."""
    wrong: list[Damaged] = []
    for folder in checkpoints(parent):
        try:
            return folder, verify(folder), wrong
        except Damaged as damage:
            wrong.append(damage)
    return None


def remove(folder: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that no half of it can be taken for a whole one."""
    doomed = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.old")
    with contextlib.suppress(FileNotFoundError):  # another server was faster
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def remove_old(parent: Path, keep: int) -> None:
    """Remove all but the last `keep` checkpoints."""
    for folder in checkpoints(parent)[keep:]:
        remove(folder)


def remove_unfinished(parent: Path) -> None:
    """Remove what a process left behind when it was killed while it wrote or removed a checkpoint."""
    for left in parent.glob(".step_*"):
        shutil.rmtree(left, ignore_errors=True)

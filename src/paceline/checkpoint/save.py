"""Writes checkpoints: each rank copies its own part, then writes it in a thread while training continues."""

from __future__ import annotations

import contextlib
import errno
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from paceline.checkpoint.file_format import DTYPES, header
from paceline.checkpoint.manifest import (
    BLOCK,
    Manifest,
    Part,
    Piece,
    checkpoint_folder,
    checksum,
    remove,
    remove_old,
    verify,
    write_manifest,
)
from paceline.run.atomic import sync, write_whole
from paceline.run.recorder import Recorder
from paceline.strict_json import build, dump, parse, read_text

POLL_SECONDS = 0.02
MARGIN = 1 << 20  # bytes that a checkpoint leaves free
# Background threads use cores that training leaves idle.
NICE = 10


@dataclass(frozen=True)
class Held:
    """A tensor, or a piece of one, that a rank has: the values from `start` of the whole, as in `Piece`.

    `holders` are the ranks that have the same values, of which one writes them.
    """

    name: str
    tensor: Tensor
    shape: tuple[int, ...]
    start: int = 0
    order: tuple[int, ...] = ()
    holders: tuple[int, ...] = ()
    own: bool = False

    @property
    def key(self) -> str:
        """Its name in the file: a piece has its place in it."""
        return self.name if self.tensor.numel() == math.prod(self.shape) else f"{self.name}@{self.start}"

    def values(self) -> Tensor:
        """The values as they are written; a view, if that is possible."""
        tensor = self.tensor.detach()
        return tensor.permute(self.order) if self.order and tensor.dim() == len(self.order) else tensor


def share_out(held: Iterable[Held], rank: int) -> list[Held]:
    """What this rank writes: what it alone has, and an equal part of the bytes that others have, too.

    Every rank of a group of holders must list the group's tensors in the same order.
    """
    mine, loads = [], dict[tuple[int, ...], dict[int, int]]()
    for each in held:
        if len(each.holders) > 1 and not each.own:
            load = loads.setdefault(each.holders, dict.fromkeys(each.holders, 0))
            writer = min(load, key=lambda holder: (load[holder], holder))
            load[writer] += each.tensor.nbytes
            if writer != rank:
                continue
        mine.append(each)
    return sorted(mine, key=lambda each: -each.tensor.itemsize)  # aligned


@dataclass(frozen=True)
class Saved:
    """How saving a checkpoint ended: `error` if it is not there."""

    step: int
    bytes: int
    seconds: float
    error: str = ""


class Saver:
    """Saves the checkpoints of one rank, one at a time.

    `copy` is called between two steps and takes as long as copying this rank's part in memory; `write` starts a thread
    that writes it. Rank 0's thread waits for the parts of all `writers`, writes the manifest, reads everything again,
    gives the folder its name, and removes old checkpoints. Ranks meet in the file system only.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        writers: Sequence[int],
        keep: int,
        timeout: float,
        recorder: Recorder | None = None,
    ) -> None:
        self.folder, self.rank, self.writers, self.keep, self.timeout = folder, rank, writers, keep, timeout
        self._recorder = recorder
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._pieces: list[tuple[Held, int]] = []
        self._thread: threading.Thread | None = None
        self._wanted: Path | None = None  # the folder of the checkpoint that rank 0 waits for
        self._saved: list[Saved] = []

    @property
    def busy(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def copy(self, held: Iterable[Held]) -> None:
        """Copy this rank's part of the state, into memory that is kept for the next time."""
        self.wait()
        mine = share_out(held, self.rank)
        size = sum(each.tensor.nbytes for each in mine)
        if len(self._memory) < size:
            self._memory = torch.empty(size, dtype=torch.uint8)
        self._pieces, offset = [], 0
        for each in mine:
            values = each.values()
            place = self._memory[offset : offset + values.nbytes]
            if values.nbytes:
                place.view(values.dtype).view(values.shape).copy_(values)
            self._pieces.append((each, offset))
            offset += values.nbytes

    def write(
        self, step: int, mark: str, facts: dict[str, Any], manifest: Callable[[tuple[Part, ...]], Manifest]
    ) -> None:
        """Start to write what was copied; `facts` are this rank's, `manifest` is rank 0's.

        `mark` is the same on all ranks, and another one for each attempt to save.
        """
        if self._recorder:
            self._recorder.flush()  # what was recorded until here must be as safe as the checkpoint
        work = self._wanted = self.folder / f".step_{step}.{mark}"
        self._thread = threading.Thread(
            target=self._run, args=(work, step, facts, manifest), name="paceline-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        if self._thread:
            self._thread.join(seconds)

    def abandon(self) -> None:
        """On rank 0: do not wait for parts that are missing, because a rank was restarted while it wrote its own."""
        self._wanted = None

    def outcome(self) -> Saved | None:
        """How the next one that has ended did so; each is returned once."""
        return self._saved.pop(0) if self._saved else None

    def _run(self, work: Path, step: int, facts: dict[str, Any], manifest: Callable[..., Manifest]) -> None:
        begun, size = time.perf_counter(), sum(held.tensor.nbytes for held, _ in self._pieces)
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        error = ""
        try:
            if self._recorder:
                self._recorder.sync()
            work.mkdir(parents=True, exist_ok=True)
            self._write_part(work, facts)
            if self.rank == 0:
                size = self._complete(work, step, manifest)
        except Exception as failure:  # noqa: BLE001  training continues, and says what happened
            error = self._failed(work, failure, size)
        self._saved.append(Saved(step, size, time.perf_counter() - begun, error))

    def _write_part(self, work: Path, facts: dict[str, Any]) -> None:
        name, memory = f"part_{self.rank}.safetensors", self._memory.numpy().data
        rows = [(held.key, held.tensor.dtype, held.values().shape, held.tensor.nbytes) for held, _ in self._pieces]
        head, end = header(rows), sum(held.tensor.nbytes for held, _ in self._pieces)
        # A disk must not become full, not even for a moment: the run's records need space, too.
        if shutil.disk_usage(work).free < (len(head) + end) * len(self.writers) + MARGIN:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with (work / name).open("wb", buffering=0) as file:
            os.posix_fallocate(file.fileno(), 0, len(head) + end)
            file.write(head)
            for start in range(0, end, BLOCK):
                _write_all(file.fileno(), memory[start : min(start + BLOCK, end)])
            os.fsync(file.fileno())
        pieces = tuple(
            Piece(held.name, DTYPES[held.tensor.dtype], held.shape, held.start, held.start + held.tensor.numel(),
                  len(head) + offset, checksum(memory[offset : offset + held.tensor.nbytes]), held.order, held.own)
            for held, offset in self._pieces
        )  # fmt: skip
        part = Part(self.rank, name, len(head) + end, len(head), checksum(head), pieces, facts)
        write_whole(work / f"part_{self.rank}.json", dump(asdict(part)))

    def _complete(self, work: Path, step: int, manifest: Callable[..., Manifest]) -> int:
        """Wait for all parts; make them a checkpoint. Returns its bytes."""
        deadline, parts = time.monotonic() + self.timeout, []
        for rank in self.writers:
            said, failed = work / f"part_{rank}.json", work / f"part_{rank}.failed"
            while not said.exists():
                if failed.exists():
                    raise OSError(errno.EIO, failed.read_text())
                if self._wanted != work:
                    raise OSError(errno.ECANCELED, f"a rank was restarted before rank {rank} had written its part")
                if time.monotonic() > deadline:
                    raise OSError(errno.ETIMEDOUT, f"rank {rank} has not written its part within {self.timeout:g} s")
                time.sleep(POLL_SECONDS)
            parts.append(build(Part, parse(read_text(said))))
        for rank in self.writers:
            (work / f"part_{rank}.json").unlink()
        write_manifest(work, manifest(tuple(parts)))
        sync(work)
        made = verify(work)
        final = checkpoint_folder(self.folder, step)
        remove(final)  # of an attempt that was superseded
        work.rename(final)
        sync(self.folder)
        remove_old(self.folder, self.keep)
        return made.bytes

    def _failed(self, work: Path, failure: Exception, size: int) -> str:
        """Tell rank 0, which removes what was written; return what happened, in a sentence."""
        what = getattr(failure, "strerror", None) or str(failure) or type(failure).__name__
        if getattr(failure, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(self.folder).free if self.folder.is_dir() else 0
            what = f"{what}: rank {self.rank}'s part needs {size:,} bytes, and {free:,} are free"
        if self.rank == 0:
            shutil.rmtree(work, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                (work / f"part_{self.rank}.safetensors").unlink()
            with contextlib.suppress(OSError):  # rank 0 gives up at its deadline
                (work / f"part_{self.rank}.failed").write_text(f"rank {self.rank}: {what}")
        return what


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]

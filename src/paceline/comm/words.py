"""Short text messages between ranks (never pickles), and errors that are raised on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from paceline.comm.base import Comm
from paceline.errors import AgreedError, UsageError

_TEXT = 4096

T = TypeVar("T")


def share_text(text: str, comm: Comm) -> list[str]:
    """Every rank's text (its first 4096 bytes), in rank order."""
    raw = text.encode(errors="backslashreplace")[:_TEXT]
    table = torch.zeros(comm.size, _TEXT, dtype=torch.int32)
    table[comm.rank, : len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else 0
    table = table.to(comm.device)
    comm.allreduce(table.view(-1))
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in table.tolist()]


def tell(text: str, comm: Comm, root: int = 0) -> str:
    """Broadcast the text of one rank, of any length."""
    raw = bytearray(text.encode())
    length = torch.tensor([len(raw)], dtype=torch.int64, device=comm.device)
    comm.broadcast(length, root)
    count = int(length)
    letters = torch.zeros(count, dtype=torch.uint8)
    if comm.rank == root and raw:
        letters = torch.frombuffer(raw, dtype=torch.uint8)
    letters = letters.to(comm.device)
    if count:
        comm.broadcast(letters, root)
    return bytes(letters.tolist()).decode()


def all_or_none(action: Callable[[], T], comm: Comm) -> T:
    """Do it on every rank; if it is refused on one, raise the first rank's error on all ranks.

    It may take longer than the communicator's timeout: a thread does it, while the ranks keep exchanging messages.
    """
    pool = ThreadPoolExecutor(1, "paceline-all-or-none")
    done = pool.submit(action)
    pool.shutdown(wait=False)
    busy, pause = torch.ones(1, device=comm.device), 0.001
    while busy.item():
        wait([done], pause)
        pause = min(2 * pause, 0.2)
        busy.fill_(not done.done())
        comm.allreduce(busy)
    error = done.exception()
    if error and not isinstance(error, UsageError):
        raise error
    answers = share_text(str(error or ""), comm)
    if any(answers):
        first = next(rank for rank, answer in enumerate(answers) if answer)
        raise AgreedError(answers[first] if all(answers) else f"rank {first}: {answers[first]}")
    return done.result()

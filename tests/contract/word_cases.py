"""Words between ranks, and files that all of them read, as cases that run on each rank."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import torch
from worlds import limited_to

from paceline.comm.base import Comm
from paceline.comm.metered import MeteredComm
from paceline.comm.words import all_or_none, share_text
from paceline.errors import CommError, UsageError


def shares(comm: Comm) -> list[str]:
    return share_text("" if comm.rank == 1 else f"Größe {comm.rank}" * comm.rank, comm)


def cut_short(comm: Comm) -> list[int]:
    return [len(text) for text in share_text("ä" * 2047 + "aä", comm)]


def refuses(comm: Comm, bad: list[int]) -> str:
    def action() -> int:
        if comm.rank in bad:
            raise UsageError(f"no such folder on {comm.rank}")
        return comm.rank

    try:
        return f"done {all_or_none(action, comm)}"
    except UsageError as error:
        return str(error)


def takes_long(comm: Comm) -> bool:
    """One rank works for three times as long as the others would wait for it."""
    with limited_to(comm, 0.3) as short:
        return all_or_none(lambda: short.rank == 1 and not threading.Event().wait(0.9), short)


def reads(comm: Comm, path: str, length: int, offset: int, stride: int, records: int) -> list[bool]:
    """Each rank reads its part of a shuffle, three times: uneven parts, one rank without any, nobody with any."""
    file = np.memmap(path, np.uint8, "r")
    results = []
    for turn in range(3):
        order = torch.from_numpy(np.random.default_rng(turn).permutation(records))
        mine = order[comm.rank :: comm.size + turn]
        if turn == 2 or (turn == 1 and comm.rank == 0):
            mine = mine[:0]
        found = MeteredComm(comm).read_records(Path(path), offset + stride * mine, length)
        expected = [file[offset + stride * n : offset + stride * n + length] for n in mine.tolist()]
        same = found.numpy().tobytes() == b"".join(each.tobytes() for each in expected)
        results.append(same and found.shape == (len(mine), length))
    return results


def reads_beyond(comm: Comm, path: str) -> str:
    try:
        comm.read_records(Path(path), torch.tensor([0, 90]), 20)
    except (CommError, UsageError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def reads_nothing_there(comm: Comm, path: str) -> str:
    try:
        comm.read_records(Path(path), torch.tensor([0]), 1)
    except CommError as error:
        return str(error)
    return "no error"

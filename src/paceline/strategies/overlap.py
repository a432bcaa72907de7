"""Decides whether to average during backward, by measuring: with few cores the two compete for them."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING

from paceline.errors import unknown

if TYPE_CHECKING:
    from paceline.comm.base import Comm

MODES: dict[str, bool | None] = {"auto": None, "on": True, "off": False}
WARM_UP = 3
TRIALS = 20
TRIED = WARM_UP + TRIALS  # steps until `auto` has decided


class OverlapChoice:
    """`on` and `off` are fixed. `auto` tries both in turn for some steps; then rank 0 decides for all ranks."""

    def __init__(self, mode: str, comm: Comm) -> None:
        if mode not in MODES:
            raise unknown("overlap", mode, MODES)
        self.comm, self.chosen = comm, MODES[mode]
        if comm.size == 1 or comm.device.type != "cpu" or not comm.allows_threads:
            # On a GPU, sums are queued after backward on its stream; a thread would not help.
            self.chosen = False
        self._step = 0
        self._times: dict[bool, list[float]] = {True: [], False: []}

    def now(self) -> bool:
        """Whether this step overlaps."""
        return self._step % 2 == 1 if self.chosen is None else self.chosen

    def took(self, seconds: float) -> None:
        """Record how long backward and averaging took in this step."""
        if self.chosen is not None:
            return
        if self._step >= WARM_UP:
            self._times[self.now()].append(seconds)
        self._step += 1
        if self._step == TRIED:
            import torch

            pays = median(self._times[True]) < median(self._times[False])
            vote = torch.tensor([float(pays)])
            self.comm.broadcast(vote)
            self.chosen = bool(vote.item())

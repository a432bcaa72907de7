"""Decides whether to average during backward, by measuring: with few cores the two compete for them."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TYPE_CHECKING

from paceline.errors import unknown

if TYPE_CHECKING:
    from paceline.comm.base import Comm

MODES: dict[str, bool | None] = {"auto": None, "on": True, "off": False}
WARM_UP = 3
TRIALS = 20
TRIED = WARM_UP + TRIALS  # steps until `auto` has decided
MARGIN = 0.01  # by which averaging during backward must be faster: less may be noise


class OverlapChoice:
    """`on` and `off` are fixed. `auto` tries both in turn for some steps; then rank 0 decides for all ranks.

    What is summed in place needs no trial: it is always summed during backward, by the thread that computes.
    """

    def __init__(self, mode: str, comm: Comm) -> None:
        if mode not in MODES:
            raise unknown("overlap", mode, MODES)
        self.comm, self.chosen = comm, MODES[mode]
        if comm.size == 1 or comm.device.type != "cpu" or not comm.allows_threads:
            # On a GPU, sums are queued after backward on its stream; a thread would not help.
            self.chosen = False
        self.say: Callable[[str], object] = lambda _: None  # told what was chosen, and why
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

            vote = torch.tensor([median(self._times[True]) / median(self._times[False])])
            self.comm.broadcast(vote)
            self.chosen = vote.item() < 1 - MARGIN
            self.say(
                f"Overlap {'on' if self.chosen else 'off'}: averaging while backward computes takes {vote.item():.2f} "
                f"times as long as averaging after it"
            )

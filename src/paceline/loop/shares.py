"""Which part of a global batch this rank has: from `shard`, which divides batches, to what weights them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from paceline.loop.nested import tensors_in

NAME = "paceline_share"  # an attribute of the tensors of a batch


@dataclass(frozen=True)
class Share:
    """Samples of this rank, and of all ranks."""

    count: int
    total: int

    def weight(self, ranks: int) -> float:
        """What the mean over this rank's samples counts in a mean over ranks; 1 if all ranks have the same number."""
        return self.count * ranks / self.total


class _Taken(threading.local):  # ranks may be threads
    """The latest share of each loader that is being iterated, the newest last."""

    def __init__(self) -> None:
        self.shares: dict[object, Share] = {}


_TAKEN = _Taken()


def took(share: Share, batch: Any, iteration: object = None) -> None:
    """A loop has got this batch; `iteration` is that of the loader which gave it."""
    _TAKEN.shares.pop(iteration, None)
    _TAKEN.shares[iteration] = share
    for tensor in tensors_in(batch):
        setattr(tensor, NAME, share)


def ended(iteration: object) -> None:
    _TAKEN.shares.pop(iteration, None)


def latest() -> Share | None:
    """That of the batch which this thread got last, if its loader is still being iterated."""
    return next(reversed(_TAKEN.shares.values()), None)


def share_of(values: Any) -> Share | None:
    """That of the batch which these tensors are of; of the latest batch, if they were made from one."""
    own = (getattr(tensor, NAME, None) for tensor in tensors_in(values))
    return next((share for share in own if share), latest())

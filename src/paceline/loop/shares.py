"""Which part of a global batch this rank has: from `shard`, which divides batches, to what weights them."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from torch.utils.weak import WeakIdKeyDictionary

from paceline.loop.nested import tensors_in


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
_BY_TENSOR: Any = WeakIdKeyDictionary()  # of the batches that are still in use


def took(share: Share, batch: Any, iteration: object = None) -> None:
    """A loop has got this batch; `iteration` is that of the loader which gave it."""
    _TAKEN.shares.pop(iteration, None)
    _TAKEN.shares[iteration] = share
    for tensor in tensors_in(batch):
        _BY_TENSOR[tensor] = share


def ended(iteration: object) -> None:
    _TAKEN.shares.pop(iteration, None)


def latest() -> Share | None:
    """That of the batch which this thread got last, if its loader is still being iterated."""
    return next(reversed(_TAKEN.shares.values()), None)


def share_of(values: Any) -> Share | None:
    """That of the batch which these tensors are of.

    If they were made from one, it is the latest batch with as many samples as the first tensor has rows, or else the
    latest.
    """
    tensors = list(tensors_in(values))
    own = next((share for share in map(_BY_TENSOR.get, tensors) if share), None)
    if own or not _TAKEN.shares:
        return own
    rows = len(tensors[0]) if tensors and tensors[0].dim() else 0
    alike = (share for share in reversed(_TAKEN.shares.values()) if max(1, share.count) == rows)
    return next(alike, latest())

"""Which part of the latest global batch this rank has: from `shard`, which divides batches, to what weights them."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Samples of this rank, and of all ranks."""

    count: int
    total: int

    def weight(self, ranks: int) -> float:
        """What the mean over this rank's samples counts in a mean over ranks; 1 if all ranks have the same number."""
        return self.count * ranks / self.total


_LATEST = threading.local()  # ranks may be threads


def latest() -> Share | None:
    """That of the batch which this thread took last from a sharded loader; None if there is no such loader."""
    return getattr(_LATEST, "share", None)


def took(share: Share | None) -> None:
    _LATEST.share = share

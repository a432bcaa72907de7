"""The batch of a rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """This rank's part of a global batch; may be empty."""

    images: Tensor
    labels: Tensor
    global_count: int

"""DataParallel against PyTorch's DistributedDataParallel: the same bits in every gradient of 20 steps.

With two ranks a sum has one order only, so that both must agree exactly, whatever their buckets are.
"""

from __future__ import annotations

from pathlib import Path

import ddp_cases as cases
import pytest
from worlds import Worlds


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("model", "micros", "hooks"),
    [
        ("convolutions", 1, False),
        ("normalised", 1, False),
        ("shared", 1, False),
        ("unused", 1, False),
        ("convolutions", 3, False),  # accumulated: DDP's no_sync, our plain backward
        ("shared", 2, True),
    ],
)
def test_20_steps_equal_ddps_bit_for_bit(
    worlds: Worlds, tmp_path: Path, model: str, micros: int, hooks: bool, dtype: str
) -> None:
    found = worlds.get("gloo", 2).run(
        cases.compare_with_ddp, model=model, dtype=dtype, micros=micros, hooks=hooks, store=str(tmp_path / "store")
    )
    assert found == [[], []]

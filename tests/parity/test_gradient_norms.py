"""The norms of gradients that data-parallel runs record are those of plain autograd."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import norm_cases as cases
import pytest
from parity_cases import train_here, values_for
from raw_lines import raw_lines
from worlds import ThreadWorld

from paceline.strategies.table import TABLE


@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("overlap", ["on", "off"])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("clip", "parts"), [(0.0, 1), (0.01, 1), (0.0, 2)], ids=["plain", "clipped", "accumulated"])
def test_norms_are_those_of_plain_autograd(overlap: str, workers: int, clip: float, parts: int, sharded: bool) -> None:
    ranks = ThreadWorld(workers).run(cases.measure, overlap=overlap, clip=clip, parts=parts, sharded=sharded)
    for measured, wanted in chain.from_iterable(ranks):
        assert measured == tuple(norm and pytest.approx(norm, rel=1e-10) for norm in wanted)
    without = [[own is None for (_, own), _ in steps] for steps in ranks]
    # In the third step the last rank's only sample does not count, and the first of three ranks has none.
    assert without == [[False, False, last, False] for last in ([False, True] if workers == 2 else [True, False, True])]


@pytest.mark.parametrize("overlap", ["on", "off"])
def test_steps_without_an_update_or_with_new_buckets_record_no_norm(overlap: str) -> None:
    wanted = [True, False, True, False, False, True]
    assert ThreadWorld(2).run(cases.measured_after_changes, overlap=overlap) == [wanted] * 2


def recorded(folder: Path, workers: int, **more: Any) -> list[dict[str, list[int]]]:
    """The steps that have each of the norms in a run of 21 steps, by rank."""
    data = "synthetic:1x16x16,train=240,test=30"  # every rank has samples in every step
    values = values_for("mlp-float32", workers, steps=21, test=False, data=data, **more)
    ThreadWorld(workers).run(train_here, folder=str(folder), values=values)
    ranks = [list(raw_lines(folder / f"rank_{rank}.jsonl")) for rank in range(workers)]
    return [{n: [line["step"] for line in lines if n in line] for n in ("norm", "own_norm")} for lines in ranks]


@pytest.mark.parametrize("strategy", [name for name, info in TABLE.items() if info.averaging])
def test_every_tenth_step_has_norms_unless_asked_otherwise(tmp_path: Path, strategy: str) -> None:
    tenth, fourth = ([*range(0, 21, every)] for every in (10, 4))
    assert recorded(tmp_path / "a", 2, strategy=strategy) == [{"norm": tenth, "own_norm": tenth}] * 2
    assert recorded(tmp_path / "b", 2, strategy=strategy, record_norms=4) == [{"norm": fourth, "own_norm": fourth}] * 2
    assert recorded(tmp_path / "c", 2, strategy=strategy, record_norms=0) == [{"norm": [], "own_norm": []}] * 2
    assert recorded(tmp_path / "d", 1, strategy=strategy) == [{"norm": [], "own_norm": []}], "nobody to compare with"

"""Specs of models in parts: what is filled in, and what is refused in words, before any process starts."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.layout import Grid
from paceline.spec import resolve


def test_a_pipeline_is_filled_in_from_its_workers() -> None:
    resolved = resolve(("flag", {"strategy": "pipeline", "workers": 4}))
    spec = resolved.spec
    assert (spec.stages, spec.microbatches, spec.schedule, spec.averaging) == (4, 8, "1f1b", "allreduce")
    assert spec.grid == Grid(1, 4)
    assert spec.update_batch == spec.batch_size
    assert resolved.sources["stages"] == "default for pipeline"
    assert "4 workers (1 replica of 4 stages)" in resolved.introduction()[0]


def test_batches_and_the_learning_rate_follow_replicas() -> None:
    resolved = resolve(("flag", {"strategy": "tensor", "workers": 6, "tensor": 2, "batch_size": 10}))
    assert resolved.spec.grid == Grid(3, 1, 2)
    assert resolved.spec.update_batch == 30
    assert "6 workers (3 replicas of 2 shards): 3 x batch 10 = global batch 30" in resolved.introduction()[0]


def test_a_small_batch_has_as_many_micro_batches_as_samples() -> None:
    assert resolve(("flag", {"strategy": "pipeline", "batch_size": 3})).spec.microbatches == 3


PIPELINE = {"strategy": "pipeline", "workers": 4}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"stages": 2}, "strategy sequential, the default for the workers, has no --stages: .*use --strategy pipeline$"),
    ({"strategy": "tensor", "stages": 2}, "strategy tensor has no --stages: leave it out"),
    ({**PIPELINE, "tensor": 2}, "strategy pipeline has no --tensor: leave it out, or use --strategy tensor"),
    ({**PIPELINE, "stages": 3}, "--workers 4 with --stages 3: .*a multiple of 3"),
    ({"strategy": "tensor", "workers": 3, "tensor": 2}, "--workers 3 with --tensor 2"),
    ({"workers": 2, "microbatches": 4}, "has no --microbatches: .*use --strategy sequential or pipeline"),
    ({**PIPELINE, "microbatches": 9, "batch_size": 8}, "--microbatches 9 of a batch of 8: give at most 8"),
    ({"microbatches": 9, "batch_size": 8}, "--microbatches 9 of a batch of 8: give at most 8"),
    ({"microbatches": 2, "compute": "emulated:0.1"}, "--microbatches 2 with --compute emulated:0.1"),
    ({**PIPELINE, "transport": "threads", "recompute": True}, "--recompute with --transport threads and dropout"),
    ({"workers": 2, "averaging": "ring"}, "has no --averaging: .*use --strategy local-sgd, pipeline or tensor"),
    ({"strategy": "ps-sync", "averaging": "ring"}, "strategy ps-sync has no --averaging"),
    ({**PIPELINE, "schedule": "gpip"}, "did you mean 'gpipe'"),
    ({**PIPELINE, "read": "scatter"}, "--read scatter with pipeline: .*use --read own"),
    ({**PIPELINE, "sync_batchnorm": True}, "strategy pipeline has no --sync-batchnorm"),
    ({**PIPELINE, "overlap": "on"}, "strategy pipeline has no --overlap"),
    ({**PIPELINE, "device": "cuda"}, "only on CPUs"),
    ({**PIPELINE, "compute": "emulated:0.1", "memory": "1GB"}, "--memory 1GB with --compute emulated:0.1: no layer is"),
    ({**PIPELINE, "memory": "1GB,2GB"}, "--memory 1GB,2GB has 2 values for 4 stages: give one for all, or 4"),
    ({**PIPELINE, "memory": "plenty"}, "--memory is 'plenty'"),
    ({**PIPELINE, "speed": "0"}, "--speed is '0'"),
    (
        {"strategy": "ring", "workers": 2, "cut": "layers"},
        "strategy ring has no --cut: leave it out, or use --strategy pipeline",
    ),
    ({"strategy": "tensor", "recompute": True}, "strategy tensor has no --recompute"),
]


@pytest.mark.parametrize(("values", "words"), WRONG, ids=lambda v: str(v)[:60])
def test_what_cannot_be_is_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        resolve(("flag", values))


def test_every_rank_of_a_grid_has_a_place_and_its_fellows() -> None:
    grid = Grid(replicas=2, stages=3, shards=2)
    spots = [grid.spot(rank) for rank in range(12)]
    assert len(set(spots)) == 12
    assert [grid.rank(s.replica, s.stage, s.shard) for s in spots] == list(range(12))
    assert grid.shards_of(9) == [8, 9]
    assert grid.replicas_of(9) == [3, 9]

"""A language model in stages, with its output layer tied to its embedding, trains what a plain loop trains."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import language_cases as cases
import pytest
from worlds import Worlds

SETTINGS = [
    ("threads", "gpt", 1, 2, "1f1b", False),
    ("threads", "gpt", 1, 2, "gpipe", True),
    ("threads", "gpt", 1, 3, "1f1b", True),
    ("gloo", "gpt", 1, 3, "gpipe", False),
    ("mpi", "gpt", 1, 4, "1f1b", False),
    ("threads", "gpt", 2, 2, "1f1b", False),
    ("gloo", "gpt", 2, 2, "gpipe", True),
    ("threads", "tied", 1, 3, "1f1b", True),
]


@pytest.mark.parametrize(("transport", "model", "replicas", "stages", "schedule", "recompute"), SETTINGS)
def test_stages_train_the_language_model_of_the_plain_loop(
    worlds: Worlds,
    tmp_path: Path,
    transport: str,
    model: str,
    replicas: int,
    stages: int,
    schedule: str,
    recompute: bool,
) -> None:
    world = worlds.get(transport, replicas * stages)
    arguments = {"model": model, "stages": stages, "schedule": schedule, "recompute": recompute}
    found = world.run(cases.train_in_stages, folder=str(tmp_path), **arguments)
    assert found[0]["losses"] <= 1e-9
    assert found[0]["weights"] <= 1e-10
    check_copies(found, model, replicas, stages)


@pytest.mark.parametrize("averaging", ["ring", "reduce-bcast", "gather"])
def test_copies_have_the_same_bits_with_every_averaging(worlds: Worlds, tmp_path: Path, averaging: str) -> None:
    """Three replicas: sums of three numbers depend on their order."""
    arguments = {"model": "gpt", "stages": 2, "averaging": averaging}
    found = worlds.get("threads", 6).run(cases.train_in_stages, folder=str(tmp_path), **arguments)
    assert found[0]["weights"] <= 1e-10
    check_copies(found, "gpt", 3, 2)


def check_copies(found: list[dict], model: str, replicas: int, stages: int) -> None:  # type: ignore[type-arg]
    """All stages that use a weight have it, with the same bits; one of them writes it."""
    names = {"gpt": ["tokens.weight"], "tied": ["embed.weight", "logits.weight"]}[model]
    using = {"gpt": [0, stages - 1], "tied": [0, 1, 2]}[model]
    ranks = [replica * stages + stage for replica in range(replicas) for stage in using]
    for name in names:
        assert [rank for rank, mine in enumerate(found) if name in mine["digests"]] == ranks
        assert all(found[rank]["holders"][name] == ranks for rank in ranks)
    every = {name for mine in found for name in mine["digests"]}
    for name in every:
        assert len({mine["digests"][name] for mine in found if name in mine["digests"]}) == 1, name
    written = Counter(name for mine in found for name in mine["writes"])
    assert set(written.values()) == {1}
    assert {name.removeprefix("model.") for name in written if name.startswith("model.")} == every

"""Every synchronous strategy trains the model that one process with the global batch trains."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import parity_cases as cases
import pytest
from parity_cases import SETTINGS, STEPS, distance, values_for
from safetensors.torch import load_file
from worlds import TRANSPORTS, ThreadWorld, Worlds

from paceline.strategies.table import TABLE

AVERAGINGS = [name for name, info in TABLE.items() if info.averaging]


# A world of one has no transport: it is the same on all.
@pytest.mark.parametrize(("transport", "workers"), [("single", 1), *product(TRANSPORTS, (2, 3, 4))])
@pytest.mark.parametrize("averaging", AVERAGINGS)
def test_workers_train_the_sequential_model(
    worlds: Worlds, sequential: Any, tmp_path: Path, transport: str, workers: int, averaging: str
) -> None:
    world = worlds.get(transport, workers)
    # Three workers have every setting, two and four each a half of them.
    chosen = dict(list(SETTINGS.items())[{2: 0, 4: 1}.get(workers, 0) :: 2 if workers in (2, 4) else 1])
    for setting, (_, tolerance) in chosen.items():
        folder = tmp_path / setting
        values = values_for(setting, workers, strategy=averaging)
        assert world.run(cases.train_here, folder=str(folder), values=values) == [STEPS] * workers
        assert distance(load_file(folder / "model.safetensors"), sequential(setting)) <= tolerance, setting


def test_another_seed_trains_another_model(sequential: Any) -> None:
    for setting, (_, tolerance) in SETTINGS.items():
        assert distance(sequential(setting), sequential(setting, seed=1)) > 1000 * tolerance, setting


@pytest.mark.parametrize(
    "more",
    [
        {"overlap": "on", "bucket_mb": 0.01},
        {"overlap": "auto", "bucket_mb": 0.05},
        {"read": "scatter"},
        {"check_replicas": 3},
        {"validation": 0.25},
    ],
    ids=lambda more: "-".join(f"{k}={v}" for k, v in more.items()),
)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_options_that_must_not_change_the_result_do_not(
    worlds: Worlds, tmp_path: Path, transport: str, more: dict[str, Any]
) -> None:
    world = worlds.get(transport, 3)
    for setting in ("shallow-cnn-adam", "tiny-norm-sgd"):
        alone = values_for(setting, 1, strategy="sequential") | {"sync_batchnorm": False}
        alone |= {k: v for k, v in more.items() if k == "validation"}
        (steps,) = ThreadWorld(1).run(cases.train_here, folder=str(tmp_path / setting / "1"), values=alone)
        together = values_for(setting, 3, strategy="ring", **more)
        assert world.run(cases.train_here, folder=str(tmp_path / setting / "3"), values=together) == [steps] * 3
        one, three = (load_file(tmp_path / setting / n / "model.safetensors") for n in ("1", "3"))
        assert distance(one, three) <= 1e-12

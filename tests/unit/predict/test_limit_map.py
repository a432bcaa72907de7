"""A map has a cause for each number of workers and link; many workers of servers follow from few."""

from __future__ import annotations

import pytest
from made_up import steady, write_run

from paceline.predict.fit import PRIOR, Fit
from paceline.predict.limit_map import can_be_mapped, columns, limit_map
from paceline.predict.limits import COMPUTE, LINK, SERVER
from paceline.predict.noise import Noise
from paceline.predict.probes import Probe, read_probes, shape_of


@pytest.fixture(scope="module")
def probe(tmp_path_factory: pytest.TempPathFactory) -> Probe:
    folder = tmp_path_factory.mktemp("runs") / "one"
    write_run(folder, steady(0.1, 60), spec={"model": "mnist-cnn", "data": "mnist", "bucket_mb": 4.0})
    (found,) = read_probes([folder])
    return found


@pytest.fixture(scope="module")
def fit(probe: Probe) -> Fit:
    costs = {"ring": PRIOR, "servers": PRIOR}
    return Fit(shape_of(probe), 0.1 / 32, 0.0, 0.0, Noise(0.0, 0.0), 0.0, costs, {}, {}, emulated=False)


@pytest.mark.parametrize(
    ("most", "found"),
    [(1, [1, 2]), (2, [1, 2]), (6, [1, 2, 4, 8]), (128, [2**n for n in range(8)]), (1024, [1, 4, 16, 64, 256, 1024])],
)
def test_columns_are_powers_of_two_and_not_too_many(most: int, found: list[int]) -> None:
    assert columns(most) == found


def test_slow_links_limit_many_workers_and_computing_limits_one(fit: Fit, probe: Probe) -> None:
    found = limit_map(fit, [probe], "ring", [1, 4], {}, [1e7, 1e11])
    said = {(cell.workers, cell.rate): cell.limit.cause for cell in found.cells}
    assert said == {(1, 1e7): COMPUTE, (1, 1e11): COMPUTE, (4, 1e7): LINK, (4, 1e11): COMPUTE}
    assert all("links that were not measured" in cell.beyond for cell in found.cells if cell.workers > 1)


def test_each_further_worker_of_a_server_costs_the_same(fit: Fit, probe: Probe) -> None:
    found = limit_map(fit, [probe], "ps-sync", [4, 8, 64], {}, [1e8])
    four, eight, many = (cell.limit for cell in found.cells)
    assert many.cause == SERVER
    assert many.seconds == pytest.approx(eight.saved[SERVER] + 14 * (eight.saved[SERVER] - four.saved[SERVER]))


def test_some_strategies_have_no_map() -> None:
    assert can_be_mapped("ring")
    assert not can_be_mapped("sequential")
    assert not can_be_mapped("ps-async")

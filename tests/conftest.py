"""One world of ranks per (transport, size) and one sequential training per setting, for the whole session."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import parity_cases as cases
import pytest
import torch
from hypothesis import settings
from safetensors.torch import load_file
from worlds import TRANSPORTS, ThreadWorld, World, Worlds

# Nothing here asserts a wall-clock time, an example's included: machines are shared and noisy.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
# The tests' own process shares its cores with ranks: two threads would wait for each other.
torch.set_num_threads(1)


NO_BROWSER = "there is no chromium with chromedriver"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Make it plain which claims were not tested."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        terminalreporter.section("NOT RUN", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} tests that look at reports in a browser did not run: {NO_BROWSER} "
            f"(apt-get install chromium chromium-driver fonts-dejavu-core)"
        )


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    started = Worlds()
    yield started
    started.close()


@pytest.fixture(params=[(t, n) for t in TRANSPORTS for n in (2, 3, 4)], ids=lambda p: f"{p[0]}-{p[1]}")
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """Every transport, with 2 to 4 ranks."""
    return worlds.get(*request.param)


@pytest.fixture(scope="session")
def sequential(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of one process, trained once per setting."""

    @cache
    def weights(setting: str, seed: int = 0) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("sequential")
        values = cases.values_for(setting, 1, strategy="sequential", seed=seed) | {"sync_batchnorm": False}
        assert ThreadWorld(1).run(cases.train_here, folder=str(folder), values=values) == [cases.STEPS]
        return load_file(folder / "model.safetensors")

    return weights

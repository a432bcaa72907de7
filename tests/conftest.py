"""One world of ranks per (transport, size) and one training by the plain loop per setting, for the whole session."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity_cases as cases
import plain_loop
import pytest
import torch
from hypothesis import settings
from plain_loop import Trained
from safetensors.torch import save_file
from worlds import TRANSPORTS, World, Worlds

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


class Expected:
    """What the plain loop trains, by the options of a run; each is trained once."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._trained = folder, dict[str, Trained]()

    def start(self, values: dict[str, Any]) -> Path:
        """A file with the weights that the run's seed gives its model."""
        key = json.dumps([values[name] for name in ("model", "data")] + [values.get("seed", 0)])
        path = self._folder / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.safetensors"
        if not path.exists():
            state = cases.model_of(values).state_dict()
            save_file({name: tensor.clone() for name, tensor in state.items()}, path)
        return path

    def __call__(self, values: dict[str, Any]) -> Trained:
        start, recipe = Path(values.get("weights") or self.start(values)), cases.recipe_of(values)
        key = f"{start} {recipe}"
        if key not in self._trained:
            self._trained[key] = plain_loop.train(cases.model_of(values), start, cases.data_of(values), recipe)
        return self._trained[key]


@pytest.fixture(scope="session")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Expected:
    return Expected(tmp_path_factory.mktemp("plain"))

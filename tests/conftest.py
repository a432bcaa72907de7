"""One world of ranks per (transport, size) and one training by the plain loop per setting, for the whole session.

Two tests run at a time where each can have shared memory and temporary files of its own (as root).
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import parity_cases as cases
import plain_loop
import pytest
import torch
from hypothesis import settings
from isolation import isolate_files
from plain_loop import Trained
from safetensors.torch import save_file
from worlds import TRANSPORTS, World, Worlds
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from paceline import messages

# Nothing here asserts a wall-clock time, an example's included: machines are shared and noisy.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
# The tests' own process shares its cores with ranks: two threads would wait for each other.
torch.set_num_threads(1)


NO_BROWSER = "there is no chromium with chromedriver"


def pytest_xdist_auto_num_workers() -> int:
    return 2 if os.getuid() == 0 else 0


def pytest_configure(config: pytest.Config) -> None:
    """A process that runs tests beside another sees none of the other's files that runs might leave behind."""
    if hasattr(config, "workerinput"):
        isolate_files("paceline-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        shutil.rmtree(os.environ["TMPDIR"], ignore_errors=True)


USE_WORLDS = ("tests/parity/", "tests/contract/", "tests/unit/test_weights_parts.py")


def group(file: str) -> str:
    """Tests of a file share what its fixtures make, those of worlds the worlds; two labs must not be there at once.

    Marks of `xdist_group` would do, but pytest 9.2 ignores them (pytest-xdist's issue 1386).
    """
    return "worlds" if file.startswith(USE_WORLDS) else "labs" if "lab" in file else file


class Groups(LoadScopeScheduling):  # type: ignore[misc]
    """Tests of a group run in one process, one after the other."""

    def __init__(self, config: pytest.Config, log: Any) -> None:
        config.option.loadscopereorder = False  # it begins with the groups of most tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return group(nodeid.partition("::")[0])


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Groups:
    return Groups(config, log)


@pytest.hookimpl(trylast=True)  # after whatever shuffles them
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long groups come first, so that no process of the two ends long before the other."""
    first = ("worlds", "labs", "tests/process/", "tests/browser/", "tests/")

    def place(item: pytest.Item) -> int:
        name = group(item.path.relative_to(item.config.rootpath).as_posix())
        assert name == "worlds" or "worlds" not in getattr(item, "fixturenames", ()), "see USE_WORLDS"
        return next(n for n, start in enumerate(first) if name.startswith(start))

    items.sort(key=place)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Make it plain which claims were not tested."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if skipped:
        terminalreporter.section("NOT RUN", red=True, bold=True)
        terminalreporter.line(
            f"{len(skipped)} tests that need a browser, for reports and pictures, did not run: {NO_BROWSER} "
            f"(apt-get install chromium chromium-driver fonts-dejavu-core)"
        )


@pytest.fixture(autouse=True)
def _say_as_commands_do() -> None:
    """Each test begins with messages as `paceline` shows them, whatever a test before has called with --quiet."""
    messages.configure()


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
            save_file(
                {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}, path
            )
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

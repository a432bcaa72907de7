"""One world of ranks per (transport, size), for the whole session."""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings
from worlds import TRANSPORTS, World, Worlds

# Nothing here asserts a wall-clock time, an example's included: machines are shared and noisy.
settings.register_profile("paceline", deadline=None)
settings.load_profile("paceline")
# The tests' own process shares its cores with ranks: two threads would wait for each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def worlds() -> Iterator[Worlds]:
    started = Worlds()
    yield started
    started.close()


@pytest.fixture(params=[(t, n) for t in TRANSPORTS for n in (2, 3, 4)], ids=lambda p: f"{p[0]}-{p[1]}")
def world(request: pytest.FixtureRequest, worlds: Worlds) -> World:
    """Every transport, with 2 to 4 ranks."""
    return worlds.get(*request.param)

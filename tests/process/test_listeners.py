"""No strategy opens a port to other machines; other tests of live runs look at their launchers and transports."""

from __future__ import annotations

from pathlib import Path

import pytest
from live_run import ENDLESS, PACELINE, LiveRun

from paceline.strategies.table import TABLE

# Runs of these wait for `LiveRun.wait_until_training`, too, which looks at their listeners.
IN_OTHER_TESTS = {"sequential", "ring", "pipeline", "ps-sync", "ps-async"}


@pytest.mark.parametrize("strategy", [name for name in TABLE if name not in IN_OTHER_TESTS])
def test_no_rank_listens_to_other_machines(strategy: str, tmp_path: Path) -> None:
    with LiveRun([*PACELINE, "--workers", "2", *ENDLESS, "--strategy", strategy], tmp_path) as run:
        run.wait_until_training()
        run.check_listeners()

"""No strategy opens a port to other machines; tests of live runs look at their launchers, transports and servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from listener_cases import listeners
from parity_cases import values_for
from worlds import Worlds

from paceline.strategies.table import TABLE

# Runs of these wait for `LiveRun.wait_until_training`, which looks at their listeners.
IN_OTHER_TESTS = {"sequential", "ps-sync", "ps-async", "ps-bounded"}


@pytest.mark.parametrize("strategy", [name for name in TABLE if name not in IN_OTHER_TESTS])
def test_no_rank_listens_to_other_machines(worlds: Worlds, strategy: str, tmp_path: Path) -> None:
    values = values_for("mlp-sgd", 2, strategy=strategy, steps=3)
    found = worlds.get("gloo", 2).run(listeners, folder=str(tmp_path), values=values)
    assert found == [[3, []]] * 2

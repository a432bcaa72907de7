"""The communicator of a process."""

from __future__ import annotations

import pytest

from paceline.comm.threads import thread_world
from paceline.errors import UsageError
from paceline.loop import world


def test_a_process_is_connected_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(world, "_WORLD", [])
    alone = world.world()
    assert world.connect("gloo", timeout=5) is alone

    first = thread_world(2, 7.0)[0]
    monkeypatch.setattr(world, "_WORLD", [first])
    assert world.connect() is world.connect("threads", timeout=7) is world.world() is first
    for given in ({"transport": "mpi"}, {"timeout": 5.0}):
        with pytest.raises(
            UsageError, match=r"connected already, over threads with timeout=7; call connect\(\) before"
        ):
            world.connect(**given)

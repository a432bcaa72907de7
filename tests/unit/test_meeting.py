"""Where ranks of several nodes find the servers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch.distributed as dist

from paceline.comm.process_group import store_of
from paceline.comm.seat import Seat
from paceline.launch import meeting
from paceline.spec import resolve


class Store:
    """A dictionary instead of torch's TCPStore, which closes when rank 0 forgets it."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()


def test_a_process_that_has_a_store_at_the_address_already_shares_it() -> None:
    """As torch's own init_process_group leaves one at MASTER_ADDR:MASTER_PORT."""
    theirs = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, multi_tenant=True)
    ours = store_of(Seat(0, 1, 0, 1, "torchrun", address=("127.0.0.1", theirs.port), hosts_store=True), 5.0)
    ours.set("word", "here")
    assert theirs.get("word") == b"here"


def test_where_the_ranks_meet_stays_open_for_those_who_are_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = Store()
    alive = weakref.ref(opened)
    stores = [opened]
    del opened
    monkeypatch.setattr(meeting, "store_of", lambda *_: stores.pop())
    spec = resolve(("test", {"strategy": "ps-sync", "workers": 3})).spec
    leader = Seat(0, 4, 0, 2, "srun", address=("127.0.0.1", 15_000), hosts_store=True)
    found, listener = meeting.meet(spec, leader, None)
    assert listener is not None
    try:
        gc.collect()
        still_open = alive()
        assert still_open is not None
        stores.append(still_open)
        later, nothing = meeting.meet(spec, Seat(3, 4, 1, 2, "srun", address=leader.address), None)
        assert nothing is None
        assert later == found
    finally:
        listener.close()

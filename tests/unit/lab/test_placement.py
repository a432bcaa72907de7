"""Ranks on the nodes of a lab."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from paceline.cli.train import _cluster_seat
from paceline.errors import UsageError
from paceline.lab.plan import make_plan
from paceline.launch.env import find_seat
from paceline.launch.placement import find_places, place
from paceline.spec import resolve


def variables(here: str = "n1", **values: Any) -> dict[str, str]:
    plan = make_plan({"preset": "1gbit", **values}, "test")
    return {"PACELINE_LAB": json.dumps(asdict(plan) | {"node": here, "flags": []})}


def names(ranks: int, **values: Any) -> list[str]:
    return [node.name for node in place(make_plan({"preset": "1gbit", **values}, "test"), ranks)]


def test_ranks_are_divided_evenly_or_as_the_file_says() -> None:
    assert names(3, nodes=4) == ["n1", "n2", "n3"]
    assert names(4, nodes=4) == ["n1", "n2", "n3", "n4"]
    assert names(5, nodes=2) == ["n1", "n1", "n2", "n2", "n2"]
    assert names(5, nodes=3, processes=2) == ["n1", "n1", "n2", "n2", "n3"]
    assert names(3, node=[{"processes": 2}, {}]) == ["n1", "n1", "n2"]
    with pytest.raises(UsageError, match="5 ranks do not fit into the lab lab: its 2 nodes have places for 4"):
        names(5, nodes=2, processes=2)


def test_a_rank_finds_itself_on_its_node() -> None:
    spec = resolve(("test", {"strategy": "ring", "workers": 3})).spec
    places = find_places(spec, variables(nodes=2))
    assert places is not None
    assert places.hosts() == "n1:1,n2:2"
    assert places.command(0, ["work"]) == ["work"]
    assert places.command(2, ["work"])[-4:] == ["paceline.lab.agent", "--words", "n2", "work"]
    env = {"PACELINE_RANK": "2", "PACELINE_SIZE": "3"} | places.variables(2) | variables("n2", nodes=2)
    seat = find_seat(env)
    assert seat is not None
    assert (seat.rank, seat.size, seat.local_rank, seat.local_size) == (2, 3, 1, 2)
    assert seat.address == ("10.0.0.1", places.port)
    assert (seat.hosts_store, seat.one_node, seat.in_lab, seat.store_file) == (False, False, True, None)


def test_servers_addresses_are_known_before_they_start_and_the_secret_is_not_shown() -> None:
    spec = resolve(("test", {"strategy": "ps-sync", "workers": 2, "servers": 2})).spec
    places = find_places(spec, variables(nodes=4))
    assert places is not None
    seat = find_seat({"PACELINE_RANK": "0", "PACELINE_SIZE": "4"} | places.variables(0))
    assert seat is not None
    assert [address.rsplit(":", 1)[0] for address in seat.servers] == ["tcp://10.0.0.1", "tcp://10.0.0.2"]
    assert seat.secret == places.secret
    assert places.secret not in repr(seat)


def test_nothing_is_placed_outside_of_a_lab_or_where_ranks_stay_together() -> None:
    ring = resolve(("test", {"strategy": "ring", "workers": 2})).spec
    assert find_places(ring, {}) is None
    alone = resolve(("test", {})).spec
    assert find_places(alone, variables(nodes=2)) is None
    threads = resolve(("test", {"strategy": "ring", "workers": 2, "transport": "threads"})).spec
    assert find_places(threads, variables(nodes=2)) is None


def test_the_node_s_speed_and_noise_are_the_seat_s() -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    seat = find_seat(env | variables("slow", node=[{"name": "fast"}, {"name": "slow", "speed": 0.05, "noise": 0.2}]))
    assert seat is not None
    assert (seat.speed, seat.noise) == (0.05, 0.2)


def test_a_rank_of_a_cluster_file_knows_its_node_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.toml").write_text('ps = ["10.0.0.1:5000"]\nworker = ["10.0.0.2:5000"]\n')
    for name, value in variables("slow", node=[{"name": "fast"}, {"name": "slow", "speed": 0.5}]).items():
        monkeypatch.setenv(name, value)
    given = argparse.Namespace(cluster=str(tmp_path / "cluster.toml"), role="worker", index=0)
    _, seat = _cluster_seat(given, None)
    assert (seat.in_lab, seat.speed) == (True, 0.5)

"""Lab files: what they mean, and what is said about those that mean nothing."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import UsageError
from paceline.lab.capacity import flags
from paceline.lab.links import queue_bytes
from paceline.lab.measure import fair_rates
from paceline.lab.plan import PRESETS, Fault, LabPlan, burst_bytes, in_words, make_plan, read_plan

GIGABIT = 10**9


def plan_of(**values: Any) -> LabPlan:
    return make_plan(values, "lab.toml")


def test_a_lab_file_can_be_two_lines(tmp_path: Path) -> None:
    (tmp_path / "lab.toml").write_text('preset = "1gbit"\nnodes = 4\n')
    plan = read_plan(str(tmp_path / "lab.toml"))
    assert [(node.name, node.address, node.up, node.down) for node in plan.nodes] == [
        (f"n{i}", f"10.0.0.{i}", GIGABIT, GIGABIT) for i in (1, 2, 3, 4)
    ]
    assert plan == read_plan("1gbit:4")
    assert LabPlan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_plans(name: str) -> None:
    assert len(read_plan(f"{name}:6").nodes) == 6


def test_what_the_file_says_wins_over_the_preset() -> None:
    home = plan_of(preset="home", up="50mbit")
    assert (home.nodes[0].up, home.nodes[0].down) == (50_000_000, 100_000_000)
    fast = plan_of(preset="1gbit", up="10mbit")
    assert (fast.nodes[0].up, fast.nodes[0].down) == (10_000_000, GIGABIT)
    both = plan_of(preset="home", rate="1gbit")
    assert (both.nodes[0].up, both.nodes[0].down) == (GIGABIT, GIGABIT)
    listed = plan_of(preset="two-racks", node=[{"name": "a"}, {"name": "b"}])
    assert [node.name for node in listed.nodes] == ["a", "b"]


def test_nodes_one_by_one_racks_and_faults() -> None:
    plan = plan_of(
        rate="100 Mbit/s", racks=2, rack_up="1gbit", rack_down="500mbit", processes=2, mtu=9000, noise=0.1,
        node=[
            {"name": "a", "up": "10mbit", "cpu": 0.5, "memory": "2GB", "speed": 0.05},
            {"processes": 3, "noise": 0},
            {"rate": "1gbit"},
        ],
        fault=[{"at": 5, "do": "heal", "node": "a"}, {"at": 1.5, "do": "slow", "node": "n2", "down": "1mbit"}],
    )  # fmt: skip
    a, second, third = plan.nodes
    assert (a.up, a.down, a.cpu, a.memory, a.speed, a.processes) == (10_000_000, 100_000_000, 0.5, 2 * 10**9, 0.05, 2)
    assert (second.name, second.processes, third.up, third.down) == ("n2", 3, GIGABIT, GIGABIT)
    assert [node.noise for node in plan.nodes] == [0.1, 0.0, 0.1]
    assert [node.rack for node in plan.nodes] == [0, 0, 1]
    assert (plan.racks[1].up, plan.racks[1].down) == (GIGABIT, 500_000_000)
    assert plan.faults == (Fault(1.5, "slow", "n2", None, 1_000_000), Fault(5.0, "heal", "a"))
    assert LabPlan.from_json(plan.to_json()) == plan


WRONG: list[tuple[dict[str, Any], str]] = [
    ({}, "the speed of the links is missing"),
    ({"preset": "1gibt"}, "did you mean '1gbit'"),
    ({"preset": "1gbit", "proceses": 2}, "unknown key 'proceses'; did you mean 'processes'"),
    ({"preset": "1gbit", "nodes": 0}, "nodes is 0; it takes a whole number from 1 to 64"),
    ({"preset": "1gbit", "nodes": 2.0}, "nodes is 2.0"),
    ({"preset": "1gbit", "nodes": 2, "node": [{}]}, "as a number and one by one"),
    ({"preset": "1gbit", "node": [{"name": "a"}, {"name": "a"}]}, "node 2: another node already has the name a"),
    ({"preset": "1gbit", "node": [{"name": "A b"}]}, "not a host name"),
    ({"preset": "1gbit", "node": [{"cpu": -1}]}, "node 1: cpu is -1; it takes a number above 0"),
    ({"preset": "1gbit", "noise": -0.1}, "noise is -0.1; it takes a number from 0 to 2"),
    ({"preset": "1gbit", "node": [{"noise": 3}]}, "node 1: noise is 3"),
    ({"preset": "1gbit", "node": [{"memory": "2"}]}, "memory is '2'; it takes a string such as \"512MB\""),
    ({"preset": "1gbit", "node": [3]}, "3 is not a table"),
    ({"rate": "fast"}, "rate is 'fast'; it takes a string such as \"100mbit\""),
    ({"rate": "1 bit"}, "from 0.1 mbit to 30,000 mbit"),
    ({"rate": "400gbit"}, "rate is '400gbit'"),
    ({"rate": 100}, "rate is 100"),
    ({"up": "1gbit"}, "the speed of the links is missing"),
    ({"rate": "1gbit", "racks": 2}, "write rack_rate"),
    ({"rate": "1gbit", "rack_rate": "1gbit"}, "no racks; add racks = 2"),
    ({"rate": "1gbit", "mtu": 20}, "mtu is 20"),
    ({"rate": "1gbit", "share": "/data"}, "share is '/data'; it takes a list of strings"),
    ({"rate": "1gbit", "fault": [{"do": "cut"}]}, "it needs at, do and node"),
    ({"rate": "1gbit", "fault": [{"at": 1, "do": "cute", "node": "n1"}]}, "did you mean 'cut'"),
    ({"rate": "1gbit", "fault": [{"at": 1, "do": "cut", "node": "n7"}]}, "unknown node 'n7'"),
    ({"rate": "1gbit", "fault": [{"at": 1, "do": "slow", "node": "n1"}]}, "slow needs a rate"),
    ({"rate": "1gbit", "fault": [{"at": -1, "do": "cut", "node": "n1"}]}, "at is -1"),
    ({"rate": "1gbit", "fault": {"at": 1}}, r"each under \[\[fault\]\]"),
]


@pytest.mark.parametrize(("values", "said"), WRONG)
def test_a_wrong_file_is_refused_with_its_place(values: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        plan_of(**values)
    assert str(caught.value).startswith("lab.toml: ")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no lab file 'hoem', and no preset of that name; did you mean 'home'"):
        read_plan("hoem")
    with pytest.raises(UsageError, match="cannot read the lab file"):
        read_plan(str(tmp_path / "none.toml"))
    (tmp_path / "bad.toml").write_bytes(b"\xff = [")
    with pytest.raises(UsageError, match="not valid TOML"):
        read_plan(str(tmp_path / "bad.toml"))
    with pytest.raises(UsageError, match="nodes is 'x'"):
        read_plan("home:x")


def test_bursts_are_milliseconds_and_never_less_than_frames() -> None:
    for rate in (100_000, 10_000_000, 100_000_000, GIGABIT, 10 * GIGABIT):
        for mtu in (1500, 9000):
            burst = burst_bytes(rate, mtu)
            assert burst >= 3 * mtu
            assert burst <= max(3 * (mtu + 14), rate / 8 * 0.004)
            assert queue_bytes(rate, mtu) > burst


def test_flows_share_links_evenly_until_one_is_full() -> None:
    two = plan_of(rate="100mbit", nodes=2)
    assert fair_rates(two, [("n1", "n2")]) == [100e6]
    # Two flows into one node halve its link; the third, on its own links, takes what is left of the sender's.
    three = plan_of(rate="100mbit", nodes=4)
    assert fair_rates(three, [("n1", "n3"), ("n2", "n3"), ("n2", "n4")]) == [50e6, 50e6, 50e6]
    home = plan_of(preset="home", nodes=3)
    assert fair_rates(home, [("n1", "n3"), ("n2", "n3")]) == [20e6, 20e6]
    racks = plan_of(preset="two-racks", nodes=4)
    assert fair_rates(racks, [("n1", "n2"), ("n1", "n3"), ("n2", "n4")]) == pytest.approx([750e6, 250e6, 250e6])


def test_what_a_machine_cannot_reach_is_flagged() -> None:
    assert flags(plan_of(rate="1gbit", nodes=2), 12e9) == []
    [one] = flags(plan_of(rate="10gbit", nodes=2), 12e9)
    assert one.startswith("n1, n2: 10 Gbit/s is out of reach")
    [near] = flags(plan_of(rate="1gbit", nodes=2), 1.532e9)
    assert "moves about 1.53 Gbit/s" in near
    assert near.endswith("use at most 689 Mbit/s")  # less than what it says that it moves, and why
    [total] = flags(plan_of(rate="1gbit", nodes=64), 12e9)
    assert "all nodes sending at once need 64 Gbit/s" in total


@pytest.mark.parametrize("capacity", [9e6, 1.532e9, 4.4444e9, 12e9])
@pytest.mark.parametrize("nodes", [2, 3, 64])
@pytest.mark.parametrize("there", [1, 2, 16])
def test_what_is_advised_is_in_reach(monkeypatch: pytest.MonkeyPatch, capacity: float, nodes: int, there: int) -> None:
    monkeypatch.setattr("paceline.lab.capacity.cores", lambda: there)
    [flag] = flags(plan_of(rate="10gbit", nodes=nodes), capacity)
    advice = re.search(r"use at most ([\d.]+ .bit/s)", flag)
    assert advice
    assert flags(plan_of(rate=advice[1], nodes=nodes), capacity) == []


def test_rates_in_words() -> None:
    assert [in_words(rate) for rate in (64_000, 20_000_000, 999_600_000, GIGABIT)] == [
        "64 kbit/s", "20 Mbit/s", "999.6 Mbit/s", "1 Gbit/s"
    ]  # fmt: skip


def test_what_no_lab_can_be_is_refused_however_large() -> None:
    for values in ({"rate": "9" * 400 + "mbit"}, {"rate": "1gbit", "node": [{"name": "localhost"}]},
                   {"rate": "1gbit", "fault": [{"at": 1.0, "do": "cut", "node": "n1"}] * 501}):  # fmt: skip
        with pytest.raises(UsageError):
            plan_of(**values)
    with pytest.raises(UsageError):
        read_plan("1gbit:" + "9" * 5000)

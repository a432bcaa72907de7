"""Whether the kernel killed a process for lack of memory, from the files of control groups and of the machine."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from paceline.control_groups import mounted, own_groups
from paceline.lab.plan import make_plan
from paceline.launch.counters import PAGE
from paceline.launch.memory_kills import RECENT_SECONDS, MemoryKills, RanksMemory
from paceline.launch.placement import Places

GIB = 1 << 30
NO_LIMIT = 0x7FFF_FFFF_FFFF_F000  # as version 1 says it
MACHINE = "this machine has 16.00 GiB"


class Machine:
    """A /proc and control groups with these files; groups are named by their paths from the mount."""

    def __init__(self, folder: Path, mounts: str, own: str) -> None:
        self.proc, self.groups = folder / "proc", folder / "groups"
        self.groups.mkdir()
        self.write(self.proc / "mounts", "proc /proc proc rw 0 0\n" + mounts.replace("HERE", str(self.groups)))
        self.write(self.proc / "self/cgroup", own)
        self.write(self.proc / "meminfo", f"MemTotal: {16 << 20} kB\nMemFree: 5 kB\nMemAvailable: 5 kB\n")
        self.write(self.proc / "vmstat", "nr_free_pages 7\noom_kill 41\n")

    def write(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path


class Version1(Machine):
    """As on this project's test machine: every controller has its own groups, and version 2 has none of them."""

    def __init__(self, folder: Path, own: str = "/job/step") -> None:
        mounts = "cgroup HERE/../cpu cgroup rw,cpu 0 0\ncgroup HERE cgroup rw,relatime,memory 0 0\n"
        super().__init__(folder, mounts, f"4:memory:{own}\n1:cpu:/elsewhere\n0::/elsewhere\n")
        self.group("", 0, NO_LIMIT)

    def group(self, name: str, kills: int, limit: int) -> Path:
        self.write(self.groups / name / "memory.limit_in_bytes", f"{limit}\n")
        text = f"oom_kill_disable 0\nunder_oom 0\noom_kill {kills}\n"
        return self.write(self.groups / name / "memory.oom_control", text).parent


class Version2(Machine):
    def __init__(self, folder: Path, own: str = "/job/step") -> None:
        super().__init__(folder, "cgroup2 HERE cgroup2 rw,nsdelegate 0 0\n", f"0::{own}\n")
        self.write(self.groups / "cgroup.controllers", "cpuset cpu memory pids\n")

    def group(self, name: str, kills: int, limit: int) -> Path:
        self.write(self.groups / name / "memory.max", "max\n" if limit == NO_LIMIT else f"{limit}\n")
        text = f"low 0\nhigh 0\nmax 9\noom 8\noom_kill {kills}\noom_group_kill 0\n"
        return self.write(self.groups / name / "memory.events", text).parent


@pytest.fixture(params=[Version1, Version2])
def machine(request: pytest.FixtureRequest, tmp_path: Path) -> Version1 | Version2:
    found: Version1 | Version2 = request.param(tmp_path)
    return found


def test_a_kill_in_its_group_is_told_with_the_lowest_limit_around_it(
    machine: Version1 | Version2,
) -> None:
    outer = machine.group("job", 5, 2 * GIB)
    machine.group("job/step", 3, NO_LIMIT)
    kills = MemoryKills(proc=machine.proc)
    assert kills.describe() is None, "these were before"
    machine.group("job", 6, 2 * GIB)
    assert kills.describe() is None, "of another group inside the outer one"
    machine.group("job/step", 4, NO_LIMIT)
    limit = f"the control group {outer} is limited to 2.00 GiB"
    assert kills.describe() == f"was killed by the kernel because memory ran out: {limit}"
    assert str(kills.describe(3 * GIB // 2)).endswith(f": it used at least 1.50 GiB, and {limit}")
    inner = machine.group("job/step", 4, GIB)
    assert str(kills.describe()).endswith(f"the control group {inner} is limited to 1.00 GiB")


def test_without_a_limit_of_a_group_the_machine_was_full(machine: Version1 | Version2) -> None:
    machine.group("job/step", 0, NO_LIMIT)
    kills = MemoryKills(proc=machine.proc)
    machine.group("job/step", 1, NO_LIMIT)
    assert str(kills.describe()).endswith(MACHINE)


def test_a_kill_of_long_ago_does_not_explain_the_death_of_a_process_now(
    machine: Version1 | Version2, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    machine.group("job/step", 0, GIB)
    kills = MemoryKills(proc=machine.proc)
    machine.group("job/step", 1, GIB)
    assert kills.recent()
    now += RECENT_SECONDS - 1
    assert kills.recent()
    now += 2
    assert not kills.recent()
    machine.group("job/step", 2, GIB)
    assert kills.recent()


def test_a_group_without_the_controller_is_counted_by_the_one_around_it(tmp_path: Path) -> None:
    machine = Version2(tmp_path, "/job/step")
    outer = machine.group("job", 0, GIB)
    (machine.groups / "job/step").mkdir()
    kills = MemoryKills(proc=machine.proc)
    machine.group("job", 1, GIB)
    assert str(kills.describe()).endswith(f"the control group {outer} is limited to 1.00 GiB")


@pytest.mark.parametrize("path", ["/docker/1f2e", "/docker/1f2e/job", "/../../job", "/"])
def test_in_a_container_groups_above_the_mount_are_not_visible(path: str, tmp_path: Path) -> None:
    machine = Version2(tmp_path, path)
    machine.group("", 0, GIB)
    machine.group("job", 0, GIB)
    inside = [machine.groups / "job"] if path.endswith("job") else []
    assert own_groups("memory", machine.proc) == [*inside, machine.groups]


@pytest.mark.parametrize("mounts", ["", "cgroup2 HERE cgroup2 rw 0 0\n", "cgroup HERE cgroup rw,cpu 0 0\n"])
def test_without_groups_of_memory_the_kills_of_the_machine_count(mounts: str, tmp_path: Path) -> None:
    machine = Machine(tmp_path, mounts, "1:cpu:/\n0::/\n")
    assert mounted("memory", machine.proc) is None
    kills = MemoryKills(proc=machine.proc)
    assert kills.describe() is None
    machine.write(machine.proc / "vmstat", "nr_free_pages 7\noom_kill 42\n")
    assert str(kills.describe()).endswith(MACHINE)


def test_a_machine_that_is_not_linux_kills_nobody(tmp_path: Path) -> None:
    assert own_groups("memory", tmp_path / "proc") == []
    assert MemoryKills(proc=tmp_path / "proc").describe() is None


def use(machine: Machine, folder: Path, resident: dict[int, int]) -> None:
    """Ranks of this host, by process, that have so much in memory."""
    rows = [{"rank": rank, "host": socket.gethostname(), "pid": pid} for rank, pid in enumerate(resident)]
    away = {"rank": len(rows), "host": f"not-{socket.gethostname()}", "pid": next(iter(resident))}
    (folder / "env.json").write_text(json.dumps({"ranks": [*rows, away]}))
    for pid, count in resident.items():
        machine.write(machine.proc / str(pid) / "statm", f"999999 {count // PAGE} 100 1 0 5000 0\n")


def test_the_most_memory_that_the_rank_was_seen_with_is_told(
    machine: Version1 | Version2, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    machine.group("job/step", 0, 3 * GIB)
    memory = RanksMemory(tmp_path, proc=machine.proc)
    for mine in (GIB, 2 * GIB, 0):  # an ended process has none
        use(machine, tmp_path, {os.getpid(): mine, 1: GIB // 2})
        memory.look()
        now += 1
    assert memory.describe(0) is None
    machine.group("job/step", 1, 3 * GIB)
    told = {rank: str(memory.describe(rank)) for rank in (0, 1, 2)}
    assert "it used at least 2.00 GiB" in told[0]
    assert "it used at least 0.50 GiB" in told[1]
    assert "it used" not in told[2], "a process of another host has the number of one of ours"


def test_in_a_lab_each_node_has_its_own_group(tmp_path: Path) -> None:
    machine = Version1(tmp_path, "/lab/n1")
    for name, limit in (("n1", NO_LIMIT), ("n2", GIB)):
        machine.group(f"lab/{name}", 0, limit)
    machine.group("lab", 0, NO_LIMIT)
    plan = make_plan({"name": "test", "preset": "1gbit", "nodes": 2}, "test")
    memory = RanksMemory(tmp_path, Places(plan.nodes, "n1", 0, 20_000, ""), machine.proc)
    inner = machine.group("lab/n2", 1, GIB)
    assert memory.describe(0) is None
    assert str(memory.describe(1)).endswith(f"the control group {inner} is limited to 1.00 GiB")

"""Control groups: how many cores and how much memory a node may use. Only root can make them."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from paceline.errors import UsageError
from paceline.lab.plan import LabPlan, Node

PERIOD_MICROSECONDS = 20_000
REMOVE_SECONDS = 5.0
PREFIX = "paceline-lab-"


def needed(plan: LabPlan) -> bool:
    return any(node.cpu or node.memory for node in plan.nodes)


def check_possible(plan: LabPlan) -> None:
    """Refuse a plan whose limits nobody would keep."""
    if not needed(plan):
        return
    if os.geteuid() != 0:
        raise UsageError(
            "cpu and memory of a node are kept by control groups, and only root can make these: run as root, or leave "
            "them out (speed works without, for emulated compute)"
        )
    wanted = {"cpu": any(node.cpu for node in plan.nodes), "memory": any(node.memory for node in plan.nodes)}
    missing = [name for name, asked in wanted.items() if asked and not _root(name)]
    if missing:
        raise UsageError(f"this machine has no control group for {' and '.join(missing)}: leave them out of the lab")


def _root(controller: str) -> tuple[Path, int] | None:
    """Where a controller's groups are, and the version of its files."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, place, kind, options = line.split()[:4]
        if kind == "cgroup" and controller in options.split(","):
            return Path(place), 1
        with contextlib.suppress(OSError):
            if kind == "cgroup2" and controller in Path(place, "cgroup.controllers").read_text().split():
                return Path(place), 2
    return None


def make(plan: LabPlan) -> list[Path]:
    """Groups for the nodes that have limits; the folders, for `remove`. Those of labs that are gone are removed."""
    if not needed(plan):
        return []
    check_possible(plan)
    roots = {name: found for name in ("cpu", "memory") if (found := _root(name))}
    for place, _ in roots.values():
        _sweep(place)
    mine = f"{PREFIX}{_numbers()}-{os.getpid()}-{_started(os.getpid())}"
    made: list[Path] = []
    try:
        for controller, (place, version) in roots.items():
            group = place / mine
            if version == 2:
                (place / "cgroup.subtree_control").write_text(f"+{controller}")
            if group not in made:
                group.mkdir()
                made.append(group)
            if version == 2:
                (group / "cgroup.subtree_control").write_text(f"+{controller}")
            for node in plan.nodes:
                inner = group / node.name
                if inner not in made:
                    inner.mkdir()
                    made.append(inner)
                _limit(inner, controller, version, node)
    except OSError as error:
        remove(made)
        raise UsageError(f"cannot limit the nodes by control groups: {error}; leave cpu and memory out") from error
    return made


def _limit(group: Path, controller: str, version: int, node: Node) -> None:
    if controller == "cpu" and node.cpu:
        quota = max(1000, round(node.cpu * PERIOD_MICROSECONDS))
        if version == 2:
            (group / "cpu.max").write_text(f"{quota} {PERIOD_MICROSECONDS}")
        else:
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_MICROSECONDS))
            (group / "cpu.cfs_quota_us").write_text(str(quota))
    if controller == "memory" and node.memory:
        (group / ("memory.max" if version == 2 else "memory.limit_in_bytes")).write_text(str(node.memory))


def enter(made: list[Path], node: str, pid: int) -> None:
    """Put a process, and so all that it will start, into the node's groups."""
    for group in made:
        if group.name == node:
            (group / "cgroup.procs").write_text(str(pid))


def remove(made: list[Path]) -> None:
    """Remove groups whose processes have ended, or are about to."""
    deadline = time.monotonic() + REMOVE_SECONDS
    for group in sorted(made, key=lambda path: -len(path.parts)):
        while group.exists():
            try:
                group.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)


def _sweep(place: Path) -> None:
    """The groups of a lab whose processes were all killed at once had nobody to remove them."""
    for group in place.glob(f"{PREFIX}{_numbers()}-*"):
        pid, _, started = group.name.removeprefix(f"{PREFIX}{_numbers()}-").partition("-")
        if _started(int(pid) if pid.isdecimal() else 0) != started:
            remove([*(path for path in group.iterdir() if path.is_dir()), group])


def _numbers() -> int:
    """Whose process numbers these are: in a container, or in a node of another lab, they are others."""
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> str | None:
    """When a living process was started, in the kernel's ticks: with its number, this is it and no later one."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if state in "ZX" else values[18]

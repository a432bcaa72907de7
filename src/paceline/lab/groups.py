"""Control groups limit the cores and the memory of a node. Only root can create them."""

from __future__ import annotations

import os
import time
from pathlib import Path

from paceline.control_groups import mounted
from paceline.errors import UsageError
from paceline.lab.plan import LabPlan, Node

PERIOD_MICROSECONDS = 20_000
REMOVE_SECONDS = 5.0
PREFIX = "paceline-lab-"


def needed(plan: LabPlan) -> bool:
    return any(node.cpu or node.memory for node in plan.nodes)


def check_possible(plan: LabPlan) -> None:
    """Raise UsageError if this machine or user cannot enforce the plan's limits."""
    if not needed(plan):
        return
    if os.geteuid() != 0:
        raise UsageError(
            "cpu and memory of a node need control groups, which only root can create: run as root, or leave them out "
            "(speed, for emulated compute, works without root)"
        )
    wanted = {"cpu": any(node.cpu for node in plan.nodes), "memory": any(node.memory for node in plan.nodes)}
    missing = [name for name, asked in wanted.items() if asked and not mounted(name)]
    if missing:
        raise UsageError(f"this machine has no control group for {' and '.join(missing)}: leave them out of the lab")


def make(plan: LabPlan) -> list[Path]:
    """Create groups for the nodes with limits; return their folders, for `remove`. Removes those of dead labs."""
    if not needed(plan):
        return []
    check_possible(plan)
    roots = {name: found for name in ("cpu", "memory") if (found := mounted(name))}
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
        raise UsageError(f"cannot create control groups for the nodes: {error}; leave cpu and memory out") from error
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
    """Move a process, and so all that it will start, into the node's groups."""
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
    """Remove the groups of labs whose processes were all killed at once."""
    for group in place.glob(f"{PREFIX}{_numbers()}-*"):
        pid, _, started = group.name.removeprefix(f"{PREFIX}{_numbers()}-").partition("-")
        if _started(int(pid) if pid.isdecimal() else 0) != started:
            remove([*(path for path in group.iterdir() if path.is_dir()), group])


def _numbers() -> int:
    """The PID namespace of this process: in a container or on a node of another lab, process numbers differ."""
    return os.stat("/proc/self/ns/pid").st_ino


def _started(pid: int) -> str | None:
    """The start time of a process in the kernel's ticks; together with its number, it identifies the process."""
    try:
        state, *values = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return None
    return None if state in "ZX" else values[18]

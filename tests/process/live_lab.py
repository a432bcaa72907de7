"""A real lab that a test can use, break and check for leftovers."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from live_run import BIN, until

from paceline.lab import client
from paceline.lab.plan import LabPlan, make_plan

PACELINE = str(BIN / "paceline")
NUMBERS = itertools.count()
MARK = "PACELINE_TEST_PROCESS"  # all that a test starts, in nodes and out of them, inherits it


@dataclass
class LiveLab:
    plan: LabPlan
    keeper: subprocess.Popen[str]

    def run(self, node: str, *words: str) -> tuple[int, str]:
        """Run a command in a node; its exit code and all it said."""
        read, write = os.pipe()
        command = client.begin(self.plan.name, node, list(words), (0, write, write))
        os.close(write)
        with open(read) as output:
            said = output.read()
        client.wait([command])
        assert command.exit_code is not None
        return command.exit_code, said

    def python(self, node: str, program: str) -> str:
        """What a Python program says in a node; it has to succeed."""
        code, said = self.run(node, sys.executable, "-c", program)
        assert code == 0, (code, said)
        return said.strip()


@contextlib.contextmanager
def live_lab(**values: Any) -> Iterator[LiveLab]:
    """A lab of these values, of two nodes at 1 Gbit/s unless they say another; gone afterwards."""
    given = {"name": f"test-{os.getpid()}-{next(NUMBERS)}", "preset": "1gbit", **values}
    plan = make_plan({key: value for key, value in given.items() if value is not None}, "test")
    keeper = client.start(plan, detached=False)
    try:
        yield LiveLab(plan, keeper)
    finally:
        client.stop(keeper)


def traces() -> dict[str, set[str]]:
    """Everything that a lab could leave on this machine."""
    os.environ[MARK] = str(os.getpid())
    mark = f"{MARK}={os.getpid()}".encode()
    processes: set[str] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                processes.add(f"{folder.name} {(folder / 'cmdline').read_bytes()!r}")
    return {
        "processes": processes,  # as long as there is none, and no mount, no namespace of theirs is there either
        "interfaces": {name for _, name in socket.if_nameindex()},
        "groups": {str(path) for path in Path("/sys/fs/cgroup").glob("*/paceline-lab-*")},
        "named namespaces": set(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else set(),
        "mounts": set(Path("/proc/self/mountinfo").read_text().splitlines()),
        "labs": set(client.names()),
    }


def check_nothing_left(before: dict[str, set[str]]) -> None:
    """Nothing that was not there before."""
    left: dict[str, set[str]] = {}

    def nothing() -> bool:
        nonlocal left
        left = {kind: new for kind, found in traces().items() if (new := found - before[kind])}
        return not left

    with contextlib.suppress(AssertionError):
        until("nothing is left", nothing, 10)
    assert not left, left

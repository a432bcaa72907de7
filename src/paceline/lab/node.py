"""The first process of a node's namespaces: it sets up the node and starts commands on it."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from paceline.lab import kernel, wire
from paceline.lab.commands import Commands, start_command
from paceline.lab.plan import LAB, LabPlan, Node
from paceline.layout import cores

# Private to every node: folders where programs keep sockets, shared memory and other local files.
PRIVATE = ("/tmp", "/var/tmp", "/dev/shm", "/run")
FILES = "/run/lab"


def furnish(plan: LabPlan, node: Node) -> None:
    """Set up the node's host name and file system: the machine's, except for private folders."""
    socket.sethostname(node.name)
    kernel.mount("none", "/", flags=kernel.MS_RECURSIVE | kernel.MS_PRIVATE)
    shared = _shared(plan.shared)
    for folder in {os.path.realpath(folder): None for folder in PRIVATE}:
        if os.path.isdir(folder):
            kernel.mount("tmpfs", folder, "tmpfs", kernel.MS_NOSUID | kernel.MS_NODEV, "mode=1777")
    kernel.mount("proc", "/proc", "proc", kernel.MS_NOSUID | kernel.MS_NODEV)
    _show_own_interfaces()
    for path, descriptor in shared.items():
        os.makedirs(path, exist_ok=True)
        kernel.mount(f"/proc/self/fd/{descriptor}", path, flags=kernel.MS_BIND | kernel.MS_RECURSIVE)
        os.close(descriptor)
    os.mkdir(FILES)
    hosts = [f"{other.address} {other.name}" for other in plan.nodes]
    hosts += [f"::ffff:{other.address} {other.name}.lab" for other in plan.nodes]  # how c10d asks for their names
    Path(FILES, "hosts").write_text("\n".join(["127.0.0.1 localhost", "::1 localhost", *hosts, ""]))
    slots = [f"{other.name} slots={other.processes or 1}" for other in plan.nodes]
    Path(FILES, "hostfile").write_text("\n".join([*slots, ""]))
    machines = [f"{other.name}:{other.processes or 1}" for other in plan.nodes]
    Path(FILES, "machines").write_text("\n".join([*machines, ""]))
    if os.path.exists("/etc/hosts"):
        kernel.mount(f"{FILES}/hosts", "/etc/hosts", flags=kernel.MS_BIND)


def _show_own_interfaces() -> None:
    """Mount /sys/class/net with the node's own interfaces; if that is not allowed, the machine's stay visible."""
    groups = os.open("/sys/fs/cgroup", os.O_PATH) if os.path.ismount("/sys/fs/cgroup") else None
    with contextlib.suppress(OSError):
        kernel.mount("sysfs", "/sys", "sysfs", kernel.MS_NOSUID | kernel.MS_NODEV)
        if groups is not None:
            kernel.mount(f"/proc/self/fd/{groups}", "/sys/fs/cgroup", flags=kernel.MS_BIND | kernel.MS_RECURSIVE)
    if groups is not None:
        os.close(groups)


def _shared(paths: tuple[str, ...]) -> dict[str, int]:
    """Shared folders inside private ones, held open so that they can be mounted on every node."""
    real = sorted({os.path.realpath(path) for path in paths})
    hidden = [path for path in real if any(path.startswith(f"{os.path.realpath(folder)}/") for folder in PRIVATE)]
    outermost = [path for path in hidden if not any(path.startswith(f"{other}/") for other in hidden)]
    return {path: os.open(path, os.O_PATH) for path in outermost}


def environment(plan: LabPlan, node: Node, flags: list[str]) -> dict[str, str]:
    """Environment variables for programs on the node: where they are, and how mpiexec reaches other nodes."""
    agent = f"{sys.executable} -m paceline.lab.agent"
    about = asdict(plan) | {"node": node.name, "flags": flags}
    # A lab of root runs programs as root, which Open MPI wants confirmed twice.
    root = [f"{prefix}_ALLOW_RUN_AS_ROOT{end}" for prefix in ("OMPI", "PRTE") for end in ("", "_CONFIRM")]
    fills = "slot" if any(other.processes for other in plan.nodes) else "node"
    return {
        LAB: json.dumps(about),
        "MASTER_ADDR": plan.nodes[0].address,
        "TMPDIR": "/tmp",
        "PRTE_MCA_plm_ssh_agent": agent,  # Open MPI 5
        "OMPI_MCA_plm_rsh_agent": agent,  # and before
        "PRTE_MCA_prte_default_hostfile": f"{FILES}/hostfile",
        "OMPI_MCA_orte_default_hostfile": f"{FILES}/hostfile",
        "PRTE_MCA_rmaps_default_mapping_policy": f"{fills}:oversubscribe",
        "HYDRA_LAUNCHER": "ssh",  # MPICH
        "HYDRA_LAUNCHER_EXEC": agent,
        "HYDRA_HOST_FILE": f"{FILES}/machines",
        **(dict.fromkeys(root, "1") if os.getuid() == 0 else {}),
    }


class Init:
    """The first process of a node: it runs commands for clients until the holder has ended."""

    def __init__(self, plan: LabPlan, node: Node, holder: socket.socket) -> None:
        self.plan, self.node, self.holder = plan, node, holder
        self.selector = selectors.DefaultSelector()
        self.commands = Commands(self.selector, self._start)
        self.selector.register(holder, selectors.EVENT_READ, self._obey)
        self.ended = False

    def serve(self) -> None:
        """Serve until the holder has ended."""
        while not self.ended:
            for key, _ in self.selector.select():
                key.data(key.fileobj)

    def _obey(self, holder: socket.socket) -> None:
        heard = wire.hear(holder)
        if heard is None:
            self.ended = True
            return
        message, files = heard
        if message["do"] == "exec":
            self.commands.start(message, socket.socket(fileno=files[0]), files[1:])
            for file in files[1:]:
                os.close(file)
        elif message["do"] in ("stop", "continue"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(-1, signal.SIGSTOP if message["do"] == "stop" else signal.SIGCONT)  # all but this one

    def _start(self, message: dict[str, Any], files: list[int]) -> int:
        given = {key: value for key, value in message["env"].items() if key != "XDG_RUNTIME_DIR"}
        given.setdefault("OMP_NUM_THREADS", str(self._threads()))
        own = environment(self.plan, self.node, message["flags"])
        return start_command(message, files, self.node.name, given | own)

    def _threads(self) -> int:
        """The machine's cores divided by the processes of all nodes, which compute at the same time."""
        processes = sum(node.processes or 1 for node in self.plan.nodes)
        return max(1, cores() // processes)

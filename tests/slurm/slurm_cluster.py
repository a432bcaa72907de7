"""A real Slurm of two nodes on this machine: munged, slurmctld and two slurmd, each node with a name and an address.

It lives in namespaces of its own, which `run.sh` makes: the only network is loopback, the machine's /etc/hosts and host
name are hidden, and when the tests end, however they end, the kernel ends every process with them.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

CONTROL = "control"
NODES = {"n1": 16818, "n2": 16819}  # and their ports
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
CONF = """\
ClusterName=paceline
SlurmctldHost={control}(127.0.0.1)
SlurmctldPort=16817
SlurmUser=root
# Slurm starts a requeued job when the credentials of its steps have expired.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
# Listen at 127.0.0.1, not on every interface.
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SlurmdParameters=config_overrides
ReturnToService=2
MailProg=/bin/true
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
{nodes}
SchedulerParameters=sched_interval=5
# Jobs of `urgent` preempt others, which are told, and are requeued when their grace time is over.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=both Nodes={names} Default=YES MaxTime=INFINITE GraceTime=20
PartitionName=urgent Nodes={names} PriorityTier=10
"""


def until(what: str, ready: Callable[[], bool], seconds: float) -> None:
    """Wait for something; a deadline that passes says for what."""
    deadline = time.monotonic() + seconds
    while not ready():
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds:g} s in vain until {what}")
        time.sleep(0.1)


class SlurmCluster:
    """Starts the daemons in `folder`; use as a context. Both nodes are idle inside it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.daemons: dict[str, subprocess.Popen[bytes]] = {}
        self.env = dict(os.environ) | {"SLURM_CONF": str(folder / "slurm.conf")}

    def __enter__(self) -> SlurmCluster:
        check_private()
        try:
            self._start()
            until("both nodes are idle", self._idle, 30)
        except BaseException as error:
            error.add_note(self.logs())
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        key, conf = self.folder / "munge.key", self.folder / "slurm.conf"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        self.folder.chmod(0o755)  # munged looks at the folders of its socket
        nodes = "\n".join(f"NodeName={name} NodeAddr=127.0.0.1 Port={port} CPUs=4" for name, port in NODES.items())
        conf.write_text(CONF.format(control=CONTROL, folder=self.folder, nodes=nodes, names=",".join(NODES)))
        munge = [f"--{what}-file={self.folder}/munge.{what}" for what in ("key", "pid", "log", "seed")]
        self._run("munged", ["munged", "--foreground", f"--socket={self.folder}/munge.socket", *munge])
        until("munged listens", (self.folder / "munge.socket").exists, 10)
        self._run("slurmctld", ["slurmctld", "-D", "-c", "-f", str(conf)])
        for name in NODES:
            (self.folder / f"spool-{name}").mkdir()
            slurmd = f"hostname {name} && exec slurmd -D -f '{conf}'"
            self._run(f"slurmd-{name}", ["unshare", "--uts", "sh", "-c", slurmd])

    def _run(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.out").open("wb") as out:
            self.daemons[name] = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=self.env, start_new_session=True
            )

    def _idle(self) -> bool:
        for name, daemon in self.daemons.items():
            if daemon.poll() is not None:
                raise RuntimeError(f"{name} has ended with exit code {daemon.returncode}")
        states = subprocess.run(["sinfo", "-h", "-N", "-p", "both", "-o", "%T"], env=self.env, capture_output=True,
                                text=True, timeout=30, check=False)  # fmt: skip
        return states.stdout.split() == ["idle"] * len(NODES)

    def close(self) -> None:
        """End the daemons, the last one started first; the kernel ends what is left with the namespace."""
        for daemon in reversed(self.daemons.values()):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        self.daemons.clear()

    def logs(self) -> str:
        return "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(self.folder.glob("*.out")))

    def call(self, *command: str, given: str | None = None, **variables: str) -> str:
        """What one of Slurm's commands says; it must not fail. `given` is its input."""
        done = subprocess.run(command, input=given, cwd=self.folder, env=self.env | variables, capture_output=True,
                              text=True, timeout=60, check=False)  # fmt: skip
        if done.returncode:
            raise AssertionError(f"{command}: {done.stderr}")
        return done.stdout.strip()

    def job(self, number: str) -> tuple[str, str]:
        """A job's state and its exit code."""
        shown = dict(re.findall(r"(JobState|ExitCode)=(\S+)", self.call("scontrol", "show", "job", number)))
        return shown["JobState"], shown["ExitCode"]

    def restarts(self, number: str) -> int:
        """How often a job was requeued."""
        return int(re.findall(r"Restarts=(\d+)", self.call("scontrol", "show", "job", number))[0])

    def wait(self, number: str, seconds: float) -> str:
        """How a job ended, when it has and its nodes are free again."""
        until(f"job {number} has ended", lambda: self.job(number)[0] in ENDED, seconds)
        until("both nodes are idle again", self._idle, 40)
        return " ".join(self.job(number))

    def empty(self) -> None:
        """Cancel all jobs."""
        self.call("scancel", "--user=root")
        until("both nodes are idle again", self._idle, 60)

    def listening(self) -> set[str]:
        """The addresses at which the daemons accept connections."""
        rows = self.call("ss", "--listening", "--tcp", "--numeric", "--no-header").splitlines()
        return {row.split()[3].rpartition(":")[0] for row in rows}


def check_private() -> None:
    """Refuse to start daemons where they could be reached, or could get in the way of a system's Slurm."""
    interfaces = [name for _, name in socket.if_nameindex()]
    assert interfaces == ["lo"], f"this is for a network of its own, made by run.sh; here are {interfaces}"
    assert socket.gethostname() == CONTROL, "this is for namespaces of its own, made by run.sh"


def processes() -> dict[int, str]:
    """All that live in this namespace, and their command lines; zombies do not."""
    found = {}
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
        except OSError:  # it has just ended
            continue
        if line:
            found[int(entry.name)] = line.replace(b"\0", b" ").decode(errors="replace")
    return found

"""A real run in real processes, that a test can watch, signal and check for leftovers."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from raw_lines import raw_lines

from paceline.run.folder import read_summary
from paceline.run.records import Summary

BIN = Path(sys.executable).parent
PACELINE = [str(BIN / "paceline"), "train"]
MPIEXEC = [str(BIN / "mpiexec"), *(["--allow-run-as-root"] if os.getuid() == 0 else []), "--oversubscribe"]
# As ours sets it; Open MPI's own default is that each rank listens on all interfaces.
NO_TCP = ["--mca", "pml", "ob1", "--mca", "btl", "^tcp"]


def launchers(ranks: int) -> dict[str, list[str]]:
    """The same training under every launcher."""
    return {
        "shm": [*PACELINE, "--workers", str(ranks)],
        "gloo": [*PACELINE, "--workers", str(ranks), "--transport", "gloo"],
        "mpi": [*PACELINE, "--workers", str(ranks), "--transport", "mpi"],
        "torchrun": [str(BIN / "torchrun"), "--nproc-per-node", str(ranks), "--no-python", *PACELINE],
        "mpiexec": [*MPIEXEC, *NO_TCP, "-n", str(ranks), *PACELINE],
    }


LAUNCHERS = launchers(3)
OURS = ("shm", "gloo", "mpi")  # transports of runs that our own launcher starts
# Long enough that a test, not the run, decides when it ends.
ENDLESS = ["--model", "mlp", "--strategy", "ring", "--steps", "1000000"]
PATIENCE = 60.0


def until(what: str, ready: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    """Wait for something; the first true value."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := ready():
            return value
        time.sleep(0.02)
    raise AssertionError(f"waited {seconds} s in vain until {what}")


def skip_without_mounts(folder: Path) -> None:
    """A test that needs a small disk is skipped where it may not make one."""
    command = ["unshare", "-m", "mount", "-t", "tmpfs", "x", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("NOT TESTED: making a small disk takes root, or the right to mount")


def logged(folder: Path) -> int:
    """How many steps rank 0 has told of, a line after ten; its log is written at once, its records every second."""
    with contextlib.suppress(FileNotFoundError):
        return 10 * (folder / "logs" / "rank_0.log").read_text().count("\nAt step ")
    return 0


def is_janitor(pid: int) -> bool:
    """Whether this process cleans up after a launcher; false if it has ended."""
    with contextlib.suppress(OSError):
        return b"janitor" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


class LiveRun:
    """A started run; use as a context, so that nothing survives a failed test."""

    def __init__(
        self, command: list[str], output: Path, fault: str | None = None, cwd: Path | None = None, deaths: str = ""
    ) -> None:
        self.folder, self.command = output / "run", command
        self.temporary = Path(tempfile.mkdtemp())  # not in `output`: the paths of sockets are short
        variables = dict(os.environ) | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        if fault or deaths:
            variables |= {"PYTHONPATH": str(Path(__file__).parent / "faulty"), "PACELINE_TEST_DEATHS": deaths}
            variables |= {"PACELINE_TEST_FAULT": fault} if fault else {}
        self.shared_before = set(os.listdir("/dev/shm"))
        self.output, self.errors = ((output / name).open("w+") for name in ("stdout", "stderr"))
        self.process = subprocess.Popen(
            [*command, "--output-dir", str(output), "--name", "run"],
            cwd=cwd, env=variables, stdin=subprocess.DEVNULL, stdout=self.output, stderr=self.errors,
            start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> LiveRun:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
            time.sleep(0.1)  # the janitor has work to do
        for pid in self.living():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.output.close()
        self.errors.close()
        shutil.rmtree(self.temporary)

    def steps(self, rank: int) -> int:
        return sum(record["kind"] == "step" for record in raw_lines(self.folder / f"rank_{rank}.jsonl"))

    def logged(self) -> int:
        return logged(self.folder)

    def wait_until_training(self, steps: int = 3) -> None:
        until("rank 0 trains", lambda: self.process.poll() is not None or self.logged() > steps)
        assert self.process.poll() is None, self.stderr()
        self.check_listeners()

    def check_listeners(self) -> None:
        """No process of the run listens to other machines, except mpiexec, after a warning, and launchers not ours."""
        first = Path(self.command[0]).name
        for pid in self.living():
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                if where := listening_elsewhere({pid}):
                    program = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
                    if first == "torchrun":
                        assert any(word.endswith("torchrun") for word in program), (program, where)
                    else:
                        assert Path(program[0]).name == "prterun", (program, where)
                        assert first == "mpiexec" or "mpiexec listens on all network interfaces" in self.stderr()

    def pid(self, rank: int) -> int:
        rows = json.loads((self.folder / "env.json").read_text())["ranks"]
        return next(int(row["pid"]) for row in rows if row["rank"] == rank)

    def starting(self, rank: int) -> int | None:
        """The living process of a rank, as soon as there is one."""
        for pid in self.living():
            with contextlib.suppress(OSError):  # it has just ended
                if Path(f"/proc/{pid}/comm").read_text() == f"paceline-{rank}\n":
                    return pid
        return None

    def janitor(self) -> int:
        """The process that cleans up if the launcher is killed."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return next(int(pid) for pid in children if is_janitor(int(pid)))

    def end(self, seconds: float = PATIENCE) -> int:
        """Wait until the command has ended; its exit code."""
        return self.process.wait(seconds)

    def stdout(self) -> str:
        return Path(self.output.name).read_text()

    def stderr(self) -> str:
        return Path(self.errors.name).read_text()

    def summary(self) -> Summary:
        summary = read_summary(self.folder)
        assert summary is not None
        return summary

    def living(self) -> list[int]:
        """Processes that belong to this run: they have its temporary folder in their environment."""
        mine = f"TMPDIR={self.temporary}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                # Ranks under our own mpiexec have a private folder instead, but the run folder as an argument.
                if (
                    entry.name.isdigit()
                    and not is_janitor(int(entry.name))
                    and (
                        mine in (entry / "environ").read_bytes()
                        or str(self.folder).encode() in (entry / "cmdline").read_bytes()
                    )
                ):
                    found.append(int(entry.name))
        return found

    def check_nothing_is_left(self) -> None:
        until("all processes are gone", lambda: not self.living(), 15)
        mine = {name for name in set(os.listdir("/dev/shm")) - self.shared_before if "test" not in name}
        until("shared memory is free", lambda: not mine & set(os.listdir("/dev/shm")), 5)
        kept = {name for name in os.listdir(self.temporary) if not name.startswith("torchelastic")}
        assert kept == set()
        assert not list(Path(tempfile.gettempdir()).glob(f"paceline-{os.getuid()}-*"))


def listening_elsewhere(pids: set[int]) -> set[str]:
    """Addresses other than loopback on which these processes listen for TCP connections."""
    inodes = set()
    for pid in pids:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # it was closed just now
                target = os.readlink(entry)
                if target.startswith("socket:["):
                    inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            parts = line.split()
            if parts[3] == "0A" and parts[9] in inodes and not parts[1].startswith(("0100007F", "0" * 24 + "01000000")):
                found.add(parts[1])
    return found


def on_a_terminal(command: list[str]) -> tuple[int, bytes]:
    """The exit code, and all that was shown on a pseudo-terminal that has no size, as new ones are."""
    leader, follower = pty.openpty()
    process = subprocess.Popen(command, stdout=follower, stderr=follower, stdin=follower)
    os.close(follower)
    text = b""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            part = os.read(leader, 65536)
        except OSError:
            break
        if not part:
            break
        text += part
    os.close(leader)
    return process.wait(20), text

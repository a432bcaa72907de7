"""Ranks on the nodes of a lab are forked from one process outside of them, and are like any other process there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from labs import LIMITS
from live_lab import PACELINE, LiveLab, check_nothing_left, live_lab, traces
from live_run import ENDLESS, logged, until

from paceline.lab import client, kernel
from paceline.run.folder import read_ranks, read_summary

pytestmark = pytest.mark.skipif(not kernel.enters_by_pidfd(), reason="NOT TESTED: it takes Linux 5.8")

# What a rank does. What it can tell about itself is what a command on the node can tell about itself.
SMALL = """
import json, os, pathlib, signal, socket, sys, time

def about():
    spaces = {name: os.readlink(f"/proc/self/ns/{name}") for name in ("ipc", "pid", "net", "uts", "mnt", "user")}
    status = dict(line.split(":\\t", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    kept = {name: value for name, value in os.environ.items() if name not in ("WHO", "_", "OPENBLAS_NUM_THREADS")}
    return {"host": socket.gethostname(), "spaces": spaces, "groups": pathlib.Path("/proc/self/cgroup").read_text(),
            "rights": {name: status[name] for name in ("Uid", "CapPrm", "CapEff", "CapAmb", "SigBlk", "SigIgn")},
            "temporary": sorted(os.listdir("/tmp")), "folder": os.getcwd(), "variables": kept,
            "files": sorted(os.listdir("/proc/self/fd")), "session": os.getsid(0) == os.getpid()}

def run(what, *rest):
    if what == "tell":
        pathlib.Path(rest[0]).write_text(json.dumps(about()))
    if what == "exit":
        os._exit(int(rest[0]))
    if what == "wait":
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(9))
        pathlib.Path(rest[0] + "~").write_text(f"{os.getpid()} {os.readlink('/proc/self/ns/pid')}")
        os.rename(rest[0] + "~", rest[0])
        time.sleep(1000)
    if what == "grow":
        signal.pause() if bytearray(700 << 20) else None
    os._exit(0)
"""
# The zygote, and a launcher on the node n1 that obeys lines of its input.
PROGRAM = (
    "import sys; from paceline.lab.spaces import NodeSpaces; from paceline.launch import zygote; "
    "zygote.main(['small'], 'run', NodeSpaces.from_json(sys.argv[1]))"
)
LAUNCHER = """
import json, os, sys
from paceline.launch.placement import AGENT
from paceline.launch.zygote import Zygote
zygote = Zygote([*AGENT, "--outside", sys.executable, "-c", sys.argv[1]], os.environ, None, in_lab=True)
ranks = []
for line in sys.stdin:
    do, *rest = json.loads(line)
    if do == "fork":
        node, *arguments = rest
        ranks.append(zygote.fork("rank", arguments, {"WHO": "me"}, node))
    elif do == "signal":
        ranks[rest[0]].signal(rest[1])
    else:
        print(ranks[rest[0]].wait(60) if do == "wait" else zygote.process.wait(60), flush=True)
zygote.end()
"""


class Launcher:
    """A launcher on n1 and its zygote."""

    def __init__(self, lab: LiveLab, folder: Path) -> None:
        (folder / "small.py").write_text(SMALL)
        self.folder, self._ranks = folder, 0
        theirs, self._write = os.pipe()
        self._read, said = os.pipe()
        before = dict(os.environ) | {"PYTHONPATH": str(folder)}
        words = [sys.executable, "-c", LAUNCHER, PROGRAM]
        self.command = client.begin(lab.plan.name, "n1", words, (theirs, said, 2), before)
        os.close(theirs)
        os.close(said)

    def ask(self, *words: Any) -> None:
        os.write(self._write, f"{json.dumps(words)}\n".encode())

    def fork(self, node: str, *arguments: str) -> int:
        self.ask("fork", node, *arguments)
        self._ranks += 1
        return self._ranks - 1

    def wait(self, *what: Any) -> int:
        """The exit code of a rank, or of the zygote."""
        self.ask(*what)
        line = b""
        while not line.endswith(b"\n"):
            new = os.read(self._read, 1)
            assert new, "the launcher has failed"
            line += new
        return int(line)

    def started(self, node: str, name: str) -> tuple[int, int]:
        """A rank that waits: its number, and its pid on this machine."""
        number = self.fork(node, "wait", str(self.folder / name))
        until("it runs", (self.folder / name).exists)
        return number, outer_pid(*(self.folder / name).read_text().split())

    def end(self) -> None:
        for descriptor in (self._write, self._read):
            with contextlib.suppress(OSError):
                os.close(descriptor)
        with contextlib.suppress(OSError):
            client.wait([self.command])


def outer_pid(inner: str, space: str) -> int:
    """The number on this machine of a process, by its number in a PID namespace."""
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            line = next(x for x in (folder / "status").read_text().splitlines() if x.startswith("NSpid"))
            if line.split()[-1] == inner and os.readlink(folder / "ns" / "pid") == space:
                return int(folder.name)
    raise AssertionError(f"no process {inner} in {space}")


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    return False


@contextlib.contextmanager
def launcher(lab: LiveLab, folder: Path) -> Iterator[Launcher]:
    found = Launcher(lab, folder)
    try:
        yield found
    finally:
        found.end()


needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root sees other processes' namespaces, and has limits")


@needs_root
def test_a_rank_is_like_a_command_on_its_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Namespaces, private folders, control groups, rights, variables, working folder, open files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with live_lab(preset=None, rate="1gbit", share=[str(tmp_path)], **LIMITS) as lab, launcher(lab, tmp_path) as ours:
        told = {}
        for node in ("n1", "n2"):
            lab.python(node, f"open('/tmp/of-{node}', 'w')")
            assert ours.wait("wait", ours.fork(node, "tell", str(tmp_path / node))) == 0
            told[node] = json.loads((tmp_path / node).read_text())
            expected = json.loads(lab.python(node, "import json, small; print(json.dumps(small.about()))"))
            assert told[node] == expected
            assert f"of-{node}" in told[node]["temporary"]
            assert f"/{node}\n" in told[node]["groups"]
        assert not set(told["n1"]["spaces"].values()) & set(told["n2"]["spaces"].values()) - {
            told["n1"]["spaces"]["user"]
        }


@needs_root
def test_limits_hold_for_ranks(tmp_path: Path) -> None:
    with live_lab(preset=None, rate="1gbit", share=[str(tmp_path)], **LIMITS) as lab, launcher(lab, tmp_path) as ours:
        assert ours.wait("wait", ours.fork("n1", "grow")) == -signal.SIGKILL
        grown = ours.fork("n2", "grow")
        _, pid = ours.started("n2", "other")
        assert alive(pid)
        ours.ask("signal", grown, signal.SIGTERM)
        assert ours.wait("wait", grown) == -signal.SIGTERM


@needs_root
def test_exit_codes_and_signals_arrive_and_a_killed_node_takes_its_ranks(tmp_path: Path) -> None:
    before = traces()
    with live_lab(nodes=3, share=[str(tmp_path)]) as lab, launcher(lab, tmp_path) as ours:
        assert ours.wait("wait", ours.fork("n2", "exit", "7")) == 7
        for name, number, code in (("a", signal.SIGUSR1, 9), ("b", signal.SIGTERM, -signal.SIGTERM)):
            rank, pid = ours.started("n3", name)
            ours.ask("signal", rank, number)
            assert ours.wait("wait", rank) == code
            assert not alive(pid)
        stopped, pid = ours.started("n2", "c")
        client.ask(lab.plan.name, "stop", node="n2")
        until("it is stopped", lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T")
        client.ask(lab.plan.name, "continue", node="n2")
        until("it runs", lambda: Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "S")
        client.ask(lab.plan.name, "kill", node="n2")
        assert ours.wait("wait", stopped) == -signal.SIGKILL
        assert not alive(pid)
        assert ours.wait("wait", ours.fork("n2", "exit", "0")) == 2, "a killed node does not come back"
        assert ours.wait("wait", ours.fork("n3", "exit", "0")) == 0
    check_nothing_left(before)


@needs_root
@pytest.mark.parametrize("victim", ["launcher", "zygote", "agent", "n1"])
def test_ranks_end_with_the_processes_that_they_depend_on(victim: str, tmp_path: Path) -> None:
    before = traces()
    with live_lab(nodes=2, share=[str(tmp_path)]) as lab, launcher(lab, tmp_path) as ours:
        ranks = [ours.started(node, f"{node}-{victim}") for node in ("n1", "n2")]
        zygote = int(Path(f"/proc/{ranks[0][1]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        if victim == "launcher":
            ours.command.signal(signal.SIGKILL)
        elif victim == "n1":
            client.ask(lab.plan.name, "kill", node="n1")
        else:
            os.kill(zygote if victim == "zygote" else agent_of(zygote), signal.SIGKILL)
            assert ours.wait("end") == -signal.SIGKILL
            assert [ours.wait("wait", number) for number, _ in ranks] == [-signal.SIGKILL] * 2
        until("all have ended", lambda: not any(alive(pid) for pid in (zygote, *(pid for _, pid in ranks))), 10)
    check_nothing_left(before)


def agent_of(zygote: int) -> int:
    """The process on n1 that has started this zygote."""
    program = Path(f"/proc/{zygote}/cmdline").read_bytes().split(b"\0")[2]
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if b"paceline.lab.agent" in words and program in words:
                return int(folder.name)
    raise AssertionError("it has no agent")


def ranks_of(folder: Path) -> dict[int, int]:
    """The ranks of a run, by their numbers on this machine."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name = (entry / "comm").read_text().strip()
            if name.startswith("paceline-") and str(folder).encode() in (entry / "environ").read_bytes():
                found[int(name.removeprefix("paceline-"))] = int(entry.name)
    return found


@needs_root
@pytest.mark.parametrize("victim", ["rank", "node", "zygote", "launcher"])
def test_a_run_ends_and_says_why(victim: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WHICH_RUN", str(tmp_path))
    before, run = traces(), tmp_path / "run"
    words = [PACELINE, "train", *ENDLESS, "--hidden", "32", "--workers", "3", "--output-dir", str(tmp_path)]
    with live_lab(nodes=3, share=[str(tmp_path)]) as lab, (tmp_path / "said").open("w") as said:
        files = (0, said.fileno(), said.fileno())
        command = client.begin(lab.plan.name, "n1", [*words, "--name", "run"], files)
        until("it trains", lambda: logged(run))
        assert [row.host for row in read_ranks(run)] == ["n1", "n2", "n3"]
        ranks = ranks_of(tmp_path)
        assert sorted(ranks) == [0, 1, 2]
        (zygote,) = {int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) for pid in ranks.values()}
        if victim == "node":
            client.ask(lab.plan.name, "kill", node="n3")
        elif victim == "launcher":
            command.signal(signal.SIGKILL)
        else:
            os.kill(zygote if victim == "zygote" else ranks[2], signal.SIGKILL)
        client.wait([command])
        until("all have ended", lambda: not any(alive(pid) for pid in (zygote, *ranks.values())), 10)
        until("the summary says so", lambda: (found := read_summary(run)) and found.status != "running", 10)
        summary = read_summary(run)
    assert summary is not None
    if victim == "launcher":  # its ranks are asked to end, and may have the time to do so
        assert (command.exit_code, summary.status) in ((-9, "interrupted"), (-9, "failed"))
    else:
        what = "the process that starts the ranks (their zygote)" if victim == "zygote" else "its process"
        assert f"{what} was killed by signal 9" in str(summary.error), summary
        assert (command.exit_code, summary.failed_rank) == (1, None if victim == "zygote" else 2)
    check_nothing_left(before)


def test_ranks_of_another_user_than_root_have_no_rights(tmp_path: Path) -> None:
    """In a user namespace, the zygote keeps the rights to join nodes, and its ranks do not."""
    script = "import small; small.run('tell', 'said')"
    with tempfile.TemporaryDirectory() as name:  # pytest's own are closed to others
        folder = Path(name)
        os.chmod(folder, 0o777)
        (folder / "small.py").write_text(SMALL)
        lines = [["fork", "n2", "tell", "told"], ["wait", 0], ["fork", "n2", "exit", "3"], ["wait", 1]]
        (folder / "todo").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (folder / "launch.py").write_text(LAUNCHER)
        launch = f"{sys.executable} launch.py {json.dumps(PROGRAM)} <todo"
        words = [PACELINE, "lab", "exec", "n2", "--", sys.executable, "-c", json.dumps(script)]
        program = [sys.executable, str(Path(__file__).with_name("as_user.py")), PACELINE, "lab", "run", "1gbit:2", "--"]
        done = subprocess.run(
            [*program, "sh", "-c", f"{launch} && {' '.join(words)}"],
            cwd=folder,
            env=dict(os.environ) | {"PYTHONPATH": name},
            capture_output=True, text=True, timeout=100, check=False,
        )  # fmt: skip
        assert (done.returncode, done.stdout) == (0, "0\n3\n"), done.stderr
        told, said = (json.loads((folder / name).read_text()) for name in ("told", "said"))
        for changing in ("temporary", "files"):
            del told[changing], said[changing]
        assert told == said
        assert int(told["rights"]["CapPrm"], 16) == 0


@pytest.mark.parametrize("fast", [True, False])
def test_where_nodes_cannot_be_joined_agents_start_the_ranks(fast: bool, tmp_path: Path) -> None:
    program = (
        f"import sys; from paceline.launch import zygote; zygote.available_in_lab = lambda: {fast}; "
        "from paceline.cli.main import main; sys.exit(main())"
    )
    words = ["train", "--strategy", "ring", "--workers", "3", "--model", "mlp", "--steps", "2", "--no-test"]
    with live_lab(nodes=2, share=[str(tmp_path)]) as lab:
        where = ["--output-dir", str(tmp_path), "--name", "run"]
        code, said = lab.run("n1", sys.executable, "-c", program, *words, *where)
    assert code == 0, said
    about = json.loads((tmp_path / "run" / "env.json").read_text())
    assert [row["host"] for row in about["ranks"]] == ["n1", "n2", "n2"]
    assert about["command"][1] == ("zygote-of-lab" if fast else "rank")

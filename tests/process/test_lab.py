"""Labs as they are made, used and removed: real namespaces, real links, real signals."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import labs
import pytest
from live_lab import PACELINE, check_nothing_left, live_lab, traces
from live_run import until

from paceline.errors import PacelineError, UsageError
from paceline.lab import client, wire
from paceline.lab.measure import measure
from paceline.lab.plan import make_plan, read_plan


def _values(**more: object) -> dict[str, object]:
    return {key: value for key, value in more.items() if value is not None}


def test_nodes_share_nothing_that_is_of_one_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with live_lab() as lab:
        assert [lab.run(node, "hostname")[1].strip() for node in ("n1", "n2")] == ["n1", "n2"]
        for folder in ("/tmp", "/dev/shm", "/var/tmp", "/run"):
            lab.python("n1", f"open('{folder}/mine', 'w')")
            assert lab.python("n2", f"import os; print(os.path.exists('{folder}/mine'))") == "False"
            assert not os.path.exists(f"{folder}/mine")
        # Sockets without a file belong to a network, System V memory to an ipc namespace.
        hold = "import socket, time; s = socket.socket(socket.AF_UNIX); s.bind('\\0mine'); s.listen(); time.sleep(60)"
        holding = client.begin(lab.plan.name, "n1", [sys.executable, "-c", hold])
        seen = "print(any('@mine' in line for line in open('/proc/net/unix')))"
        until("the socket is there", lambda: lab.python("n1", seen) == "True")
        assert lab.python("n2", seen) == "False"
        holding.connection.close()
        spaces = "import os; print(*(os.readlink(f'/proc/self/ns/{k}') for k in ('ipc', 'pid', 'net', 'uts', 'mnt')))"
        first, second = (set(lab.python(node, spaces).split()) for node in ("n1", "n2"))
        assert len(first) == 5
        assert not first & second
        # What they do share is the working folder, as on a cluster's common file system.
        lab.python("n1", "open('common', 'w').write('seen')")
        assert lab.python("n2", "print(open('common').read())") == "seen"
        assert (tmp_path / "common").read_text() == "seen"


def test_two_labs_do_not_meet_and_a_name_is_taken_once() -> None:
    before = traces()
    with live_lab() as lab, live_lab(name="test-other") as other:
        assert lab.plan.nodes[0].address == other.plan.nodes[0].address
        serve = "import socket; s = socket.create_server(('10.0.0.2', 5000)); print('up', flush=True); s.accept()"
        serving = client.begin(lab.plan.name, "n2", [sys.executable, "-c", serve], (0, 2, 2))
        connect = "import socket; socket.create_connection(('10.0.0.2', 5000), 2)"
        assert other.run("n1", sys.executable, "-c", connect)[0] != 0
        until("the server is up", lambda: lab.run("n1", sys.executable, "-c", connect)[0] == 0)
        client.wait([serving])
        with pytest.raises(UsageError, match=r"a lab named 'test-other' is already up"):
            client.start(make_plan({"preset": "1gbit", "name": "test-other"}, "test"), detached=False)
        assert {lab.plan.name, "test-other"} <= set(client.names())
    check_nothing_left(before)


def test_a_command_is_run_as_if_it_were_here(tmp_path: Path) -> None:
    def lab(*words: str, typed: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run([PACELINE, "lab", *words], cwd=tmp_path, capture_output=True, text=True, timeout=60,
                              check=False, input=typed)  # fmt: skip

    before = traces()
    done = lab("run", "home:2", "--", "sh", "-c", "cat; pwd; echo oops >&2; exit 7", typed="hello\n")
    assert (done.returncode, done.stdout, done.stderr) == (7, f"hello\n{tmp_path}\n", "oops\n")
    done = lab("run", "home:2", "--each", "--", "echo", "{name} is {index} of {nodes}, {head}")
    assert sorted(done.stdout.splitlines()) == ["n1 is 0 of 2, 10.0.0.1", "n2 is 1 of 2, 10.0.0.1"]
    assert lab("run", "home:2", "--", "sh", "-c", "kill -9 $$").returncode == 128 + 9
    assert lab("run", "home:2", "--", "no-such-program").returncode == 127
    (tmp_path / "faulty.toml").write_text('preset = "home"\n[[fault]]\nat = 0.2\ndo = "kill"\nnode = "n1"\n')
    done = lab("run", "faulty.toml", "--", "sleep", "60")
    assert (done.returncode, done.stderr) == (128 + 9, "paceline lab: 0.2 s: kill n1\n")
    name = f"test-cli-{os.getpid()}"
    done = lab("up", "two-racks", "--name", name)
    assert "n4" in done.stdout
    assert "rack 2: 500 Mbit/s up" in done.stdout
    assert lab("exec", "--name", name, "n3", "--", "hostname").stdout == "n3\n"
    assert lab("kill", "--name", name, "n4").returncode == 0
    until("the node is known to be gone", lambda: "killed" in lab("status", name).stdout)
    assert "has been killed" in lab("exec", "--name", name, "n4", "--", "true").stderr
    (found,) = json.loads(lab("status", name, "--json").stdout)["labs"]
    states = {node["name"]: (node["rack"], node["state"]) for node in found["nodes"]}
    assert states == {"n1": (0, "up"), "n2": (0, "up"), "n3": (1, "up"), "n4": (1, "killed")}
    rates = json.loads(lab("measure", name, "--seconds", "0.2", "--json").stdout)
    assert {(rate["flows"], rate["node"], rate["way"]) for rate in rates[:2]} == {
        ("n1 to n2", "n1", "up"),
        ("n1 to n2", "n2", "down"),
    }
    assert lab("down", name).returncode == 0
    assert name not in client.names()
    check_nothing_left(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_command_and_then_the_lab_ends(number: int, tmp_path: Path) -> None:
    before = traces()
    command = "trap 'echo caught; exit 5' INT TERM; echo up; while true; do sleep 0.1; done"
    with subprocess.Popen([PACELINE, "lab", "run", "home:2", "--", "sh", "-c", command], cwd=tmp_path,
                          stdout=subprocess.PIPE, text=True, start_new_session=True) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(number)
        assert process.communicate(timeout=30)[0] == "caught\n"
    assert process.returncode == 5
    check_nothing_left(before)


def test_a_standard_file_that_is_closed_is_an_empty_one_for_the_command(tmp_path: Path) -> None:
    """And not whatever got its number: the lab's own socket, from which a command would read forever."""
    words = f"{PACELINE} lab run home:1 -- sh -c 'echo hi; cat; echo end' <&-"
    done = subprocess.run(["sh", "-c", words], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "hi\nend\n", "")


def test_requests_of_any_length_races_and_odd_sockets_do_not_harm_a_lab(tmp_path: Path) -> None:
    with live_lab() as lab:
        large = {f"LARGE{i}": "x" * 100_000 for i in range(12)}
        read, write = os.pipe()
        command = client.begin(lab.plan.name, "n1", ["sh", "-c", "echo ${#LARGE11}"], (0, write, 2), os.environ | large)
        client.wait([command])
        assert os.read(read, 99) == b"100000\n"
        os.close(read)
        os.close(write)
        # A command that ends in the moment in which its client says something, or goes.
        for _ in range(30):
            command = client.begin(lab.plan.name, "n1", ["true"])
            command.signal(signal.SIGUSR1)
            command.signal(signal.SIGUSR1)
            command.connection.close()
        assert lab.run("n1", "true")[0] == 0
        odd = [b"\0\xff odd", wire.name_of("odd name\n").encode()]
        sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in odd]
        for one, name in zip(sockets, odd, strict=True):
            one.bind(name)
            one.listen()
        assert lab.plan.name in client.names()
        assert not any(name.startswith("odd") for name in client.names())
        for one in sockets:
            one.close()


def test_a_lab_in_a_node_of_a_lab_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with live_lab() as lab:
        code, said = lab.run(
            "n1", PACELINE, "lab", "run", "home:3", "--", PACELINE, "lab", "exec", "n3", "--", "hostname"
        )
        assert (code, said) == (0, "n3\n")
        code, said = lab.run("n1", PACELINE, "lab", "down")
        assert code == 2
        assert "cannot be ended from one of its nodes" in said


@pytest.mark.parametrize("victim", labs.MADE)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_of_a_lab_that_is_ended_while_it_is_made(victim: str, number: int, tmp_path: Path) -> None:
    labs.end_while_made(victim, number, tmp_path)


@pytest.mark.parametrize("victim", labs.USED)
@pytest.mark.parametrize("size", [{"nodes": 2}, labs.LIMITS], ids=["plain", "limited"])
def test_nothing_is_left_of_a_lab_however_it_ends(victim: str, size: dict[str, Any]) -> None:
    """`make soak` does the same many times."""
    labs.end_in_use(victim, size, busy="nodes" in size)


def test_slow_links_between_racks_do_not_make_the_machine_look_slow() -> None:
    with live_lab(racks=2, rack_rate="20mbit", rate="15mbit") as lab:
        assert len({node.rack for node in lab.plan.nodes}) == len(lab.plan.nodes) == 2
        assert client.ask(lab.plan.name, "status")["flags"] == []


def test_a_link_keeps_to_its_speed_and_packets_are_packets() -> None:
    """How near it comes is benchmarks/lab_links.py's to say; more than the kernel lets through, it cannot be."""
    with live_lab(preset=None, rate="20mbit") as lab:
        rates = measure(lab.plan.name, lab.plan, [("n1", "n2")], 1.0)
        sent = next(rate for rate in rates if (rate.node, rate.way) == ("n1", "up"))
        assert 0 < sent.measured / sent.asked < 1.05
        line = next(line for line in lab.run("n2", "cat", "/proc/net/dev")[1].splitlines() if "eth0" in line)
        received, packets = map(int, line.split(":")[1].split()[:2])
        assert received / packets < 1514


def test_a_cut_node_is_silent_and_a_slowed_one_slow() -> None:
    with live_lab(preset=None, rate="20mbit") as lab:
        ping = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(1)\n"
            "s.sendto(b'?', ('10.0.0.2', 5000))\ntry: print(s.recv(9).decode())\nexcept TimeoutError: print('silence')"
        )
        echo = (
            "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(('10.0.0.2', 5000))\n"
            "while True: s.sendto(b'here', s.recvfrom(9)[1])"
        )
        echoing = client.begin(lab.plan.name, "n2", [sys.executable, "-c", echo])
        until("it answers", lambda: lab.python("n1", ping) == "here")
        for fault, answer in (("cut", "silence"), ("heal", "here"), ("stop", "silence"), ("continue", "here")):
            client.ask(lab.plan.name, fault, node="n2")
            assert lab.python("n1", ping) == answer, fault
        client.ask(lab.plan.name, "slow", node="n2", down=2_000_000)
        rates = measure(lab.plan.name, lab.plan, [("n1", "n2")], 1.0)
        assert next(rate for rate in rates if rate.node == "n2" and rate.way == "down").measured < 2_500_000
        client.ask(lab.plan.name, "kill", node="n2")
        client.wait([echoing])
        assert echoing.exit_code == -signal.SIGKILL
        until("it is gone", lambda: client.ask(lab.plan.name, "status")["states"]["n2"] == "killed")
        with pytest.raises(PacelineError, match="n2 has been killed"):
            client.ask(lab.plan.name, "cut", node="n2")


def test_control_groups_keep_a_node_to_its_cores_and_memory() -> None:
    burn = "import time\nt = time.time()\nwhile time.time() < t + 1: pass\nprint(time.process_time())"
    with live_lab(**_values(preset=None, rate="1gbit", **labs.LIMITS)) as lab:
        assert float(lab.python("n1", burn)) < 0.7
        assert lab.run("n1", sys.executable, "-c", "x = bytearray(700 << 20)")[0] == -signal.SIGKILL
        assert lab.run("n2", sys.executable, "-c", "x = bytearray(700 << 20)")[0] == 0


def test_works_for_a_user_without_any_power() -> None:
    """As another user than root, in a user namespace; what needs root is refused in a sentence."""
    with tempfile.TemporaryDirectory() as folder:  # pytest's own are closed to others
        os.chmod(folder, 0o777)
        check_works_for_another_user(Path(folder))


def check_works_for_another_user(tmp_path: Path) -> None:
    before = traces()
    words = [sys.executable, str(Path(__file__).with_name("as_user.py")), PACELINE, "lab", "run"]
    (tmp_path / "limits.toml").write_text('rate = "1gbit"\n[[node]]\ncpu = 0.5\n')

    def run(*more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*words, *more], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    done = run("home:2", "--", PACELINE, "lab", "exec", "n2", "--", "sh", "-c", "hostname; id -u")
    assert (done.stdout, done.stderr) == ("n2\n12345\n", "")
    done = run("limits.toml", "--", "true")
    assert done.returncode == 2
    assert "only root can create" in done.stderr
    check_nothing_left(before)


def test_refused_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/tmp")
    with pytest.raises(UsageError, match="private to every node"):
        client.start(read_plan("home"), detached=False)
    done = subprocess.run([PACELINE, "lab", "run", "hom:2", "--", "true"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'home'" in done.stderr

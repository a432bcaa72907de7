"""`paceline watch` as a process: it serves this machine alone, refuses what it should, and ends with Ctrl-C."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from live_run import BIN, listening_elsewhere, until
from made_up import steady, write_run

# A shell that runs the tests in the background lets its children ignore Ctrl-C.
WATCH = ["env", "--default-signal=INT", str(BIN / "paceline"), "watch"]


@dataclass
class Watch:
    """A started command, and where its page is."""

    process: subprocess.Popen[str]
    folder: Path
    port: int

    def ask(self, path: str, method: str = "GET", host: str | None = None) -> tuple[int, dict[str, str], str]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request(method, path, headers={"Host": host or f"127.0.0.1:{self.port}"})
            answer = connection.getresponse()
            return answer.status, dict(answer.getheaders()), answer.read().decode()
        finally:
            connection.close()


@pytest.fixture(scope="module")
def watch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watch]:
    runs = tmp_path_factory.mktemp("runs")
    folder = write_run(runs / "run", steady(0.1, 30), workers=2)
    process = subprocess.Popen([*WATCH, str(runs)], text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout
        found = re.fullmatch(r"Watching (.*) at http://127\.0\.0\.1:(\d+)/ \(Ctrl-C .*\n", process.stdout.readline())
        assert found
        assert found[1] == str(folder)
        yield Watch(process, folder, int(found[2]))
    finally:
        process.kill()
        process.communicate()


def test_the_page_its_parts_and_the_state_are_served_with_a_strict_policy(watch: Watch) -> None:
    for path, kind in {"/": "text/html", "/page.js": "text/javascript", "/style.css": "text/css",
                       "/state.json": "application/json", "/?x=1": "text/html"}.items():  # fmt: skip
        for host in (f"127.0.0.1:{watch.port}", f"localhost:{watch.port}", "localhost"):
            status, headers, text = watch.ask(path, host=host)
            assert (status, headers["Content-Type"].split(";")[0]) == (200, kind)
            assert headers["X-Content-Type-Options"] == "nosniff"
            policy = headers["Content-Security-Policy"]
            assert policy.startswith("default-src 'none'; script-src 'self';")
            assert "unsafe" not in policy
            assert "<script>" not in text
        assert watch.ask(path, "HEAD")[::2] == (200, "")
    assert json.loads(watch.ask("/state.json")[2])["progress"]["steps"] == "step 30"


def test_other_hosts_paths_and_methods_are_refused_in_plain_words(watch: Watch) -> None:
    for host in ("evil.example", f"evil.example:{watch.port}", "127.0.0.1.evil.example", "[::1]", "0.0.0.0"):
        assert watch.ask("/state.json", host=host)[::2] == (403, "ask for http://127.0.0.1 or http://localhost\n")
    for path in ("/../../../etc/passwd", "/spec.toml", "/page.html", "/%2e%2e/x", "x"):
        assert watch.ask(path)[::2] == (404, "there is no such page\n")
    for method in ("POST", "PUT", "DELETE", "OPTIONS", "<script>"):
        status, headers, text = watch.ask("/", method)
        assert (status, headers["Content-Type"]) == (501, "text/plain; charset=utf-8")
        assert "Traceback" not in text
    with socket.create_connection(("127.0.0.1", watch.port)) as raw:  # no HTTP at all
        raw.sendall(b"\0\xff\r\n\r\n")
        assert b"Traceback" not in raw.recv(65536)
    assert watch.ask("/")[0] == 200


def test_it_listens_on_loopback_only_and_a_port_in_use_is_an_error(watch: Watch) -> None:
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if " 0A " in line]
    assert f"0100007F:{watch.port:04X}" in listening
    assert listening_elsewhere({watch.process.pid}) == set()
    command = [*WATCH, str(watch.folder), "--port", str(watch.port)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"paceline: --port {watch.port} is in use; choose another, or leave --port out for one that is free\n"
    )


def test_a_damaged_file_is_told_and_ctrl_c_ends_it_quietly(watch: Watch) -> None:
    """The last test of this process."""
    (watch.folder / "summary.json").write_text("{")
    (watch.folder / "rank_0.jsonl").write_text("{]\n")

    def is_told() -> bool:
        return any("summary.json cannot be read" in note for note in json.loads(watch.ask("/state.json")[2])["notes"])

    until("the page tells that the summary is damaged", is_told)  # an answer may be a little older than the file
    watch.process.send_signal(signal.SIGINT)
    _, errors = watch.process.communicate(timeout=60)
    assert (watch.process.returncode, errors) == (0, "")


@pytest.mark.parametrize("port", ["0", "65536", "-1", "http", "²"])
def test_what_is_no_port_is_refused(port: str, tmp_path: Path) -> None:
    done = subprocess.run([*WATCH, str(tmp_path), f"--port={port}"], check=False, capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{port!r} is not a port: give a whole number from 1 to 65535" in done.stderr


def test_what_is_no_run_is_an_error_before_anything_listens(tmp_path: Path) -> None:
    done = subprocess.run(WATCH, cwd=tmp_path, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "paceline: runs is not a folder: give a run folder, such as runs/NAME, or a folder of them\n"
